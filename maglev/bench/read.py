"""What reading a prompt in parallel costs, beside the machine's matrix rate and beside stepping the same tokens.

FLOPs are those of all passes over all positions: 2 per matrix weight and 4 x width per key in a position's windows;
nothing for the readout, which reading does not need, for norms, nor for positions that had to be stepped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maglev.bench.clock import graphed, machine_facts, measuring_on, peak_bytes, reset_peak, seconds
from maglev.bench.decode import fast_work, plain_work
from maglev.bench.limits import machine_rates
from maglev.bench.models import full_state, random_decoder, swa_twin
from maglev.errors import RequestError
from maglev.inference.fast_step import FastDecoder, fastest
from maglev.inference.reading import BLOCKS, ReadingReport, default_block, read_
from maglev.model.accounting import pass_flops
from maglev.model.decoder import Decoder

# About what a trained decoder needs from zeros in bfloat16. What random weights settle to says nothing, and where they
# do not settle, steps would be timed instead: with them passes are counted, not needed.
PASSES = 4
# passes shown beyond those that reading took, so that a curve shows where it ends
BEYOND = 2
# tokens that are also stepped, to see how far passes are from there: as many whatever a block is
COMPARED = 2048
LONGEST = 1 << 24

Row = dict[str, Any]
Watch = Callable[[str], None]


@dataclass(frozen=True)
class ReadPlan:
    """`passes` None reads until the memories settle, as a user does; a number fixes the passes over every block."""

    tokens: int
    passes: int | None
    block: int | None
    blocks: int | None
    stride: int | None
    steps: int
    repeats: int
    quick: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tokens", self.tokens, 1),
            ("passes", self.passes, 1),
            ("block", self.block, 1),
            ("blocks", self.blocks, 1),
            ("stride", self.stride, 1),
            ("steps", self.steps, 1),
            ("repeats", self.repeats, 1),
        ):
            if value is not None and not least <= value <= LONGEST:
                raise RequestError(f"{name} is {value}; it must be at least {least} and at most {LONGEST:,}")


class Shape(NamedTuple):
    """How the positions of a prompt are grouped."""

    block: int
    blocks: int
    stride: int

    def read_(
        self,
        reader: Decoder | FastDecoder,
        tokens: Tensor,
        passes: int | None,
        memories: list[Tensor] | None = None,
    ) -> ReadingReport:
        block, blocks, stride = self
        state = reader.initial_state(1)
        return read_(reader, tokens, state, block=block, blocks=blocks, stride=stride, passes=passes, memories=memories)


def read_plan(quick: bool = False, **given: int | None) -> ReadPlan:
    """What is not given (None) is that of a full or a quick run; passes and blocks stay open."""
    full = {"tokens": 16_384, "steps": 256, "repeats": 5}
    small = {"tokens": 100, "steps": 4, "repeats": 2}
    open_ended: dict[str, int | None] = {"passes": None, "block": None, "blocks": None, "stride": None}
    chosen = {key: value for key, value in given.items() if value is not None}
    return ReadPlan(**(open_ended | (small if quick else full) | chosen), quick=quick)  # type: ignore[arg-type]


def measure_read(
    name: str,
    decoder: Decoder,
    tokens: Tensor,
    plan: ReadPlan,
    *,
    weights: str,
    text: str,
    watch: Watch = lambda stage: None,
) -> dict[str, Any]:
    """Reading tokens (1, T) with `decoder`, and with an SWA of the same shape and random weights beside it.

    `weights` and `text` say in words what was read with what.
    """
    device, dtype = decoder.device, decoder.compute_dtype
    with measuring_on(device):
        watch("the machine's limits")
        rates = machine_rates(device, dtype, plan.quick, plan.repeats)
        rows = []
        if decoder.injection is not None:
            twin = random_decoder(swa_twin(decoder.config), device, dtype)
            rows.append(measure_model("swa", "random", twin, tokens, plan, rates["matrix_flops"], watch))
        rows.append(measure_model(name, weights, decoder, tokens, plan, rates["matrix_flops"], watch))
    return {
        "benchmark": "read",
        "quick": plan.quick,
        "depth": decoder.config.depth,
        "text": text,
        "passes_are": "fixed" if plan.passes else "until settled",
        **machine_facts(device, dtype),
        **rates,
        "rows": rows,
    }


def measure_model(
    name: str, weights: str, decoder: Decoder, tokens: Tensor, plan: ReadPlan, matrix_flops: float, watch: Watch
) -> Row:
    shape = Shape(default_block(decoder.config), 1, 1)
    if decoder.injection is not None:
        shape = Shape(plan.block or shape.block, plan.blocks or BLOCKS, plan.stride or 1)
    # what the engine reads with
    reader = fastest(decoder)
    reports: list[ReadingReport] = []

    def read(passes: int | None) -> ReadingReport:
        return shape.read_(reader, tokens, passes)

    watch(f"{name}: reading")
    reset_peak(decoder.device)
    taken = seconds(lambda: reports.append(read(plan.passes)), decoder.device, 1, plan.repeats, warm_ups=1)
    peak = peak_bytes(decoder.device)
    report = reports[-1]
    watch(f"{name}: relative change by pass")
    changes = read(plan.passes or max(report.passes) + BEYOND).changes
    watch(f"{name}: distance to stepping by pass")
    distances = Distances([], [], None)
    # random weights need not contract, and then no two orders of arithmetic agree
    if weights == "trained" and changes[0]:
        start = tokens[:, :COMPARED]
        distances = distance_by_pass(reader, decoder, start, shape, len(changes[0]) + BEYOND)
    watch(f"{name}: {plan.steps} steps")
    step_s = step_seconds(decoder, plan)
    length = tokens.shape[1]
    flops = report.computed * pass_flops(decoder.config, 0, length) / length
    return {
        "model": name,
        "weights": weights,
        "tokens": length,
        **shape._asdict(),
        "passes": report.passes,
        "passes_per_token": report.passes_per_token,
        "stepped": report.stepped,
        "seconds": taken,
        "tokens_per_s": length / taken,
        "flops": flops,
        "flops_per_s": flops / taken,
        "share_of_matrix_rate": flops / taken / matrix_flops,
        "steps_timed": plan.steps,
        "step_ms": {kind: value * 1e3 for kind, value in step_s.items()},
        "extrapolated_stepping_s": {kind: value * length for kind, value in step_s.items()},
        "stepping_by_reading": {kind: value * length / taken for kind, value in step_s.items()},
        "peak_bytes": peak,
        "largest_change_by_pass": largest_by_pass(changes),
        "distance_to_stepping_by_pass": distances.to_steps,
        "distance_to_float32_by_pass": distances.to_float32,
        "steps_to_float32": distances.of_steps,
    }


class Distances(NamedTuple):
    """||m - m*|| / ||m*||: of memories after 1, 2, ... passes over every block from those of single steps, and from
    those of single steps in float32 where they are narrower, with what the single steps themselves are from there."""

    to_steps: list[float]
    to_float32: list[float]
    of_steps: float | None


def distance_by_pass(
    reader: Decoder | FastDecoder, decoder: Decoder, tokens: Tensor, shape: Shape, passes: int
) -> Distances:
    """Of the start of the prompt; `reader` is `decoder` as it reads."""
    stepped, exact = stepped_memories(reader, tokens), None
    if decoder.compute_dtype.itemsize < torch.float32.itemsize:
        exact = stepped_memories(widened(decoder), tokens)
    found = Distances([], [], None if exact is None else distance(stepped, exact))
    for number in range(1, passes + 1):
        pieces: list[Tensor] = []
        shape.read_(reader, tokens, number, pieces)
        memories = torch.cat(pieces, dim=1).float()
        found.to_steps.append(distance(memories, stepped))
        if exact is not None:
            found.to_float32.append(distance(memories, exact))
    return found


@torch.inference_mode()
def stepped_memories(reader: Decoder | FastDecoder, tokens: Tensor) -> Tensor:
    """tokens (1, T) -> (1, T, D), float32"""
    state = reader.initial_state(1)
    return torch.stack([reader.step_(token[None], state).clone() for token in tokens[0]], dim=1).float()


def widened(decoder: Decoder) -> Decoder:
    """The same weights, in float32."""
    twin = Decoder(decoder.config).to(decoder.device, torch.float32)
    twin.load_state_dict(decoder.state_dict())
    return twin.eval().requires_grad_(False)


def distance(memories: Tensor, wanted: Tensor) -> float:
    return float((memories - wanted).norm() / wanted.norm())


def largest_by_pass(changes: list[list[float]]) -> list[float]:
    """Over the blocks: the slowest one decides how many passes it takes."""
    return [max(each) for each in zip(*changes, strict=True)]


def step_seconds(decoder: Decoder, plan: ReadPlan) -> dict[str, float]:
    """Per token of a single sequence with a full ring and without readout, by every way to step that there is."""
    device = decoder.device
    state = full_state(decoder, 1)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    rounds = min(plan.repeats, 3)
    plain = graphed(plain_work(decoder, state, token, readout=False), device)
    found = {"plain": seconds(plain, device, plan.steps, rounds)}
    if not decoder.config.has_steps:
        return found
    fast = graphed(fast_work(FastDecoder(decoder), state, token, readout=False), device)
    return found | {"fast": seconds(fast, device, plan.steps, rounds)}
