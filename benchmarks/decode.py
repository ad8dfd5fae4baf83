"""What one decoded token costs, beside what the machine can move and multiply.

    python benchmarks/decode.py [--quick] [--device cuda|cpu] [--depth 20] [--batches 1,64,256]

SWA and Maglev, bfloat16, random weights and full rings at several positions; Decoder.step_ ("plain") and FastDecoder
("fast"), each with the readout and from a CUDA graph. The share is that of the bytes which must move (every weight
once, every row's state once) at the bandwidth of a device copy in the same run. The last line of stdout is JSON.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.inference.fast_step import FastDecoder
from maglev.model.accounting import state_nbytes
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.ops.decode_steps import Backend
from maglev.recipes import run_config

RECIPES = {"swa": "swa-ssss", "maglev": "maglev-shared-0.1"}
WARM_UPS = 3

Work = Callable[[], object]


def seconds(work: Work, device: torch.device, calls: int, repeats: int) -> float:
    """Per call: the median of several rounds of `calls`, after a warm-up."""
    for _ in range(WARM_UPS):
        work()
    rounds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            rounds.append(start.elapsed_time(end) / 1e3 / calls)
        else:
            begun = time.perf_counter()
            for _ in range(calls):
                work()
            rounds.append((time.perf_counter() - begun) / calls)
    return statistics.median(rounds)


def graphed(work: Work, device: torch.device) -> Work:
    """`work` as one replay of a CUDA graph; as it is where there are none."""
    if device.type != "cuda":
        return work
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def machine_rates(device: torch.device, dtype: torch.dtype, quick: bool, repeats: int) -> dict[str, float]:
    """Bytes per second that a copy reads and writes, and matrix operations per second."""
    size, side = (1 << 22, 256) if quick else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, 5, repeats)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = seconds(lambda: left @ right, device, 5, repeats)
    return {"copy_bytes_per_s": 2 * size / copy, "matrix_flops": 2 * side**3 / product}


def build(recipe: str, depth: int, device: torch.device, dtype: torch.dtype, quick: bool) -> Decoder:
    small = {"model.context": 64, "model.vocab_size": 256} if quick else {}
    decoder = Decoder(run_config(recipe, depth, small).model).to(device, dtype).requires_grad_(False)
    for name, parameter in decoder.named_parameters():
        if name.endswith("scale"):
            parameter.fill_(1.0 if name.endswith("residual_scale") else 0.1)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return decoder


def full_state(decoder: Decoder, batch: int) -> DecoderState:
    state = decoder.initial_state(batch)
    for ring in state.caches:
        ring.key.normal_()
        ring.value.normal_()
    state.memory.normal_()
    return state


def bytes_per_step(decoder: Decoder, batch: int) -> int:
    """Every weight once, but of the embedding the rows that are looked up; every row's ring, memory and position."""
    element = decoder.embedding.weight.element_size()
    numbers = sum(parameter.numel() for parameter in decoder.parameters()) - decoder.embedding.weight.numel()
    numbers += batch * decoder.config.width
    return numbers * element + batch * state_nbytes(decoder.config, element)


def plain_work(decoder: Decoder, state: DecoderState, tokens: Tensor) -> Work:
    memory, position = state.memory, state.position

    def work() -> Tensor:
        decoder.step_(tokens, state)
        # a graph replays on fixed addresses
        memory.copy_(state.memory)
        position.copy_(state.position)
        state.memory, state.position = memory, position
        return decoder.readout(memory)

    return work


def fast_work(fast: FastDecoder, state: DecoderState, tokens: Tensor) -> Work:
    def work() -> Tensor:
        fast.advance(tokens, state, state.memory, state.position)
        return fast.readout(state.memory)

    return work


