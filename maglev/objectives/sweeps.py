"""Passes over some positions at a time, each on the freshest memories and on the K/V that the passes before left."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.model.attention import Recording
from maglev.model.decoder import Decoder
from maglev.model.late import LateDecoder
from maglev.model.memory import kept_over, shift_by, shift_right
from maglev.objectives.losses import Documents
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention
from maglev.ops.trails import Trails

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


class Trail(Buffer):
    """One layer's mixed K/V where windows are no longer than a rollout: a row then is texts that go on side by side;
    what a query sees are the last of its own. Nothing else is copied or kept."""

    def __init__(self, plan: AttentionPlan, before: Buffer | None, starts: Tensor | None, compiled: bool) -> None:
        super().__init__(plan, before)
        self.starts, self.compiled = starts, compiled
        self.trails: tuple[Trails, Tensor] | None = None

    @torch.compiler.disable
    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        before, at = self.before, self.plan.queries
        found = before.trails if isinstance(before, Trail) else None
        if found is None:
            assert before is not None and before.key is not None and before.value is not None
            both = before.key, before.value
            trails = Trails(*both, self.plan.window, at.step, self.starts, self.compiled)
            found = trails, trails.begin(*both)
        trails, chain = found
        seen, chain = trails.attend(chain, at.start, query, mixed_key, mixed_value)
        self.trails = trails, chain
        return seen


class Segment(Recording):
    """One layer's mixed K/V of some positions in a row, after those of the window before them."""

    def __init__(self, window: int, plan: AttentionPlan, before: "Segment | None") -> None:
        self.history, self.plan, self.before = window - 1, plan, before
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    # as few graphs of a block as there are lengths of segments, wherever they begin
    @torch.compiler.disable
    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        if self.before is not None:
            assert self.before.key is not None and self.before.value is not None
            mixed_key = torch.cat((self.before.key, mixed_key), dim=1)
            mixed_value = torch.cat((self.before.value, mixed_value), dim=1)
        seen = windowed_attention(query, mixed_key, mixed_value, self.plan)
        first = max(0, mixed_key.shape[1] - self.history)
        self.key, self.value = mixed_key[:, first:], mixed_value[:, first:]
        return seen


def interleave(parts: Sequence[Tensor], length: int) -> Tensor:
    """Positions i, i + S, ... of each of S parts (B, T / S, ...), the later ones one shorter perhaps -> (B, T, ...)"""
    longest = parts[0].shape[1]
    even = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, longest - part.shape[1])) for part in parts]
    return torch.stack(even, dim=2).flatten(1, 2)[:, :length]


def deal(values: Tensor, steps: int) -> list[Tensor]:
    """(B, T, ...) -> positions i, i + S, ... as each of S parts; all at once, since the gradient of a part alone is as
    large as the whole."""
    length = values.shape[1]
    even = F.pad(values, (0, 0) * (values.ndim - 2) + (0, -length % steps)).unflatten(1, (-1, steps))
    parts = even.movedim(2, 0).contiguous().unbind()
    return [first_of(part, len(range(at, length, steps))) for at, part in enumerate(parts[:length])]


def first_of(values: Tensor, count: int) -> Tensor:
    return values if values.shape[1] == count else values[:, :count].contiguous()


def scatter(into: Tensor, values: Tensor, positions: range) -> Tensor:
    """`into` (B, T, ...) with `values` (B, T / S, ...) at `positions`; a new tensor, so that gradients reach both what
    stays and what is replaced."""
    return into.slice_scatter(values, dim=1, start=positions.start, end=into.shape[1], step=positions.step)


class OlderMemories:
    """With a delay s, what the steps of a rollout read beside m_{t-1}: the freshest m_{t-s}. Until the rollout has
    written it, that is of the pass before, (B, T, D)."""

    def __init__(self, memory: Tensor, keep: Tensor | None, delay: int, steps: int) -> None:
        self.keep, self.delay, self.steps = keep, delay, steps
        # a delay longer than a rollout reaches into what others have begun to write
        self.fresh = memory if delay > steps else None
        self.before = deal(shift_by(memory, keep, delay), steps) if 1 < delay <= steps else []
        self.kept = None if keep is None or not self.before else kept_over(keep, delay)
        self.written: list[Tensor] = []

    def write(self, memory: Tensor, first: int) -> None:
        """What step `first` of all rollouts wrote, (B, C, D), with its noise."""
        if self.fresh is not None:
            self.fresh = scatter(self.fresh, memory, range(first, self.fresh.shape[1], self.steps))
        elif self.before:
            self.written.append(memory)

    def beside(self, previous: Tensor, first: int) -> Tensor:
        """previous (B, C, D), which step `first` of all rollouts reads -> (B, C, 2 D)"""
        if self.delay == 1:
            return previous
        if self.fresh is not None:
            older = shift_by(self.fresh, self.keep, self.delay)[:, first :: self.steps]
        elif first < self.delay:
            older = self.before[first]
        else:
            older = first_of(self.written[first - self.delay], previous.shape[1])
            if self.kept is not None:
                older = torch.where(self.kept[:, first :: self.steps].unsqueeze(-1), older, 0)
        return torch.cat((previous, older), dim=-1)


