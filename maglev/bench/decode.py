"""What one decoded token costs: SWA and Maglev, step by step as it stands and with fused kernels, in one run.

The share is that of the bytes which must move (every weight once, as it is stored, every row's state once) at the
bandwidth of a device copy in the same run.
"""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maglev.bench.clock import Work, graphed, machine_facts, measuring_on, peak_bytes, reset_peak, seconds
from maglev.bench.launches import launch_times
from maglev.bench.limits import machine_rates
from maglev.bench.models import QUICK, QUICK_DEPTH, RECIPES, full_state, random_decoder
from maglev.errors import RequestError
from maglev.inference.fast_step import FastDecoder
from maglev.inference.rounding import check_weights
from maglev.model.accounting import state_nbytes
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.ops.decode_steps import Backend
from maglev.ops.matrix import WeightFormat, check_format
from maglev.recipes import PAPER_DEPTH, run_config

LARGEST_BATCH = 1 << 16
LAST_POSITION = 1 << 62

Row = dict[str, Any]
Watch = Callable[[Row], None]
Visit = Callable[[FastDecoder, DecoderState, Tensor], None]


@dataclass(frozen=True)
class DecodePlan:
    """`calls` steps per round and the median of `repeats` rounds; positions are set, not walked to."""

    depth: int
    batches: tuple[int, ...]
    positions: tuple[int, ...]
    calls: int
    repeats: int
    quick: bool = False
    backend: Backend | None = None
    # of the fast steps, one after another
    weights: tuple[WeightFormat, ...] = ("plain",)

    def __post_init__(self) -> None:
        if not self.weights:
            raise RequestError("weights are empty; give at least one format")
        for weights in self.weights:
            check_format(weights)
        for name, values, least, most in (
            ("batches", self.batches, 1, LARGEST_BATCH),
            ("positions", self.positions, 0, LAST_POSITION),
            ("calls", (self.calls,), 1, LAST_POSITION),
            ("repeats", (self.repeats,), 1, LAST_POSITION),
        ):
            if not values:
                raise RequestError(f"{name} are empty; give at least one")
            for value in values:
                if not least <= value <= most:
                    raise RequestError(f"{name} has {value}; it must be at least {least} and at most {most:,}")

    @property
    def measurements(self) -> int:
        return len(RECIPES) * (1 + len(self.weights)) * len(self.batches) * len(self.positions)


