"""Attention in training on a GPU, forward and backward: every kernel there is, for every shape that the models have.

    python benchmarks/attention_gpu.py [--out results/attention-h200.json] [--seconds 150]

d12, d20 and d8, windowed (a quarter of the context) and full, and passes over some positions, bfloat16. Times stand
beside the matrix product's rate of the same run, counting the keys that a query sees: 4 x width each forward, 10 x
backward. First come tiles for our own kernels, one changed at a time, as long as a third of the time lasts; the best go
into what follows. At the end stand the best kernel of each shape and the orders for `maglev/ops/attention.py`, which
are those over all positions. The last line of stdout is JSON.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev import files
from maglev.bench.clock import graphed, machine_facts, seconds
from maglev.bench.limits import machine_rates
from maglev.ops import kernels
from maglev.ops.attention import windowed_attention
from maglev.ops.kernels import BLOCKWISE, FUSED, KERNELS, SDPA, Case, plan_for

try:
    from maglev.ops.fused_attention import TILES, Tile
except ImportError as error:
    sys.exit(f"this benchmark needs a CUDA GPU and Triton ({error})")

HEAD_DIM, DTYPE = 128, torch.bfloat16
CALLS, REPEATS = 10, 5
FORWARD, BACKWARD = 4, 10
# what our kernels could take instead, all without spills at heads of 128 (tests/ops/test_fused_compile.py shows how)
OTHERS: list[tuple[str, Tile]] = [
    ("forward", Tile(128, 64, 8, 3)),
    ("forward", Tile(128, 128, 8, 2)),
    ("queries", Tile(128, 64, 8, 3)),
    ("queries", Tile(128, 128, 8, 2)),
    ("queries", Tile(128, 32, 8, 2)),
    ("keys", Tile(64, 128, 8, 2)),
    ("keys", Tile(32, 128, 8, 3)),
    ("keys", Tile(32, 64, 4, 3)),
]

Row = dict[str, Any]


class Shape(NamedTuple):
    model: str
    rows: int
    context: int
    heads: int
    window: int
    # of so many positions one is computed
    step: int = 1

    @property
    def queries(self) -> range:
        return range(self.step - 1, self.context, self.step)

    @property
    def case(self) -> Case:
        return Case("cuda", DTYPE, HEAD_DIM, len(self.queries), self.window == self.context, self.step == 1)

    def flops(self, each: int) -> float:
        seen = sum(min(at + 1, self.window) for at in self.queries)
        return each * seen * self.rows * self.heads * HEAD_DIM

    def __str__(self) -> str:
        some = f", one of {self.step}" if self.step > 1 else ""
        return f"{self.model}, {self.rows} x {self.context}{some}, {self.heads} heads, window {self.window}"


MODELS = [("d12", 16, 2048, 6), ("d12", 32, 2048, 6), ("d20", 8, 2048, 10), ("d8", 64, 1024, 4)]
SHAPES = [Shape(*model, model[2] // share) for share in (4, 1) for model in MODELS]
# passes of LRT, and of rollouts, over some positions
SHAPES += [Shape("d12", 16, 2048, 6, 512, 2), Shape("d8", 64, 1024, 4, 256, 4), Shape("d8", 64, 1024, 4, 256, 32)]


def by_plan(kernel: str, shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    plan = plan_for(kernel, shape.window, shape.context, device, shape.queries)
    return lambda *given: windowed_attention(*given, plan)


def by_backend(backend: SDPBackend, shape: Shape, device: torch.device) -> Callable[..., Tensor]:
    attend = by_plan(SDPA, shape, device)

    def alone(*given: Tensor) -> Tensor:
        kernels.BACKENDS[:] = [backend]
        return attend(*given)

    return alone


def ways_of(shape: Shape, device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Plain PyTorch is left out where there are others: it is not to be near."""
    left_out = (SDPA,) if shape.step > 1 else (BLOCKWISE, SDPA)
    names = [name for name, kernel in KERNELS.items() if name not in left_out and kernel.serves(shape.case)]
    ways = {name: by_plan(name, shape, device) for name in names}
    if KERNELS[SDPA].serves(shape.case):
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
        ways |= {f"{SDPA}, {each.name.split('_')[0].lower()}": by_backend(each, shape, device) for each in backends}
    return ways


