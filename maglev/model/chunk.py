"""Parallel passes over the positions that follow a state: the bridge between whole passes and single steps."""

from abc import ABC, abstractmethod
from copy import copy

import torch
from torch import Tensor

from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention


class Span:
    """Mixed K/V of one layer, in order: the W - 1 positions before the chunk, then the chunk's own."""

    def __init__(self, ring: RingCache, length: int, rows: int | None = None) -> None:
        """`rows` other than the ring's leave room for more."""
        batch, self.window, kv_heads, head_dim = ring.key.shape
        self.history = self.window - 1
        shape = (rows or batch, self.history + length, kv_heads, head_dim)
        self.key, self.value = (ring.key.new_empty(shape) for _ in range(2))
        # rows that have read less than the window have empty slots at the front
        self.empty = torch.full((shape[0],), self.history, dtype=torch.int64, device=ring.key.device)

    def first_rows(self, count: int) -> "Span":
        """The same memory, fewer rows: what is written to one is seen in the other."""
        part = copy(self)
        part.key, part.value, part.empty = self.key[:count], self.value[:count], self.empty[:count]
        return part

    def fill_(self, ring: RingCache, position: Tensor) -> None:
        """Take the W - 1 positions before `position` (B,) from the ring; what lies before 0 is never looked at."""
        slots = (position[:, None] - self.history + torch.arange(self.history, device=position.device)) % self.window
        row = torch.arange(position.shape[0], device=position.device)[:, None]
        self.key[:, : self.history], self.value[:, : self.history] = ring.key[row, slots], ring.value[row, slots]
        self.empty.copy_((self.history - position).clamp_min(0))

    def queries(self, subset: range) -> range:
        """Where positions of the chunk are among the keys."""
        return range(self.history + subset.start, self.history + subset.stop, subset.step)


class Chunk(ABC):
    """Tokens (B, C) that come after `state`; the state changes only on `commit_`."""

    def __init__(self, tokens: Tensor, state: DecoderState, spans: list[Span] | None = None) -> None:
        """`spans` of the right size are written over, else there are new ones."""
        self.tokens = tokens
        self.length = tokens.shape[1]
        self.first_memory = state.memory[:, None]  # (B, 1, D)
        self.positions = state.position[:, None] + torch.arange(self.length, device=tokens.device)  # (B, C)
        self.spans = [Span(ring, self.length) for ring in state.caches] if spans is None else spans
        for span, ring in zip(self.spans, state.caches, strict=True):
            span.fill_(ring, state.position)
        self.memory = self.first_memory

    @abstractmethod
    def compute(self, subset: range, previous_memory: Tensor | None) -> Tensor:
        """The memories (B, Q, D) of these positions, on K/V that the spans keep; theirs are written there."""

    def run(self, memory: Tensor | None, subset: range | None = None) -> Tensor:
        """Compute all positions, or later some of them again, on the chunk's memories so far; None where there are
        none. -> (B, C, D)"""
        whole = subset is None
        subset = range(self.length) if subset is None else subset
        at = slice(subset.start, None, subset.step)
        previous = None if memory is None else torch.cat((self.first_memory, memory[:, :-1]), dim=1)[:, at]
        fresh = self.compute(subset, previous)
        if whole or memory is None:
            self.memory = fresh
        else:
            self.memory = memory.slice_scatter(fresh, 1, subset.start, self.length, subset.step)
        return self.memory

    def commit_(self, state: DecoderState, count: int) -> None:
        """Take the first `count` positions as they were last computed into the state."""
        row = torch.arange(self.tokens.shape[0], device=self.tokens.device)[:, None]
        for cache, span in zip(state.caches, self.spans, strict=True):
            kept = slice(max(0, count - span.window), count)
            slots = self.positions[:, kept] % span.window
            cache.key[row, slots] = span.key[:, span.history :][:, kept]
            cache.value[row, slots] = span.value[:, span.history :][:, kept]
        state.memory = self.memory[:, count - 1].clone()
        state.position = state.position + count

    def commit_rows_(self, state: DecoderState, counts: Tensor) -> None:
        """`commit_` with a count (B,) of its own for every row, 0 among them: rows that are padded on the right."""
        row = torch.arange(self.tokens.shape[0], device=self.tokens.device)[:, None]
        for cache, span in zip(state.caches, self.spans, strict=True):
            offset = torch.arange(min(span.window, self.length), device=self.tokens.device)
            # as many positions back from a row's last: the slots differ, also of those that lie before the chunk
            index = counts[:, None] - 1 - offset  # (B, K)
            slots = (state.position[:, None] + index) % span.window
            own = (index >= 0)[..., None, None]
            source = span.history + index.clamp_min(0)
            cache.key[row, slots] = torch.where(own, span.key[row, source], cache.key[row, slots])
            cache.value[row, slots] = torch.where(own, span.value[row, source], cache.value[row, slots])
        last = self.memory[row[:, 0], (counts - 1).clamp_min(0)]  # (B, D)
        state.memory = torch.where((counts > 0)[:, None], last, state.memory)
        state.position = state.position + counts


class SpanAttend:
    """Some positions of a chunk: their K/V go into the span, and their queries see it."""

    def __init__(self, span: Span, plan: AttentionPlan) -> None:
        self.span, self.plan = span, plan

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        queries = self.plan.queries
        at = slice(queries.start, None, queries.step)
        self.span.key[:, at], self.span.value[:, at] = mixed_key, mixed_value
        return windowed_attention(query, self.span.key, self.span.value, self.plan)


class ChunkPass(Chunk):
    """With the decoder itself: any device and precision."""

    def __init__(self, decoder: Decoder, tokens: Tensor, state: DecoderState) -> None:
        super().__init__(tokens, state)
        self.decoder = decoder
        self.plans: dict[tuple[int, range], AttentionPlan] = {}

    def plan(self, span: Span, subset: range) -> AttentionPlan:
        if (span.window, subset) not in self.plans:
            starts = span.empty[:, None].expand(-1, len(subset)) if bool((span.empty > 0).any()) else None
            self.plans[span.window, subset] = plan_attention(
                span.window,
                span.key.shape[1],
                self.tokens.device,
                span.queries(subset),
                starts,
                entries=self.decoder.config.entries,
            )
        return self.plans[span.window, subset]

    def compute(self, subset: range, previous_memory: Tensor | None) -> Tensor:
        at = slice(subset.start, None, subset.step)
        attends = [SpanAttend(span, self.plan(span, subset)) for span in self.spans]
        return self.decoder.run(self.tokens[:, at], self.positions[:, at], previous_memory, attends)
