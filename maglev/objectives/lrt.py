"""The latent recurrent Transformer's training on Maglev's network: refinement passes, no prefiller.

The first pass has zero memory, gates on. Its loss and those of all later passes count equally.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from maglev.config import LRTConfig
from maglev.model.attention import Recording
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, Objective, next_token_loss
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention


class Buffer(Recording):
    """One layer's mixed K/V of all positions as a pass leaves them: those of the pass before with its own written in.

    What the pass before left stays as it was, so that a pass which is run again, to recompute it, gives the same.
    """

    def __init__(self, plan: AttentionPlan, before: "Buffer | None") -> None:
        self.plan, self.before = plan, before
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        if self.before is not None:
            assert self.before.key is not None and self.before.value is not None
            # out of place, so that gradients reach both what stays and what is replaced
            mixed_key = scatter(self.before.key, mixed_key, self.plan.queries)
            mixed_value = scatter(self.before.value, mixed_value, self.plan.queries)
        self.key, self.value = mixed_key, mixed_value
        return windowed_attention(query, mixed_key, mixed_value, self.plan)


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
        before: Sequence[Buffer | None] = [None] * len(self.decoder.blocks)
        memory = self.zero_memory(tokens)
        losses = []
        subsets = [range(first, length, self.passes) for first in range(min(self.passes, length))]
        for positions in [range(length), *subsets]:
            plans = self.plans(positions, documents, tokens)
            buffers = [Buffer(plan, own) for plan, own in zip(plans, before, strict=True)]
            at = slice(positions.start, None, positions.step)
            previous_memory = shift_right(memory, documents.memory_keep)[:, at]
            slots = torch.arange(length, device=tokens.device)[at]
            fresh = self.decoder.run(tokens[:, at], slots, previous_memory, buffers)
            before = buffers
            memory = scatter(memory, fresh, positions)
            losses.append(next_token_loss(self.decoder, fresh, targets[:, at]))
        return losses

    def zero_memory(self, tokens: Tensor) -> Tensor:
        width, dtype = self.decoder.config.width, self.decoder.compute_dtype
        return torch.zeros(*tokens.shape, width, dtype=dtype, device=tokens.device)

    def plans(self, positions: range, documents: Documents, tokens: Tensor) -> list[AttentionPlan]:
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
                kernel=decoder.attention_kernel,
                entries=decoder.config.entries,
            )

        plans = {window: plan_for(window) for window in set(windows)}
        return [plans[window] for window in windows]