def launches(fast: FastDecoder, state: DecoderState, tokens: Tensor) -> tuple[dict[str, Work], dict[str, Work]]:
    """Each of a layer's launches, for all layers after one another, and each of those once per step."""
    steps, layers, rings, position = fast.steps, fast.layers, state.caches, state.position
    start, cos, sin = steps.begin_step(tokens, fast.embedding, position, fast.frequencies)
    features = None if fast.memory_weight is None else steps.project(state.memory, fast.memory_weight)
    first = layers[0]
    x, projected = steps.scale_norm_project(start, start, first.scales, first.stacked)
    attended = steps.project_add(x, x, first.output)
    hidden = steps.norm_project_relu2(x, first.up)
    out, after = torch.empty_like(x), torch.empty_like(position)

    def ring_attend() -> None:
        for ring in rings:
            steps.ring_attend(
                projected, features, ring.key, ring.value, position, cos, sin, fast.arrivals, fast.config.heads
            )

    per_layer: dict[str, Work] = {
        "scale_norm_project": lambda: [
            steps.scale_norm_project(x, start, each.scales, each.stacked) for each in layers
        ],
        "ring_attend": ring_attend,
        "output project_add": lambda: [steps.project_add(x, attended, each.output) for each in layers],
        "norm_project_relu2": lambda: [steps.norm_project_relu2(x, each.up) for each in layers],
        "down project_add": lambda: [steps.project_add(x, hidden, each.down) for each in layers],
    }
    per_step: dict[str, Work] = {
        "begin_step": lambda: steps.begin_step(tokens, fast.embedding, position, fast.frequencies),
        "finish_step": lambda: steps.finish_step(x, position, out, after),
        "read_out": lambda: fast.readout(state.memory),
    }
    return per_layer, per_step


def launch_times(fast: FastDecoder, state: DecoderState, tokens: Tensor, repeats: int) -> dict[str, float]:
    """Microseconds of every launch, by itself in a graph."""
    per_layer, per_step = launches(fast, state, tokens)
    times = {}
    for name, work in (per_layer | per_step).items():
        taken = seconds(graphed(work, tokens.device), tokens.device, 20, repeats)
        times[name] = round(taken * 1e6 / (len(fast.layers) if name in per_layer else 1), 3)
    return times


def tuning(fast: FastDecoder, state: DecoderState, tokens: Tensor, repeats: int) -> None:
    """Print microseconds per layer with other shapes of the kernels' programs than those in `ops`."""
    from maglev.ops import fused_decode, fused_ring

    kept = {
        module: {name: getattr(module, name) for name in names}
        for module, names in (
            (fused_ring, ("WARPS", "TILE", "PROGRAMS")),
            (fused_decode, ("VECTOR_ROWS", "PROGRAMS")),
        )
    }
    rings = [{"WARPS": w, "TILE": 1024 * w, "PROGRAMS": p} for w in (1, 2, 4) for p in (256, 512, 1024, 2048)]
    products = [{"VECTOR_ROWS": r, "PROGRAMS": p} for r in (2, 4, 8) for p in (132, 264, 528)]
    for module, choices in ((fused_ring, rings), (fused_decode, products)):
        for choice in choices:
            for name, value in choice.items():
                setattr(module, name, value)
            work = launches(fast, state, tokens)[0]
            names = [name for name in work if (name == "ring_attend") == (module is fused_ring)]
            times = {name: seconds(graphed(work[name], tokens.device), tokens.device, 20, repeats) for name in names}
            shown = {name: round(value * 1e6 / len(fast.layers), 3) for name, value in times.items()}
            print(f"batch {tokens.shape[0]}: {choice | shown}")
        for name, value in kept[module].items():
            setattr(module, name, value)