class Sweeps:
    """Of one batch, tokens (B, T). The first pass is over all positions."""

    def __init__(self, decoder: Decoder, tokens: Tensor, documents: Documents) -> None:
        self.decoder, self.tokens, self.documents = decoder, tokens, documents
        self.before: list[Buffer | None] = [None] * len(decoder.blocks)
        self.slots = torch.arange(tokens.shape[1], device=tokens.device)

    def run(self, memory: Tensor, positions: range, embedded: Tensor | None = None) -> Tensor:
        """Memories (B, T, D) as they are -> those of `positions` anew, (B, T / S, D)."""
        previous_memory = shift_right(memory, self.documents.memory_keep, self.decoder.config.delay)
        previous_memory = previous_memory[:, positions.start :: positions.step]
        own = None if embedded is None else embedded[:, positions.start :: positions.step].contiguous()
        return self.run_with(self.decoder.run, self.buffers(positions), previous_memory.contiguous(), positions, own)

    def rollout(
        self,
        memory: Tensor,
        steps: int,
        embedded: Tensor,
        late: LateDecoder | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """All positions anew, `steps` of them in a row from every place at once, each on the memory that was written
        just before, with its `noise` where there is some. (B, T, D) -> (B, T, D)"""
        length, keep = memory.shape[1], self.documents.memory_keep
        start = memory if noise is None else memory + noise
        previous = shift_right(start, keep)[:, ::steps].contiguous()
        older = OlderMemories(start, keep, self.decoder.config.delay, steps)
        parts = deal(embedded, steps)
        noises = None if noise is None else deal(noise, steps)
        found: list[Tensor] = []
        read: list[Tensor] = []
        try:
            if late is not None:
                late.begin([part.shape[:2] for part in parts])
            for first, own in enumerate(parts):
                positions = range(first, length, steps)
                if found:
                    previous = first_of(read[-1], len(positions))
                    if keep is not None:
                        previous = torch.where(keep[:, first::steps].unsqueeze(-1), previous, 0)
                run = self.decoder.run if late is None else partial(late.run_step, first)
                given = older.beside(previous, first)
                found.append(self.run_with(run, self.trails(positions), given, positions, own))
                read.append(found[-1] if noises is None else found[-1] + noises[first])
                older.write(read[-1], first)
        finally:
            # also where memory ran out: what it holds is to be free for a smaller pass
            if late is not None:
                late.end()
        return interleave(found, length)

    def own_memories(self, embedded: Tensor, noise: Tensor | None = None) -> Tensor:
        """The decoder's own memories of all positions, as stepping has them, where nothing takes a memory younger than
        the delay: so many positions at a time read what was written before, with its `noise`. -> (B, T, D)"""
        config, keep = self.decoder.config, self.documents.memory_keep
        assert not config.takes_last
        rows, length, width = embedded.shape
        kept = None if keep is None else kept_over(keep, config.delay).unsqueeze(-1)
        layers: list[Segment | None] = [None] * config.depth
        memory = embedded.new_zeros(rows, config.delay, width)
        found: list[Tensor] = []
        for first in range(0, length, config.delay):
            at = slice(first, min(first + config.delay, length))
            own = embedded[:, at].contiguous()
            older = memory[:, : own.shape[1]]
            older = older if kept is None else torch.where(kept[:, at], older, 0)
            # the last memory, which nothing takes, may be anything
            previous_memory = torch.cat((torch.zeros_like(older), older), dim=-1)
            here = range(at.start, at.stop)
            plans = {w: self.plan_of(w, here, max(0, first - w + 1)) for w in set(config.windows)}
            segments = [Segment(w, plans[w], before) for w, before in zip(config.windows, layers, strict=True)]
            found.append(self.decoder.run(self.tokens[:, at], self.slots[at], previous_memory, segments, own))
            layers = [*segments]
            memory = found[-1] if noise is None else found[-1] + noise[:, at]
        return torch.cat(found, dim=1)

    def run_with(
        self,
        run: Callable[..., Tensor],
        buffers: Sequence[Buffer],
        previous_memory: Tensor,
        positions: range,
        embedded: Tensor | None,
    ) -> Tensor:
        """previous_memory and embedded are of `positions`."""
        at = slice(positions.start, None, positions.step)
        fresh = run(self.tokens[:, at], self.slots[at], previous_memory, buffers, embedded)
        self.before = [*buffers]
        return fresh

    def buffers(self, positions: range) -> list[Buffer]:
        kind = Buffer if positions.step <= FEW_SUBSETS else ApartBuffer
        return [kind(plan, own) for plan, own in zip(self.plans(positions), self.before, strict=True)]

    def trails(self, positions: range) -> list[Buffer]:
        """Where they serve; the pass before was over the positions just before these, or over all."""
        found = self.buffers(positions)
        if self.decoder.config.entries > 1:
            return found
        own = self.documents.attention_starts, self.decoder.compiled
        return [Trail(each.plan, each.before, *own) if each.plan.window <= positions.step else each for each in found]

    def plans(self, positions: range) -> list[AttentionPlan]:
        plans = {window: self.plan_of(window, positions) for window in set(self.decoder.config.windows)}
        return [plans[window] for window in self.decoder.config.windows]

    def plan_of(self, window: int, positions: range, first: int = 0) -> AttentionPlan:
        """Of queries at these positions over the keys from position `first` to where the positions end."""
        decoder, starts = self.decoder, self.documents.attention_starts
        if starts is not None:
            starts = (starts[:, positions.start : positions.stop : positions.step] - first).clamp_min(0)
        return plan_attention(
            window,
            positions.stop - first,
            self.tokens.device,
            range(positions.start - first, positions.stop - first, positions.step),
            starts,
            dtype=decoder.compute_dtype,
            head_dim=decoder.config.head_dim,
            heads=(decoder.config.heads, decoder.config.kv_heads),
            kernel=decoder.attention_kernel,
            entries=decoder.config.entries,
        )
