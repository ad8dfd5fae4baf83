"""Reading a prompt in parallel with P alone: its memories are the fixed point of m <- P(x, shift(m)).

A prompt is read in chunks. Each chunk starts from the carried state with a pass on zero memories, then repeats passes
until the memories stop moving. With a stride, a pass after the first goes over every so-many-th position at a time, and
each part takes the memories that the parts before it left (Gauss-Seidel): as much work as a pass over all positions at
once (Jacobi), and fewer of them where the tolerance is tight. Every pass makes at least one more position exact
whatever the weights, so a chunk that does not settle within its budget is finished by stepping.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from maglev.config import ModelConfig
from maglev.errors import RequestError
from maglev.inference.checks import check_tokens
from maglev.model.chunk import Chunk, ChunkPass
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState

# relative distance of the memories from where they settle, under which a chunk counts as settled
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
LARGEST_CHUNK = 8192
PASS_BUDGET = 24
# Rounding can keep deep decoders from coming under the tolerance. Where the change has stopped falling, and is at most
# so many tolerances, it is rounding that is left.
STALLED, ROUNDING = 0.9, 5.0
# A stride's first parts still see keys and values of zero memories, so it pays only over many passes.
STRIDE = {torch.float64: 4, torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}


class Reader(Protocol):
    """The decoder on kernels that bring chunks and steps of their own."""

    config: ModelConfig

    @property
    def compute_dtype(self) -> torch.dtype: ...

    @property
    def lock(self) -> AbstractContextManager[object]: ...

    def chunk(self, tokens: Tensor, state: DecoderState) -> Chunk: ...

    def step_(self, tokens: Tensor, state: DecoderState) -> Tensor: ...

    def step_on_(self, tokens: Tensor, state: DecoderState) -> list[Tensor]: ...


@dataclass
class ReadingReport:
    """What reading took: passes per chunk, the relative change in each of them, and positions that were stepped."""

    passes: list[int] = field(default_factory=list)
    changes: list[list[float]] = field(default_factory=list)
    stepped: int = 0
    tokens: int = 0


def default_chunk(config: ModelConfig) -> int:
    """One pass carries information at most layers * (W - 1) + 1 positions: a longer chunk only waits."""
    return min(config.plain_reach + 1, LARGEST_CHUNK)


@torch.inference_mode()
def read_(
    decoder: Decoder | Reader,
    tokens: Tensor,
    state: DecoderState,
    *,
    tolerance: float | None = None,
    chunk: int | None = None,
    budget: int = PASS_BUDGET,
    passes: int | None = None,
    stride: int | None = None,
    memories: list[Tensor] | None = None,
) -> ReadingReport:
    """Read tokens (B, T) into `state`, which is rewritten in place. Memory is bounded by the chunk.

    `passes` fixes their number, settled or not: for measuring. What was read then is exact only if they sufficed.
    `memories` takes those of all positions, piece by piece, each (B, n, D).
    """
    check_tokens(tokens, decoder.config.vocab_size)
    if tokens.shape[0] != state.batch_size:
        raise RequestError(f"tokens have {tokens.shape[0]} rows and the state {state.batch_size}; give as many")
    for name, value in (("budget", budget), ("chunk", chunk), ("passes", passes), ("stride", stride)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    tolerance = TOLERANCE[decoder.compute_dtype] if tolerance is None else tolerance
    stride = STRIDE[decoder.compute_dtype] if stride is None else stride
    report = ReadingReport(tokens=tokens.shape[1])
    if not tokens.shape[1]:
        return report
    for part in tokens.split(chunk or default_chunk(decoder.config), dim=1):
        with alone(decoder):
            passing = chunk_of(decoder, part, state)
            if decoder.config.memory == "none":
                settled = read_without_memory_(passing, report)
            else:
                settled = read_chunk_(passing, tolerance, budget, passes, stride, report)
            passing.commit_(state, settled)
            kept = [passing.memory[:, :settled], *step_on_(decoder, part[:, settled:], state)]
        report.stepped += part.shape[1] - settled
        if memories is not None:
            memories += kept
    return report


def alone(decoder: Decoder | Reader) -> AbstractContextManager[object]:
    """Recorded passes of a shape have one set of buffers, and threads may read at the same time."""
    return nullcontext() if isinstance(decoder, Decoder) else decoder.lock


def chunk_of(decoder: Decoder | Reader, tokens: Tensor, state: DecoderState) -> Chunk:
    return ChunkPass(decoder, tokens, state) if isinstance(decoder, Decoder) else decoder.chunk(tokens, state)


def read_without_memory_(chunk: Chunk, report: ReadingReport) -> int:
    chunk.run(None)
    report.passes.append(1)
    report.changes.append([])
    return chunk.length


def read_chunk_(
    chunk: Chunk, tolerance: float, budget: int, passes: int | None, stride: int, report: ReadingReport
) -> int:
    """Passes until the memories settle. -> how many positions, from the first on, have their memory now"""
    memory = chunk.first_memory.new_zeros(*chunk.tokens.shape, chunk.first_memory.shape[-1])
    changes: list[Tensor] = []
    settled = chunk.length
    for number in range(1, (passes or min(budget, chunk.length)) + 1):
        before, memory = memory, one_pass(chunk, memory, 1 if number == 1 else stride)
        changes.append(relative_changes(before, memory))
        if passes is None and bool(have_settled(changes, tolerance).all()):
            break
        if passes is None and exact_positions(number, stride) >= chunk.length:
            break
    else:
        settled = chunk.length if passes is not None else exact_positions(number, stride)
    report.passes.append(number)
    report.changes.append([float(change.max()) for change in changes])
    return settled


def exact_positions(passes: int, stride: int) -> int:
    """How many positions, from the first on, are exact whatever the weights: a pass on exact memories before it makes
    one more, and so does each of its parts."""
    return max(passes, stride * (passes - 1))


def have_settled(changes: list[Tensor], tolerance: float) -> Tensor:
    """Which rows have, by the changes (B,) of all passes so far. -> (B,)

    Changes shrink by much the same factor from pass to pass. With the larger of the last two, what is still to come is
    a geometric series: its sum is how far the memories are from where they settle.
    """
    settled = changes[-1] <= tolerance
    if len(changes) < 3:
        return settled
    before, between, now = changes[-3:]
    rate = torch.maximum(now / between, between / before)
    ahead = torch.where(rate < 1, now * rate / (1 - rate), torch.inf)
    stalled = (now > STALLED * between) & (between > STALLED * before)
    return settled | (ahead <= tolerance) | (stalled & (now <= ROUNDING * tolerance))


def step_on_(decoder: Decoder | Reader, tokens: Tensor, state: DecoderState) -> list[Tensor]:
    """tokens (B, T), one after another. -> the memories of each, (B, 1, D)"""
    if not isinstance(decoder, Decoder):
        return decoder.step_on_(tokens, state)
    return [decoder.step_(token, state)[:, None] for token in tokens.T]


def one_pass(chunk: Chunk, memory: Tensor, stride: int) -> Tensor:
    """All positions once, every `stride`-th at a time."""
    if stride == 1:
        return chunk.run(memory)
    for first in range(min(stride, chunk.length)):
        memory = chunk.run(memory, range(first, chunk.length, stride))
    return memory


def relative_changes(before: Tensor, after: Tensor) -> Tensor:
    """||after - before|| / ||after|| of every row. (B, C, D) twice -> (B,)"""
    wide = torch.promote_types(after.dtype, torch.float32)
    moved = torch.linalg.vector_norm((after - before).flatten(1), dim=1, dtype=wide)
    return moved / torch.linalg.vector_norm(after.flatten(1), dim=1, dtype=wide)
