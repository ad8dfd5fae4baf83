"""Parallel passes over the positions that follow a state: the bridge between whole passes and single steps."""

from abc import ABC, abstractmethod
from copy import copy

import torch
from torch import Tensor

from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention


class Span:
    """Mixed K/V of one layer, in order: the W - 1 positions before the chunk, then room for the chunk's own."""

    def __init__(self, ring: RingCache, room: int, rows: int | None = None) -> None:
        """`rows` other than the ring's leave room for more."""
        batch, self.window, kv_heads, head_dim = ring.key.shape
        self.history = self.window - 1
        shape = (rows or batch, self.history + room, kv_heads, head_dim)
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

    def advance_(self, count: int) -> None:
        """The chunk begins `count` positions later: those are history now."""
        for each in (self.key, self.value):
            # what lies over one another is not copied in order
            each[:, :-count] = each[:, count:].clone()
        self.empty.sub_(count).clamp_min_(0)

    def queries(self, some: range) -> range:
        """Where positions of a chunk are among the keys."""
        return range(self.history + some.start, self.history + some.stop, some.step)


class Chunk(ABC):
    """Tokens (B, C) that come after `state`; the state changes only on `commit_`."""

    def __init__(
        self, tokens: Tensor, state: DecoderState, room: int | None = None, spans: list[Span] | None = None
    ) -> None:
        """`room` for more positions than these, where `advance_` will bring them; `spans` that have it are written
        over, else there are new ones."""
        self.tokens = tokens
        self.position = state.position  # (B,), of the first token
        self.before = state.memories  # (B, s, D), the last ones before the chunk; s is 1 without a delay
        room = max(room or 0, tokens.shape[1])
        self.spans = [Span(ring, room) for ring in state.caches] if spans is None else spans
        for span, ring in zip(self.spans, state.caches, strict=True):
            span.fill_(ring, state.position)
        self.memory = self.before[:, :0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def positions(self) -> Tensor:
        """(B, C)"""
        return self.position[:, None] + torch.arange(self.length, device=self.tokens.device)

    @abstractmethod
    def compute(self, some: range, previous_memory: Tensor | None) -> Tensor:
        """The memories (B, Q, D) of some positions, on K/V that the spans keep; theirs are written there, and what is
        kept of positions behind the last of them may be lost."""

    def run(self, memory: Tensor | None, some: range | None = None) -> Tensor:
        """All positions, or some of them again, on the chunk's memories (B, C, D) so far; None where there are none.
        -> (B, C, D)"""
        some = range(self.length) if some is None else some
        at = slice(some.start, some.stop, some.step)
        previous = None if memory is None else self.previous(memory)[:, at]
        fresh = self.compute(some, previous)
        if memory is None or len(some) == self.length:
            self.memory = fresh
        else:
            self.memory = memory.slice_scatter(fresh, 1, some.start, some.stop, some.step)
        return self.memory

    def previous(self, memory: Tensor) -> Tensor:
        """What every position reads where these are the chunk's memories. (B, C, D) -> (B, C, D), with a delay
        (B, C, 2 D)"""
        length, delay = memory.shape[1], self.before.shape[1]
        all_before = torch.cat((self.before, memory[:, :-1]), dim=1)
        last = all_before[:, delay - 1 :]
        return last if delay == 1 else torch.cat((last, all_before[:, :length]), dim=-1)

    def last_memories(self, count: int) -> Tensor:
        """The last s once `count` positions are read. (B, s, D)"""
        return torch.cat((self.before, self.memory[:, :count]), dim=1)[:, -self.before.shape[1] :]

    def advance_(self, count: int, tokens: Tensor) -> None:
        """Leave the first `count` positions behind, as they were last computed, and take in tokens (B, n) at the end.

        The state does not know of it: what was left behind comes to it with the next `commit_`.
        """
        if count:
            for span in self.spans:
                span.advance_(count)
            self.before = self.last_memories(count)
            self.position = self.position + count
        self.tokens = torch.cat((self.tokens[:, count:], tokens), dim=1)

    def commit_(self, state: DecoderState, count: int) -> None:
        """Take the first `count` positions as they were last computed into the state, and what was left behind."""
        row = torch.arange(self.tokens.shape[0], device=self.tokens.device)[:, None]
        for cache, span in zip(state.caches, self.spans, strict=True):
            # history that was not left behind is in these slots already
            kept = slice(count - 1, count + span.history)
            slots = (self.position[:, None] + torch.arange(kept.start, kept.stop, device=row.device) - span.history) % (
                span.window
            )
            cache.key[row, slots] = span.key[:, kept]
            cache.value[row, slots] = span.value[:, kept]
        state.memories = self.last_memories(count).clone()
        state.position = self.position + count

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
        # a row that read nothing keeps those from before
        delay = self.before.shape[1]
        index = counts[:, None] + torch.arange(delay, device=row.device)
        state.memories = torch.cat((self.before, self.memory), dim=1)[row, index]
        state.position = state.position + counts


class SpanAttend:
    """Some positions of a chunk: their K/V go into the span, and their queries see it."""

    def __init__(self, span: Span, plan: AttentionPlan) -> None:
        self.span, self.plan = span, plan

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        queries = self.plan.queries
        at, seen = slice(queries.start, queries.stop, queries.step), slice(queries.stop)
        self.span.key[:, at], self.span.value[:, at] = mixed_key, mixed_value
        return windowed_attention(query, self.span.key[:, seen], self.span.value[:, seen], self.plan)


class ChunkPass(Chunk):
    """With the decoder itself: any device and precision."""

    def __init__(self, decoder: Decoder, tokens: Tensor, state: DecoderState, room: int | None = None) -> None:
        super().__init__(tokens, state, room)
        self.decoder = decoder
        self.plans: dict[tuple[int, range], AttentionPlan] = {}

    def plan(self, span: Span, some: range) -> AttentionPlan:
        """One for all layers with this window, until the chunk moves."""
        if (span.window, some) not in self.plans:
            queries = span.queries(some)
            starts = span.empty[:, None].expand(-1, len(some)) if bool((span.empty > 0).any()) else None
            self.plans[span.window, some] = plan_attention(
                span.window,
                queries.stop,
                self.tokens.device,
                queries,
                starts,
                entries=self.decoder.config.entries,
            )
        return self.plans[span.window, some]

    def advance_(self, count: int, tokens: Tensor) -> None:
        super().advance_(count, tokens)
        self.plans = {}

    def compute(self, some: range, previous_memory: Tensor | None) -> Tensor:
        at = slice(some.start, some.stop, some.step)
        attends = [SpanAttend(span, self.plan(span, some)) for span in self.spans]
        return self.decoder.run(self.tokens[:, at], self.positions[:, at], previous_memory, attends)
