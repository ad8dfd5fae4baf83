"""The latent recurrent Transformer's training on Maglev's network: refinement passes, no prefiller.

The first pass has zero memory, gates on. Its loss and those of all later passes count equally.
"""

import torch
from torch import Tensor

from maglev.config import LRTConfig
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, Objective, next_token_loss
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention


class Buffer:
    """One layer's mixed K/V of all positions. A pass over a subset writes its own entries, then sees them all."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.plan: AttentionPlan | None = None

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        assert self.plan is not None
        if self.key is None or self.value is None:
            self.key, self.value = mixed_key, mixed_value
        else:
            # out of place, so that gradients reach both what stays and what is replaced
            self.key = scatter(self.key, mixed_key, self.plan.queries)
            self.value = scatter(self.value, mixed_value, self.plan.queries)
        return windowed_attention(query, self.key, self.value, self.plan)


def scatter(into: Tensor, values: Tensor, positions: range) -> Tensor:
    """`into` (B, T, ...) with `values` (B, T / S, ...) at `positions`."""
    return into.slice_scatter(values, dim=1, start=positions.start, end=into.shape[1], step=positions.step)


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
            previous_memory = shift_right(memory, documents.memory_keep)
            memory = self.decoder(tokens, previous_memory, starts=documents.attention_starts)
            losses.append(next_token_loss(self.decoder, memory, targets))
        return losses

    def interleaved(self, tokens: Tensor, targets: Tensor, documents: Documents) -> list[Tensor]:
        """A full pass that keeps every layer's K/V, then S passes over the positions p with p mod S = i."""
        length = tokens.shape[1]
        buffers = [Buffer() for _ in self.decoder.config.windows]
        memory = self.zero_memory(tokens)
        losses = []
        subsets = [range(first, length, self.passes) for first in range(min(self.passes, length))]
        for positions in [range(length), *subsets]:
            self.plan(buffers, positions, documents, tokens)
            at = slice(positions.start, None, positions.step)
            previous_memory = shift_right(memory, documents.memory_keep)[:, at]
            slots = torch.arange(length, device=tokens.device)[at]
            fresh = self.decoder.run(tokens[:, at], slots, previous_memory, buffers)
            memory = scatter(memory, fresh, positions)
            losses.append(next_token_loss(self.decoder, fresh, targets[:, at]))
        return losses

    def zero_memory(self, tokens: Tensor) -> Tensor:
        width, dtype = self.decoder.config.width, self.decoder.compute_dtype
        return torch.zeros(*tokens.shape, width, dtype=dtype, device=tokens.device)

    def plan(self, buffers: list[Buffer], positions: range, documents: Documents, tokens: Tensor) -> None:
        windows = self.decoder.config.windows
        starts = documents.attention_starts
        if starts is not None:
            starts = starts[:, positions.start :: positions.step]

        def plan_for(window: int) -> AttentionPlan:
            decoder, length = self.decoder, tokens.shape[1]
            return plan_attention(
                window,
                length,
                tokens.device,
                positions,
                starts,
                dtype=decoder.compute_dtype,
                head_dim=decoder.config.head_dim,
            )

        plans = {window: plan_for(window) for window in set(windows)}
        for buffer, window in zip(buffers, windows, strict=True):
            buffer.plan = plans[window]
