"""Transformer and SWA: no memory, one pass."""

import torch
from torch import Tensor

from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, Objective, next_token_loss


class NextTokenObjective(Objective):
    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents = WHOLE_ROWS) -> Losses:
        memory = self.decoder(tokens, starts=documents.attention_starts)
        loss = next_token_loss(self.decoder, memory, targets)
        return Losses(total=loss, next_token=loss, consistency=torch.zeros_like(loss))
