"""Reading a prompt in parallel with P alone: its memories are the fixed point of m <- P(x, shift(m)).

Passes go over some blocks of the prompt at a time, starting from zero memories. When the first of them has stopped
moving, it is left behind and a new one is taken in at the end. So what a pass makes of the later blocks stands on
memories that are nearly settled, and they settle in fewer passes than blocks that all begin together. Every pass makes
at least one more position exact whatever the weights, so a block that does not settle within its budget is finished by
stepping. Where nothing takes a memory younger than a delay of s tokens, one pass over s positions is exact, and prompts
are read so unless s is short.

With a stride of s, a pass after a block's first goes over every s-th position at a time, and each part reads the
memories that the part before it wrote (Gauss-Seidel): what is wrong in the last memory shrinks s times in a pass, not
once. It is as much work, in s launches. Keys and values of the other parts are those of the pass before, so it pays
where the last memory carries the error, and not the window.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.checks import check_tokens
from maglev.model.chunk import Chunk, ChunkPass
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.model_config import ModelConfig

# relative distance of the memories from where they settle, under which a block counts as settled
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-7, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# positions of a pass at most
LARGEST_CHUNK = 8192
# A pass goes over so many blocks of a window each. Longer ones settle more slowly, since what is wrong in a window's
# keys and values is wrong in the next pass too; shorter ones leave a GPU idle.
BLOCKS = 4
PASS_BUDGET = 24
# Blocks that are read before other threads have their turn. What has begun is finished first, which costs passes of
# fewer blocks.
TURN = 64
# What shrinks fast at first may go on more slowly: no better rate than this is counted on.
BEST_RATE = 0.3
# Rounding can keep deep decoders from coming under the tolerance. Where the change has stopped falling, and is at most
# so many tolerances, it is rounding that is left.
STALLED, ROUNDING = 0.9, 5.0


class Reader(Protocol):
    """The decoder on kernels that bring chunks and steps of their own."""

    config: ModelConfig

    @property
    def compute_dtype(self) -> torch.dtype: ...

    @property
    def lock(self) -> AbstractContextManager[object]: ...

    def chunk(self, tokens: Tensor, state: DecoderState, room: int | None = None) -> Chunk: ...

    def step_(self, tokens: Tensor, state: DecoderState) -> Tensor: ...

    def step_on_(self, tokens: Tensor, state: DecoderState) -> list[Tensor]: ...


@dataclass
class ReadingReport:
    """What reading took: passes over each block, the relative change of its memories in each of them, positions that
    all passes computed together, and positions that were stepped."""

    passes: list[int] = field(default_factory=list)
    changes: list[list[float]] = field(default_factory=list)
    computed: int = 0
    stepped: int = 0
    tokens: int = 0

    @property
    def passes_per_token(self) -> float:
        return self.computed / self.tokens if self.tokens else 0.0


def reads_at_once(config: ModelConfig, count: int = 1) -> bool:
    """So many positions, exactly. Without memory there is nothing to settle; over a delay that nothing shortens, a pass
    reads what was written before it."""
    return config.memory == "none" or (config.goes_at_once and count <= config.delay)


def nothing_yet(config: ModelConfig, tokens: Tensor, like: Tensor) -> Tensor | None:
    """For that pass: the last memories, which nothing takes, may be anything. tokens (B, C) -> (B, C, D)"""
    return None if config.memory == "none" else like.new_zeros(*tokens.shape, like.shape[-1])


def default_block(config: ModelConfig) -> int:
    """One pass is as long as it carries information, where nothing is to settle."""
    if config.memory == "none":
        return min(config.plain_reach + 1, LARGEST_CHUNK)
    return min(config.delay if config.goes_at_once else config.window, LARGEST_CHUNK // BLOCKS)


def default_chunk(config: ModelConfig) -> int:
    """Positions of a pass."""
    return default_block(config) * (1 if config.memory == "none" else BLOCKS)


@torch.inference_mode()
def read_(
    decoder: Decoder | Reader,
    tokens: Tensor,
    state: DecoderState,
    *,
    tolerance: float | None = None,
    block: int | None = None,
    blocks: int = BLOCKS,
    stride: int = 1,
    budget: int = PASS_BUDGET,
    passes: int | None = None,
    memories: list[Tensor] | None = None,
) -> ReadingReport:
    """Read tokens (B, T) into `state`, which is rewritten in place. Memory is bounded by `blocks` of `block` positions.

    `passes` fixes their number for every block, settled or not: for measuring. What was read then is exact only if they
    sufficed. `memories` takes those of all positions, piece by piece, each (B, n, D).
    """
    check_tokens(tokens, decoder.config.vocab_size)
    if tokens.shape[0] != state.batch_size:
        raise RequestError(f"tokens have {tokens.shape[0]} rows and the state {state.batch_size}; give as many")
    given = {"budget": budget, "block": block, "blocks": blocks, "stride": stride, "passes": passes}
    for name, value in given.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    tolerance = TOLERANCE[decoder.compute_dtype] if tolerance is None else tolerance
    length = tokens.shape[1]
    block = min(block or default_block(decoder.config), max(1, length))
    report = ReadingReport(tokens=length)
    for first in range(0, length, TURN * block):
        part = tokens[:, first : first + TURN * block]
        with alone(decoder):
            if reads_at_once(decoder.config) and (passes is None or decoder.config.memory == "none"):
                pieces = read_at_once_(decoder, part, state, block, report)
            else:
                pieces = settle_(decoder, part, state, block, blocks, stride, passes, tolerance, budget, report)
            for piece in pieces:
                if memories is not None:
                    # of its own, or it would hold all that it is a part of
                    memories.append(piece.clone())
    return report


def alone(decoder: Decoder | Reader) -> AbstractContextManager[object]:
    """Recorded passes of a shape have one set of buffers, and threads may read at the same time."""
    return nullcontext() if isinstance(decoder, Decoder) else decoder.lock


def chunk_of(decoder: Decoder | Reader, tokens: Tensor, state: DecoderState, room: int | None = None) -> Chunk:
    make = partial(ChunkPass, decoder) if isinstance(decoder, Decoder) else decoder.chunk
    return make(tokens, state, room)


def read_at_once_(
    decoder: Decoder | Reader, tokens: Tensor, state: DecoderState, size: int, report: ReadingReport
) -> Iterator[Tensor]:
    size = size if reads_at_once(decoder.config, size) else decoder.config.delay
    for first in range(0, tokens.shape[1], size):
        chunk = chunk_of(decoder, tokens[:, first : first + size], state)
        yield chunk.run(nothing_yet(decoder.config, chunk.tokens, state.memory))
        chunk.commit_(state, chunk.length)
        report.passes.append(1)
        report.changes.append([])
        report.computed += chunk.length


class Front:
    """The blocks of a prompt that passes go over, from the first that has not settled to the newest."""

    def __init__(self, chunk: Chunk, block: int, stride: int) -> None:
        self.chunk, self.block, self.stride = chunk, block, stride
        batch, length = chunk.tokens.shape
        self.memory = chunk.before.new_zeros(batch, length, chunk.before.shape[-1])
        self.changes: list[list[Tensor]] = []  # by block and pass, the largest of the rows
        self.recent = no_changes(batch, 0, device=chunk.tokens.device)  # (3, B, N)
        self.passes_here = 0  # since the first block is the first
        self.begin_blocks()

    @property
    def sizes(self) -> list[int]:
        return [min(self.block, self.chunk.length - first) for first in range(0, self.chunk.length, self.block)]

    def begin_blocks(self) -> None:
        more = len(self.sizes) - len(self.changes)
        self.changes += [[] for _ in range(more)]
        self.recent = F.pad(self.recent, (0, more), value=torch.nan)

    def run(self) -> None:
        before = self.memory
        for some in self.parts():
            self.memory = self.chunk.run(self.memory, some)
        found = block_changes(before, self.memory, self.block)
        self.recent = torch.cat((self.recent[1:], found[None]))
        for changes, change in zip(self.changes, found.amax(dim=0).unbind(), strict=True):
            changes.append(change)
        self.passes_here += 1

    def parts(self) -> Iterator[range]:
        """What is computed at a time: every position once. Those of new blocks together and last, for they have no keys
        and values yet that others could see."""
        length = self.chunk.length
        old = length if self.stride == 1 else sum(self.sizes[: sum(map(bool, self.changes))])
        for first in range(min(self.stride, old)):
            yield range(first, old, self.stride)
        if old < length:
            yield range(old, length)

    def settled(self, tolerance: float) -> int:
        """How many blocks have, from the first on, in all rows."""
        blocks = have_settled(self.recent, tolerance).all(dim=0)
        count = int(blocks.long().cumprod(0).sum())
        # every pass makes a position exact
        return max(count, int(self.passes_here >= self.sizes[0]))

    def leave_(self, blocks: int, tokens: Tensor) -> None:
        """Go on behind the first blocks, with tokens (B, n) more at the end."""
        count = sum(self.sizes[:blocks])
        self.chunk.advance_(count, tokens)
        self.memory = F.pad(self.memory[:, count:], (0, 0, 0, tokens.shape[1]))
        self.changes, self.recent = self.changes[blocks:], self.recent[..., blocks:]
        self.passes_here = 0 if blocks else self.passes_here
        self.begin_blocks()


def settle_(
    decoder: Decoder | Reader,
    tokens: Tensor,
    state: DecoderState,
    block: int,
    blocks: int,
    stride: int,
    passes: int | None,
    tolerance: float,
    budget: int,
    report: ReadingReport,
) -> Iterator[Tensor]:
    """Read all tokens. -> the memories of one after another, pieces of (B, n, D)

    With a fixed number of passes, each takes in one block more than the one before it: every block has as many.
    """
    first, length, room = 0, tokens.shape[1], block * min(blocks, passes or blocks)
    front: Front | None = None
    changes: list[list[Tensor]] = []
    while first < length:
        if front is None:
            part = tokens[:, first : first + (room if passes is None else block)]
            front = Front(chunk_of(decoder, part, state, min(room, length - first)), block, stride)
        front.run()
        report.computed += front.chunk.length
        done = front.settled(tolerance) if passes is None else int(len(front.changes[0]) == passes)
        stepping = passes is None and not done and front.passes_here >= budget
        done = 1 if stepping else done
        count, last = sum(front.sizes[:done]), first + front.chunk.length
        changes += front.changes[:done]
        if stepping:
            front.chunk.commit_(state, budget)
            yield front.memory[:, :budget]
            yield from step_on_(decoder, tokens[:, first + budget : first + count], state)
            report.stepped += count - budget
            front = None
        elif first + count == length:
            front.chunk.commit_(state, count)
            yield front.memory
        else:
            if count:
                yield front.memory[:, :count]
            end = first + count + room
            front.leave_(done, tokens[:, last : end if passes is None else min(end, last + block)])
        first += count
    report.passes += [len(each) for each in changes]
    # from the device at once
    values = iter(torch.stack([change for each in changes for change in each]).tolist())
    report.changes += [list(islice(values, len(each))) for each in changes]


def no_changes(*shape: int, device: torch.device) -> Tensor:
    """Those of three passes that there were not yet, (3, ...)."""
    return torch.full((3, *shape), torch.nan, device=device)


def have_settled(recent: Tensor, tolerance: float) -> Tensor:
    """Where memories have, by their changes in the last three passes (3, ...), NaN for passes that there were not.

    Changes shrink by much the same factor from pass to pass. With the larger of the last two, what is still to come is
    a geometric series: its sum is how far the memories are from where they settle.
    """
    before, between, now = recent
    rate = torch.maximum(now / between, between / before).clamp_min(BEST_RATE)
    ahead = torch.where(rate < 1, now * rate / (1 - rate), torch.inf)
    stalled = (now > STALLED * between) & (between > STALLED * before)
    return (now <= tolerance) | (ahead <= tolerance) | (stalled & (now <= ROUNDING * tolerance))


def step_on_(decoder: Decoder | Reader, tokens: Tensor, state: DecoderState) -> list[Tensor]:
    """tokens (B, T), one after another. -> the memories of each, (B, 1, D)"""
    if not isinstance(decoder, Decoder):
        return decoder.step_on_(tokens, state)
    return [decoder.step_(token, state)[:, None] for token in tokens.T]


def block_changes(before: Tensor, after: Tensor, block: int) -> Tensor:
    """`relative_changes` by blocks, of which the last may be shorter. (B, C, D) twice -> (B, N)"""
    moved, sizes = position_norms(after - before), position_norms(after)
    found = []
    for each in (moved, sizes):
        blocks = F.pad(each, (0, -each.shape[1] % block)).unflatten(1, (-1, block))
        found.append(torch.linalg.vector_norm(blocks, dim=-1))
    return found[0] / found[1]


def relative_changes(before: Tensor, after: Tensor) -> Tensor:
    """||after - before|| / ||after|| of every row. (B, C, D) twice -> (B,)"""
    return block_changes(before, after, after.shape[1])[:, 0]


def position_norms(memory: Tensor) -> Tensor:
    """(B, C, D) -> (B, C)"""
    return torch.linalg.vector_norm(memory, dim=-1, dtype=torch.promote_types(memory.dtype, torch.float32))
