"""What windowed attention costs: time, forward and backward, against T at fixed W and against W at fixed T.

    python benchmarks/attention_cost.py [--quick] [--device cpu|cuda] [--threads N]

Prints two tables, each with the exponent of a power law fitted to it (1 is linear, 2 would be a T x T matrix). The
last line of stdout is JSON.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.ops.attention import describe, plan_attention, windowed_attention

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


def draw(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    def numbers(heads: int) -> Tensor:
        return torch.randn(1, length, heads, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)

    return numbers(HEADS), numbers(KV_HEADS), numbers(KV_HEADS)


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The fastest of several runs, after one that warms up: what the work costs, not what else the machine did."""
    best = math.inf
    for attempt in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def measure(length: int, window: int, device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    inputs = draw(length, device, dtype)
    pull = torch.randn(inputs[0].shape, device=device, dtype=dtype)
    plan = plan_attention(window, length, device, dtype=dtype, head_dim=HEAD_DIM)

    def forward() -> Tensor:
        return windowed_attention(*inputs, plan)

    def both() -> None:
        torch.autograd.grad(forward(), inputs, pull)

    return {
        "length": length,
        "window": window,
        "forward_s": seconds(forward, device, repeats),
        "both_s": seconds(both, device, repeats),
    }


def exponent(sizes: list[int], times: list[float]) -> float:
    """Slope of log time against log size, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    top = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return top / sum((a - mean_x) ** 2 for a in x)


def sweep(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    print(f"\n{'T':>7} {'W':>6} {'forward ms':>11} {'+ backward ms':>14} {'ns per T x W':>13}")
    for row in rows:
        share = row["both_s"] * 1e9 / (row["length"] * row["window"])
        print(
            f"{row['length']:>7} {row['window']:>6} {row['forward_s'] * 1e3:>11.2f} "
            f"{row['both_s'] * 1e3:>14.2f} {share:>13.2f}"
        )
    sizes = [row[name] for row in rows]
    fits = {key: round(exponent(sizes, [row[key] for row in rows]), 3) for key in ("forward_s", "both_s")}
    print(f"time ~ {name}^{fits['forward_s']:.2f} forward, {name}^{fits['both_s']:.2f} with backward")
    return {"rows": rows, "exponent_forward": fits["forward_s"], "exponent_both": fits["both_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look and for the tests")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--repeats", type=int, default=0, help="runs per size, the fastest counts; 0: 2 or 5")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    repeats = arguments.repeats or (2 if arguments.quick else 5)
    if arguments.quick:
        lengths, window, windows, length = [256, 512, 1024], 64, [64, 128, 256], 1024
    elif device.type == "cuda":
        lengths, window, windows, length = [2**p for p in range(13, 18)], 512, [256, 512, 1024, 2048, 4096], 32_768
    else:
        lengths, window, windows, length = [2**p for p in range(10, 15)], 128, [128, 256, 512, 1024, 2048], 8192
    print(describe(device.type))
    print(f"{HEADS} heads, {KV_HEADS} of K/V, of {HEAD_DIM}; {str(dtype).removeprefix('torch.')}, batch 1")
    by_length = sweep("length", [measure(size, window, device, dtype, repeats) for size in lengths])
    by_window = sweep("window", [measure(length, size, device, dtype, repeats) for size in windows])
    result = {
        "benchmark": "attention_cost",
        "quick": arguments.quick,
        "kernel": describe(device.type),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "by_length": by_length,
        "by_window": by_window,
    }
    print()
    print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
