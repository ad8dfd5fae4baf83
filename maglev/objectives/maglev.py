"""Lifted parallel training: Q writes the memories, P reads them shifted, predicts, and learns to write them itself."""

from collections.abc import Callable

from torch import Tensor

from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, Objective, next_token_loss, token_mean
from maglev.objectives.prefiller import Prefiller
from maglev.ops.reference import consistency


class MaglevObjective(Objective):
    consistency: Callable[[Tensor, Tensor], Tensor] = staticmethod(consistency)

    def __init__(self, decoder: Decoder, prefiller: Prefiller, consistency_weight: float) -> None:
        super().__init__(decoder)
        self.prefiller = prefiller
        self.consistency_weight = consistency_weight

    def lifted(self, tokens: Tensor, documents: Documents = WHOLE_ROWS) -> tuple[Tensor, Tensor]:
        """P's memories on Q's, and Q's: m_{1:T}, m'_{1:T}."""
        starts, embedded = documents.attention_starts, self.decoder.embedding(tokens)
        target_memory = self.prefiller(tokens, self.decoder, starts, embedded)  # (B, T, D)
        previous_memory = shift_right(target_memory, documents.memory_keep, self.decoder.config.delay)
        return self.decoder(tokens, previous_memory, starts=starts, embedded=embedded), target_memory

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents = WHOLE_ROWS) -> Losses:
        return self.compare(*self.lifted(tokens, documents), targets)

    def compare(self, memory: Tensor, target_memory: Tensor, targets: Tensor) -> Losses:
        """What P's memories predict, and how far they are from Q's. memories (B, T, D), targets (B, T)"""
        next_token = next_token_loss(self.decoder, memory, targets)
        apart = token_mean(self.consistency(memory, target_memory), targets)
        return Losses(next_token + self.consistency_weight * apart, next_token, apart)