def decode_plan(quick: bool = False, **given: Any) -> DecodePlan:
    """What is not given (None) is that of a full or a quick run."""
    full: dict[str, Any] = {
        "depth": PAPER_DEPTH,
        "batches": (1, 64, 256),
        "positions": (1000, 10_000, 100_000, 1_000_000),
        "calls": 30,
        "repeats": 5,
    }
    small: dict[str, Any] = {
        "depth": QUICK_DEPTH,
        "batches": (1, 3),
        "positions": (100, 1000),
        "calls": 2,
        "repeats": 2,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    return DecodePlan(**((small if quick else full) | chosen | {"quick": quick}))


def bytes_per_step(decoder: Decoder, batch: int, weight_bytes: int | None = None) -> int:
    """Every weight once, but of the embedding the rows that are looked up; every row's ring, memory and position.

    `weight_bytes` are those of weights that are stored in another way than the decoder's own.
    """
    element = decoder.embedding.weight.element_size()
    if weight_bytes is None:
        numbers = sum(parameter.numel() for parameter in decoder.parameters()) - decoder.embedding.weight.numel()
        weight_bytes = numbers * element
    return weight_bytes + batch * (decoder.config.width * element + state_nbytes(decoder.config, element))


def plain_work(decoder: Decoder, state: DecoderState, tokens: Tensor, readout: bool = True) -> Work:
    """`Decoder.step_`; a graph replays on fixed addresses, so the state's tensors stay what they are."""
    memory, position = state.memory, state.position

    def work() -> Tensor:
        decoder.step_(tokens, state)
        memory.copy_(state.memory)
        position.copy_(state.position)
        state.memory, state.position = memory, position
        return decoder.readout(memory) if readout else memory

    return work


def fast_work(fast: FastDecoder, state: DecoderState, tokens: Tensor, readout: bool = True) -> Work:
    def work() -> Tensor:
        fast.advance(tokens, state, state.memory, state.position)
        return fast.readout(state.memory) if readout else state.memory

    return work


def measure_decode(
    plan: DecodePlan, device: torch.device, dtype: torch.dtype, watch: Watch | None = None, visit: Visit | None = None
) -> dict[str, Any]:
    """`watch` sees every row as it comes; `visit` may do more with each model and batch."""
    configs = {
        name: run_config(recipe, plan.depth, QUICK if plan.quick else {}).model for name, recipe in RECIPES.items()
    }
    rows: list[Row] = []
    launches: dict[str, dict[str, float]] = {}
    for weights in plan.weights:
        check_weights(weights, device)
    with measuring_on(device):
        rates = machine_rates(device, dtype, plan.quick, plan.repeats)
        for name, config in configs.items():
            decoder = random_decoder(config, device, dtype)
            for batch in plan.batches:
                found, times = measure_batch(name, decoder, batch, plan, rates["copy_bytes_per_s"], watch, visit)
                rows += found
                launches |= times
            del decoder
    return {
        "benchmark": "decode",
        "quick": plan.quick,
        "weights": "random",
        "depth": plan.depth,
        **machine_facts(device, dtype),
        **rates,
        "rows": rows,
        "summary": summary(rows),
        "launch_us": launches,
    }


def measure_batch(
    name: str,
    decoder: Decoder,
    batch: int,
    plan: DecodePlan,
    copy_bytes_per_s: float,
    watch: Watch | None,
    visit: Visit | None,
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Rows of every way to step, and what the launches of the fast ones take."""
    tokens = torch.randint(decoder.config.vocab_size, (batch,), device=decoder.device)
    state = full_state(decoder, batch)
    rows: list[Row] = []
    launches = {}

    def add(kind: str, weights: WeightFormat, work: Work, size: int) -> None:
        for found in measure_kind(work, state, plan):
            row = {"model": name, "step": kind, "weight_format": weights, **found, "bytes": size}
            row["share_of_copy"] = size / (found["ms"] / 1e3) / copy_bytes_per_s
            rows.append(row)
            if watch is not None:
                watch(row)

    # first, so that the fast path's copies of weights do not count as the plain one's memory
    add("plain", "plain", plain_work(decoder, state, tokens), bytes_per_step(decoder, batch))
    for weights in plan.weights:
        fast = FastDecoder(decoder, plan.backend, weights)
        size = bytes_per_step(decoder, batch, fast.weight_bytes)
        add("fast", weights, fast_work(fast, state, tokens), size)
        state.position.fill_(plan.positions[0])
        if visit is not None:
            visit(fast, state, tokens)
        stored = "" if weights == "plain" else f", {weights}"
        launches[f"{name}, batch {batch}{stored}"] = launch_times(fast, state, tokens, plan.repeats)
        del fast
    return rows, launches


def measure_kind(work: Work, state: DecoderState, plan: DecodePlan) -> list[Row]:
    """One way to step, from a CUDA graph where there is one, at every position."""
    device, batch = state.memory.device, state.batch_size
    # graphs of the way before hold memory until they are collected
    gc.collect()
    reset_peak(device)
    step = graphed(work, device)
    rows: list[Row] = []
    for position in plan.positions:
        state.position.fill_(position)
        taken = seconds(step, device, plan.calls, plan.repeats)
        row = {"batch": batch, "position": position, "ms": taken * 1e3, "tokens_per_s": batch / taken}
        rows.append(row | {"peak_bytes": peak_bytes(device)})
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """Medians over positions of every way to step: Maglev's time by SWA's, and the slowest position by the fastest."""
    found = []
    keys = ("step", "weight_format", "batch")
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        own = {
            model: [row for row in rows if (row["model"], *(row[name] for name in keys)) == (model, *key)]
            for model in RECIPES
        }
        batch = key[-1]
        ms = {name: statistics.median(row["ms"] for row in each) for name, each in own.items()}
        share = {name: statistics.median(row["share_of_copy"] for row in each) for name, each in own.items()}
        spread = {name: max(r["ms"] for r in each) / min(r["ms"] for r in each) for name, each in own.items()}
        found.append(
            {
                **dict(zip(keys, key, strict=True)),
                "ms": ms,
                "tokens_per_s": {name: batch / value * 1e3 for name, value in ms.items()},
                "share_of_copy": share,
                "bytes": {name: each[0]["bytes"] for name, each in own.items()},
                "peak_bytes": {name: each[0]["peak_bytes"] for name, each in own.items()},
                "maglev_by_swa": ms["maglev"] / ms["swa"],
                "slowest_by_fastest_position": spread,
            }
        )
    return found