def measure(
    name: str, decoder: Decoder, batch: int, options: argparse.Namespace, copy_bytes_per_s: float
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    device, moved = decoder.device, bytes_per_step(decoder, batch)
    tokens = torch.randint(decoder.config.vocab_size, (batch,), device=device)
    state, fast = full_state(decoder, batch), FastDecoder(decoder, options.backend)
    rows = []
    for kind, work in (("plain", plain_work(decoder, state, tokens)), ("fast", fast_work(fast, state, tokens))):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step = graphed(work, device)
        for position in options.positions:
            state.position.fill_(position)
            taken = seconds(step, device, options.calls, options.repeats)
            row = {
                "model": name,
                "step": kind,
                "batch": batch,
                "position": position,
                "ms": taken * 1e3,
                "tokens_per_s": batch / taken,
                "bytes": moved,
                "share_of_copy": moved / taken / copy_bytes_per_s,
                "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
            }
            print(
                f"{name:>7} {kind:>6} {batch:>6} {position:>9} {row['ms']:>9.4f} {row['tokens_per_s']:>12.0f} "
                f"{row['share_of_copy']:>8.1%} {row['peak_bytes'] / 2**30:>9.2f}"
            )
            rows.append(row)
    state.position.fill_(options.positions[0])
    if options.tune:
        tuning(fast, state, tokens, options.repeats)
    return rows, launch_times(fast, state, tokens, options.repeats)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per step and batch: Maglev's time by SWA's, and the slowest position by the fastest."""
    found = []
    for kind, batch in dict.fromkeys((row["step"], row["batch"]) for row in rows):
        times = {
            name: [row["ms"] for row in rows if (row["model"], row["step"], row["batch"]) == (name, kind, batch)]
            for name in RECIPES
        }
        found.append(
            {
                "step": kind,
                "batch": batch,
                "maglev_by_swa": statistics.median(times["maglev"]) / statistics.median(times["swa"]),
                "slowest_by_fastest_position": {name: max(each) / min(each) for name, each in times.items()},
            }
        )
    return found


def parse() -> argparse.Namespace:
    def whole(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a look and for the tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--depth", type=int, default=0, help="layers, width 64 times that; 0: 20, or 2 with --quick")
    parser.add_argument("--batches", type=whole, default=None, help="1,64,256 where nothing else is said")
    parser.add_argument("--positions", type=whole, default=None, help="1000,10000,100000,1000000")
    parser.add_argument("--backend", choices=get_args(Backend), default=None, help="of FastDecoder; the device's own")
    parser.add_argument("--calls", type=int, default=0, help="steps per round; 0: 50, or 2 with --quick")
    parser.add_argument("--repeats", type=int, default=0, help="rounds, the median counts; 0: 9, or 2 with --quick")
    parser.add_argument("--tune", action="store_true", help="also time other shapes of the Triton programs")
    options = parser.parse_args()
    options.depth = options.depth or (2 if options.quick else 20)
    options.batches = options.batches or ([1, 3] if options.quick else [1, 64, 256])
    options.positions = options.positions or ([100, 1000] if options.quick else [1000, 10_000, 100_000, 1_000_000])
    options.calls = options.calls or (2 if options.quick else 50)
    options.repeats = options.repeats or (2 if options.quick else 9)
    return options


@torch.inference_mode()
def main() -> None:
    options = parse()
    torch.manual_seed(0)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = machine_rates(device, dtype, options.quick, options.repeats)
    print(f"copy {rates['copy_bytes_per_s'] / 1e12:.3f} TB/s, matrices {rates['matrix_flops'] / 1e12:.2f} TFLOP/s")
    print(
        f"{'model':>7} {'step':>6} {'batch':>6} {'position':>9} {'ms':>9} {'tokens/s':>12} {'share':>8} {'peak GiB':>9}"
    )
    rows: list[dict[str, Any]] = []
    launches: dict[str, dict[str, float]] = {}
    for name, recipe in RECIPES.items():
        decoder = build(recipe, options.depth, device, dtype, options.quick)
        for batch in options.batches:
            found, launches[f"{name}, batch {batch}"] = measure(
                name, decoder, batch, options, rates["copy_bytes_per_s"]
            )
            rows += found
    for title, times in launches.items():
        print(f"{title}: " + ", ".join(f"{each} {value:.2f} us" for each, value in times.items()))
    result = {
        "benchmark": "decode",
        "quick": options.quick,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "dtype": str(dtype).removeprefix("torch."),
        "depth": options.depth,
        "torch": torch.__version__,
        **rates,
        "rows": rows,
        "summary": summary(rows),
        "launch_us": launches,
    }
    print()
    print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
