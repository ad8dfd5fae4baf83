"""Passes over some positions at a time, each on the freshest memories and on the K/V that the passes before left."""

import torch
from torch import Tensor

from maglev.model.attention import Recording
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.objectives.losses import Documents
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention

# so many subsets of positions have graphs of their own, with attention in them
FEW_SUBSETS = 2


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
            mixed_key = scatter(self.before.key, mixed_key, self.plan.queries)
            mixed_value = scatter(self.before.value, mixed_value, self.plan.queries)
        self.key, self.value = mixed_key, mixed_value
        return windowed_attention(query, mixed_key, mixed_value, self.plan)


class ApartBuffer(Buffer):
    """One that the compiler leaves out of a block's graphs, which then are the same wherever a pass begins."""

    __call__ = torch.compiler.disable(Buffer.__call__)


def scatter(into: Tensor, values: Tensor, positions: range) -> Tensor:
    """`into` (B, T, ...) with `values` (B, T / S, ...) at `positions`; a new tensor, so that gradients reach both what
    stays and what is replaced."""
    return into.slice_scatter(values, dim=1, start=positions.start, end=into.shape[1], step=positions.step)


class Sweeps:
    """Of one batch, tokens (B, T). The first pass is over all positions."""

    def __init__(self, decoder: Decoder, tokens: Tensor, documents: Documents) -> None:
        self.decoder, self.tokens, self.documents = decoder, tokens, documents
        self.before: list[Buffer | None] = [None] * len(decoder.blocks)
        self.slots = torch.arange(tokens.shape[1], device=tokens.device)

    def run(self, memory: Tensor, positions: range, embedded: Tensor | None = None) -> Tensor:
        """Memories (B, T, D) as they are -> those of `positions` anew, (B, T / S, D)."""
        kind = Buffer if positions.step <= FEW_SUBSETS else ApartBuffer
        buffers = [kind(plan, own) for plan, own in zip(self.plans(positions), self.before, strict=True)]
        at = slice(positions.start, None, positions.step)
        previous_memory = shift_right(memory, self.documents.memory_keep)[:, at].contiguous()
        own = None if embedded is None else embedded[:, at].contiguous()
        fresh = self.decoder.run(self.tokens[:, at], self.slots[at], previous_memory, buffers, own)
        self.before = [*buffers]
        return fresh

    def plans(self, positions: range) -> list[AttentionPlan]:
        decoder, starts = self.decoder, self.documents.attention_starts
        if starts is not None:
            starts = starts[:, positions.start :: positions.step]

        def plan_for(window: int) -> AttentionPlan:
            return plan_attention(
                window,
                self.tokens.shape[1],
                self.tokens.device,
                positions,
                starts,
                dtype=decoder.compute_dtype,
                head_dim=decoder.config.head_dim,
                kernel=decoder.attention_kernel,
                entries=decoder.config.entries,
            )

        plans = {window: plan_for(window) for window in set(decoder.config.windows)}
        return [plans[window] for window in decoder.config.windows]