def measure(name: str, attend: Callable[..., Tensor], shape: Shape, given: list[Tensor], rate: float) -> Row | None:
    """One line and one row; None where this GPU, build or tile cannot."""
    device = given[0].device
    try:
        pull = torch.randn_like(attend(*given))
        # recorded: in training the GPU is behind, and what a launch costs the host is not seen
        forward = seconds(graphed(lambda: attend(*given), device), device, CALLS, REPEATS)
        whole = graphed(lambda: torch.autograd.grad(attend(*given), given, pull), device)
        both = seconds(whole, device, CALLS, REPEATS)
    except Exception as error:  # whatever a kernel raises: the others go on
        print(f"{shape}, {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")
        return None
    row = shape._asdict() | {"way": name, "forward_us": forward * 1e6, "both_us": both * 1e6}
    row["forward_share"] = shape.flops(FORWARD) / forward / rate
    row["both_share"] = shape.flops(FORWARD + BACKWARD) / both / rate
    print(
        f"{shape}, {name:40}: forward {row['forward_us']:6.0f} us, with backward {row['both_us']:6.0f} us; of the rate "
        f"{row['forward_share']:.1%} and {row['both_share']:.1%}",
        flush=True,
    )
    return row


def inputs_of(shape: Shape, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    lengths = (len(shape.queries), shape.context, shape.context)
    sizes = [(shape.rows, length, shape.heads, HEAD_DIM) for length in lengths]
    return [torch.randn(size, device=device, dtype=DTYPE).requires_grad_() for size in sizes]


def search(shape: Shape, device: torch.device, rate: float, until: float) -> list[Row]:
    """Tiles of our kernels, each part alone: the best of each stay in `TILES`."""
    usual, best, found = dict(TILES), dict(TILES), []
    given, attend = inputs_of(shape, device), by_plan(FUSED, shape, device)
    least: dict[str, float] = {}
    for part, tile in [*usual.items(), *OTHERS]:
        if time.monotonic() > until and tile != usual[part]:
            print(f"no time for {part} {tuple(tile)}")
            continue
        TILES.update(usual | {part: tile})
        row = measure(f"{FUSED}, {part} {tuple(tile)}", attend, shape, given, rate)
        if row is None:
            continue
        found.append(row)
        cost = row["forward_us" if part == "forward" else "both_us"]
        if cost < least.get(part, math.inf):
            least[part], best[part] = cost, tile
    TILES.update(best)
    print(f"tiles: {', '.join(f'{part} {tuple(tile)}' for part, tile in best.items())}")
    return found


def orders(rows: list[Row]) -> dict[str, list[str]]:
    """Kernels by the mean over shapes of their time beside the best's, those first that are in all of them."""
    found = {}
    for kind, windowed in (("windowed", True), ("full", False)):
        shapes: dict[Any, dict[str, float]] = {}
        for row in rows:
            if (row["window"] < row["context"]) == windowed and row["step"] == 1:
                key, name = (row["model"], row["rows"]), row["way"].split(",")[0]
                own = shapes.setdefault(key, {})
                own[name] = min(own.get(name, math.inf), row["both_us"])
        names = {name for own in shapes.values() for name in own}

        def slower(name: str, shapes: Any = shapes) -> float:
            return sum(own.get(name, math.inf) / min(own.values()) for own in shapes.values())

        found[kind] = sorted(names, key=slower)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, help="a third of it for tiles")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    began, device = time.monotonic(), torch.device("cuda")
    rates = machine_rates(device, DTYPE, False, REPEATS)
    rate = rates["matrix_flops"]
    tiles = search(SHAPES[0], device, rate, began + asked.seconds / 3)
    found: list[Row] = []
    for shape in SHAPES:
        given, own = inputs_of(shape, device), []
        for name, attend in ways_of(shape, device).items():
            row = measure(name, attend, shape, given, rate)
            own += [] if row is None else [row]
        if own:
            best = min(own, key=lambda row: row["both_us"])
            best["best"] = True
            print(f"{shape}: {best['way']}\n", flush=True)
        found += own
    result = {
        "benchmark": "attention",
        "rows": found,
        "tiles": tiles,
        "chosen_tiles": {part: list(tile) for part, tile in TILES.items()},
        "orders": orders(found),
        "seconds": time.monotonic() - began,
    }
    result |= rates | machine_facts(device, DTYPE)
    for kind, names in result["orders"].items():
        print(f"{kind}: {', '.join(names)}")
    if asked.out:
        files.write_json(asked.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
