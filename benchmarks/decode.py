"""What one decoded token costs, beside what the machine can move and multiply.

    python benchmarks/decode.py [--quick] [--device cuda|cpu] [--depth 20] [--batches 1,64,256]

`maglev bench decode` as a script, with a line per measurement, the time of every launch and, with --tune, other shapes
of the Triton programs. The last line of stdout is JSON.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.bench.decode import decode_plan, measure_decode
from maglev.bench.launches import tuning
from maglev.ops.decode_steps import Backend


def parse() -> argparse.Namespace:
    def whole(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a look and for the tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--depth", type=int, help="layers, width 64 times that; 20, or 2 with --quick")
    parser.add_argument("--batches", type=whole, help="1,64,256 where nothing else is said")
    parser.add_argument("--positions", type=whole, help="1000,10000,100000,1000000")
    parser.add_argument("--backend", choices=get_args(Backend), help="of FastDecoder; the device's own")
    parser.add_argument("--weights", type=names, help="of the fast steps: plain,int8,fp8; plain")
    parser.add_argument("--calls", type=int, help="steps per round; 50, or 2 with --quick")
    parser.add_argument("--repeats", type=int, help="rounds, the median counts; 9, or 2 with --quick")
    parser.add_argument("--tune", action="store_true", help="also time other shapes of the Triton programs")
    return parser.parse_args()


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:>7} {row['step']:>6} {row['weight_format']:>7} {row['batch']:>6} {row['position']:>9} "
        f"{row['ms']:>9.4f} {row['tokens_per_s']:>12.0f} {row['share_of_copy']:>8.1%} "
        f"{(row['peak_bytes'] or 0) / 2**30:>9.2f}"
    )


def main() -> None:
    given = vars(parse())
    tune, device = given.pop("tune"), torch.device(given.pop("device"))
    plan = decode_plan(**given)
    print(
        f"{'model':>7} {'step':>6} {'weights':>7} {'batch':>6} {'position':>9} {'ms':>9} {'tokens/s':>12} {'share':>8} "
        f"{'peak GiB':>9}"
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    visit = partial(tuning, repeats=plan.repeats) if tune else None
    result = measure_decode(plan, device, dtype, show, visit)
    print(f"copy {result['copy_bytes_per_s'] / 1e12:.3f} TB/s, matrices {result['matrix_flops'] / 1e12:.2f} TFLOP/s")
    for title, times in result["launch_us"].items():
        print(f"{title}: " + ", ".join(f"{each} {value:.2f} us" for each, value in times.items()))
    print()
    print(json.dumps(result, allow_nan=False))


if __name__ == "__main__":
    main()
