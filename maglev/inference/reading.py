"""Reading a prompt in parallel with P alone: its memories are the fixed point of m <- P(x, shift(m)).

A prompt is read in chunks. Each chunk starts from the carried state and repeats parallel passes until the memories
stop moving. Position t of a chunk is exact after t passes whatever the weights, so a chunk that does not settle within
its budget is finished by stepping.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.checks import check_tokens
from maglev.model.chunk import ChunkPass
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState

# relative change of the memories under which a chunk counts as settled
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-2}
LARGEST_CHUNK = 4096
PASS_BUDGET = 24


@dataclass
class ReadingReport:
    """What reading took: passes per chunk, and positions that had to be stepped."""

    passes: list[int] = field(default_factory=list)
    stepped: int = 0
    tokens: int = 0


def default_chunk(decoder: Decoder) -> int:
    """One pass carries information at most layers * (W - 1) + 1 positions: a longer chunk only waits."""
    return min(decoder.config.plain_reach + 1, LARGEST_CHUNK)


@torch.inference_mode()
def read_(
    decoder: Decoder,
    tokens: Tensor,
    state: DecoderState,
    *,
    tolerance: float | None = None,
    chunk: int | None = None,
    budget: int = PASS_BUDGET,
) -> ReadingReport:
    """Read tokens (B, T) into `state`, which is rewritten in place. Memory is bounded by the chunk."""
    check_tokens(tokens, decoder.config.vocab_size)
    if tokens.shape[0] != state.batch_size:
        raise RequestError(f"tokens have {tokens.shape[0]} rows and the state {state.batch_size}; give as many")
    if budget < 1 or (chunk is not None and chunk < 1):
        raise RequestError(f"budget is {budget} and chunk {chunk}; both must be at least 1")
    tolerance = TOLERANCE[decoder.compute_dtype] if tolerance is None else tolerance
    report = ReadingReport(tokens=tokens.shape[1])
    if not tokens.shape[1]:
        return report
    for part in tokens.split(chunk or default_chunk(decoder), dim=1):
        read_chunk_(decoder, part, state, tolerance, budget, report)
    return report


def read_chunk_(
    decoder: Decoder, tokens: Tensor, state: DecoderState, tolerance: float, budget: int, report: ReadingReport
) -> None:
    length = tokens.shape[1]
    chunk = ChunkPass(decoder, tokens, state)
    if decoder.injection is None:
        chunk.run(None)
        report.passes.append(1)
        chunk.commit_(state, length)
        return
    memory = torch.zeros(*tokens.shape, decoder.config.width, dtype=state.memory.dtype, device=tokens.device)
    settled = 0
    for number in range(1, min(budget, length) + 1):
        before = memory
        memory = chunk.run(before)
        # position t is exact after t passes
        settled = length if number == length or relative_change(before, memory) <= tolerance else number
        if settled == length:
            break
    report.passes.append(number)
    chunk.commit_(state, settled)
    for slot in range(settled, length):
        decoder.step_(tokens[:, slot], state)
    report.stepped += length - settled


def relative_change(before: Tensor, after: Tensor) -> float:
    """||after - before|| / ||after||, of the sequence that moved most."""
    wide = torch.promote_types(after.dtype, torch.float32)
    moved = torch.linalg.vector_norm((after - before).flatten(1), dim=1, dtype=wide)
    return float((moved / torch.linalg.vector_norm(after.flatten(1), dim=1, dtype=wide)).max())
