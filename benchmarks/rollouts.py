"""What rollouts side by side save: the same rollouts one pass after another over whole rows, and as texts side by side.

    python benchmarks/rollouts.py [--repeats 3]

Forward and backward of `maglev-closed`'s second pass in float32 on one thread of a CPU: seconds, the least of the
repeats, and the bytes that backward is kept. The last line of stdout is JSON.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.objectives import build
from maglev.objectives.losses import WHOLE_ROWS
from maglev.objectives.sweeps import Sweeps, scatter

# W, context, rollout: the default of the recall task with longer and longer ones, and the toy of docs/log.md
SHAPES = ((16, 1024, 16), (16, 1024, 64), (16, 1024, 128), (8, 128, 64))
ROWS, DEPTH, WIDTH = 4, 2, 128


def one_after_another(sweeps: Sweeps, memory: Tensor, steps: int, embedded: Tensor) -> Tensor:
    length = memory.shape[1]
    for first in range(min(steps, length)):
        positions = range(first, length, steps)
        memory = scatter(memory, sweeps.run(memory, positions, embedded), positions)
    return memory


WAYS = {"one after another": one_after_another, "side by side": Sweeps.rollout}


def measure(way: str, window: int, context: int, steps: int, repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    decoder = build("maglev-closed", depth=DEPTH, width=WIDTH, heads=2, window=window, context=context).decoder
    tokens = torch.randint(decoder.config.vocab_size, (ROWS, context))
    embedded = decoder.embedding(tokens)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    times = []
    for _ in range(repeats):
        sweeps = Sweeps(decoder, tokens, WHOLE_ROWS)
        lifted = sweeps.run(torch.randn(ROWS, context, WIDTH), range(context), embedded)
        kept.clear()
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            memory = WAYS[way](sweeps, lifted, steps, embedded)
        memory.square().sum().backward(retain_graph=True)
        times.append(time.perf_counter() - began)
    return {"seconds": min(times), "kept_bytes": sum(kept.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for window, context, steps in SHAPES:
        found = {way: measure(way, window, context, steps, asked.repeats) for way in WAYS}
        old, new = (found[way] for way in WAYS)
        rows.append({"window": window, "context": context, "rollout": steps} | found)
        print(
            f"W {window}, context {context}, rollouts of {steps}: {old['seconds']:.2f} s, side by side "
            f"{new['seconds']:.2f} s, {new['seconds'] / old['seconds']:.2f} of it; kept "
            f"{new['kept_bytes'] / old['kept_bytes']:.2f} of {old['kept_bytes'] / 1e6:,.0f} MB",
            flush=True,
        )
    print(json.dumps({"rows": ROWS, "depth": DEPTH, "width": WIDTH, "torch": torch.__version__, "found": rows}))


if __name__ == "__main__":
    main()
