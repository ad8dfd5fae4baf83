"""The latent recurrent Transformer's training on Maglev's network: refinement passes, no prefiller.

The first pass has zero memory, gates on. Its loss and those of all later passes count equally, each the mean of its
positions. Where some have no target, a pass counts by how many of its positions have one: what a row adds to the mean
over a batch is then the same, whatever rows it is computed with.
"""

import torch
from torch import Tensor

from maglev.config import LRTConfig
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, Objective, next_token_loss
from maglev.objectives.sweeps import Sweeps, scatter


class LRTObjective(Objective):
    def __init__(self, decoder: Decoder, config: LRTConfig) -> None:
        super().__init__(decoder)
        self.passes = config.passes
        self.run_schedule = {"interleaved": self.interleaved, "full": self.full}[config.schedule]

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents = WHOLE_ROWS) -> Losses:
        losses = self.run_schedule(tokens, targets, documents)
        loss = torch.stack(losses).mean()
        return Losses(total=loss, next_token=loss, consistency=torch.zeros_like(loss))

    def full(self, tokens: Tensor, targets: Tensor, documents: Documents) -> list[Tensor]:
        """K passes over all positions, each on the memories of the one before."""
        memory = self.zero_memory(tokens)
        losses = []
        for _ in range(self.passes):
            previous_memory = shift_right(memory, documents.memory_keep, self.decoder.config.delay)
            memory = self.decoder(tokens, previous_memory, starts=documents.attention_starts)
            losses.append(next_token_loss(self.decoder, memory, targets))
        return losses

    def interleaved(self, tokens: Tensor, targets: Tensor, documents: Documents) -> list[Tensor]:
        """A full pass that keeps every layer's K/V, then S passes over the positions p with p mod S = i."""
        length = tokens.shape[1]
        subsets = [range(first, length, self.passes) for first in range(min(self.passes, length))]
        sweeps = Sweeps(self.decoder, tokens, documents)
        memory = self.zero_memory(tokens)
        losses = []
        for positions in [range(length), *subsets]:
            fresh = sweeps.run(memory, positions)
            memory = scatter(memory, fresh, positions)
            own = targets[:, positions.start :: positions.step]
            loss = next_token_loss(self.decoder, fresh, own)
            # 1 where every position has a target
            weight = density(own, loss.dtype) / density(targets, loss.dtype).clamp_min(torch.finfo(loss.dtype).tiny)
            losses.append(weight * loss)
        return losses

    def zero_memory(self, tokens: Tensor) -> Tensor:
        width, dtype = self.decoder.config.width, self.decoder.compute_dtype
        return torch.zeros(*tokens.shape, width, dtype=dtype, device=tokens.device)


def density(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """The share of positions that have a target."""
    return (targets >= 0).to(dtype).mean()
