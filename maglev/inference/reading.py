"""Reading a prompt in parallel with P alone: its memories are the fixed point of m <- P(x, shift(m)).

A prompt is read in chunks. Each chunk starts from the carried state with a pass on zero memories, then repeats passes
until the memories stop moving. With a stride, a pass after the first goes over every so-many-th position at a time, and
each part takes the memories that the parts before it left (Gauss-Seidel): as much work as a pass over all positions at
once (Jacobi), and fewer of them where the tolerance is tight. Position t of a chunk is exact after t passes whatever
the weights, so a chunk that does not settle within its budget is finished by stepping.
"""

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

# relative change of the memories under which a chunk counts as settled
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
LARGEST_CHUNK = 8192
# shorter chunks, which a user may ask for, are not worth recording
SMALLEST_RECORDED = 256
PASS_BUDGET = 24
# A stride's first parts still see keys and values of zero memories, so it pays only over many passes.
STRIDE = {torch.float64: 4, torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}


class Reader(Protocol):
    """A decoder that brings chunks of its own, such as those on fused kernels."""

    config: ModelConfig

    @property
    def compute_dtype(self) -> torch.dtype: ...

    def chunk(self, tokens: Tensor, state: DecoderState, *, repeated: bool) -> Chunk:
        """`repeated` says that more chunks of this shape will come."""

    def step_(self, tokens: Tensor, state: DecoderState) -> Tensor: ...


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
    `memories` takes those of all positions in, part after part.
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
    size = chunk or default_chunk(decoder.config)
    for part in tokens.split(size, dim=1):
        passing = chunk_of(decoder, part, state, size)
        if decoder.config.memory == "none":
            found = [read_without_memory_(passing, state, report)]
        else:
            found = read_chunk_(decoder, passing, state, tolerance, budget, passes, stride, report)
        if memories is not None:
            memories += found
    return report


def chunk_of(decoder: Decoder | Reader, tokens: Tensor, state: DecoderState, size: int) -> Chunk:
    if isinstance(decoder, Decoder):
        return ChunkPass(decoder, tokens, state)
    return decoder.chunk(tokens, state, repeated=tokens.shape[1] == size >= SMALLEST_RECORDED)


def read_without_memory_(chunk: Chunk, state: DecoderState, report: ReadingReport) -> Tensor:
    memory = chunk.run(None)
    chunk.commit_(state, chunk.length)
    report.passes.append(1)
    report.changes.append([])
    return memory


def read_chunk_(
    decoder: Decoder | Reader,
    chunk: Chunk,
    state: DecoderState,
    tolerance: float,
    budget: int,
    passes: int | None,
    stride: int,
    report: ReadingReport,
) -> list[Tensor]:
    """-> the memories (B, n, D) of its positions, in parts"""
    memory = state.memory.new_zeros(*chunk.tokens.shape, state.memory.shape[-1])
    changes: list[float] = []
    settled = 0
    for number in range(1, (passes or min(budget, chunk.length)) + 1):
        before, memory = memory, one_pass(chunk, memory, 1 if number == 1 else stride)
        changes.append(relative_change(before, memory))
        # position t is exact after t passes
        settled = min(number, chunk.length)
        if passes is None and changes[-1] <= tolerance:
            settled = chunk.length
            break
    settled = chunk.length if passes is not None else settled
    report.passes.append(number)
    report.changes.append(changes)
    chunk.commit_(state, settled)
    # what a step returns may be a buffer that the next one writes over
    stepped = [decoder.step_(chunk.tokens[:, slot], state)[:, None].clone() for slot in range(settled, chunk.length)]
    report.stepped += chunk.length - settled
    return [memory[:, :settled], *stepped]


def one_pass(chunk: Chunk, memory: Tensor, stride: int) -> Tensor:
    """All positions once, every `stride`-th at a time."""
    if stride == 1:
        return chunk.run(memory)
    for first in range(min(stride, chunk.length)):
        memory = chunk.run(memory, range(first, chunk.length, stride))
    return memory


def relative_change(before: Tensor, after: Tensor) -> float:
    """||after - before|| / ||after||, of the sequence that moved most."""
    wide = torch.promote_types(after.dtype, torch.float32)
    moved = torch.linalg.vector_norm((after - before).flatten(1), dim=1, dtype=wide)
    return float((moved / torch.linalg.vector_norm(after.flatten(1), dim=1, dtype=wide)).max())
