"""What rollouts cost, in three ways: one pass after another over whole rows; as texts side by side, whose keys and
values are kept in place; and these with the gradients of matrices at the end, one product each.

    python benchmarks/rollouts.py [--repeats 3] [--shapes 16,1024,128 ...]

Forward and backward of `maglev-closed`'s second pass. On a CPU in float32 on one thread: seconds, the least of the
repeats, and the bytes that backward is kept. On a GPU in bfloat16, compiled, replayed as a CUDA graph, at the size of
`maglev eval recall`, and how many kernels that is. The last line of stdout is JSON.
"""

import argparse
import gc
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.model.late import late_of
from maglev.objectives import Objective, build
from maglev.objectives.losses import WHOLE_ROWS
from maglev.objectives.sweeps import Sweeps, scatter
from maglev.ops.graphs import capture
from maglev.train.fitting import release
from maglev.train.setup import prepare_blocks

# W, context, rollout: the default of the recall task with longer and longer ones, and the toy of docs/log.md
SHAPES = ("16,1024,16", "16,1024,64", "16,1024,128", "8,128,64")
# rows, depth, width
SIZES = {"cpu": (4, 2, 128), "cuda": (64, 4, 256)}
WAYS = ("one after another", "side by side", "gradients at the end")
# of a graph, before it is timed
WARM_UPS = 3


def one_after_another(sweeps: Sweeps, memory: Tensor, steps: int, embedded: Tensor) -> Tensor:
    length = memory.shape[1]
    for first in range(min(steps, length)):
        positions = range(first, length, steps)
        memory = scatter(memory, sweeps.run(memory, positions, embedded), positions)
    return memory


class Passes:
    """Over one batch, in one of the ways."""

    def __init__(self, way: str, window: int, context: int, steps: int, device: str) -> None:
        rows, depth, width = SIZES[device]
        torch.manual_seed(0)
        self.objective: Objective = build(
            "maglev-closed", depth=depth, width=width, heads=2, window=window, context=context
        )
        self.decoder, self.steps = self.objective.decoder, steps
        self.objective.to(device)
        if device == "cuda":
            self.decoder.embedding.compute_dtype = torch.bfloat16
            prepare_blocks(self.objective, True, "none")
        self.tokens = torch.randint(self.decoder.config.vocab_size, (rows, context), device=device)
        self.memory = torch.randn(rows, context, width, device=device, dtype=self.decoder.compute_dtype)
        late = late_of(self.decoder) if way == WAYS[2] else None
        self.roll = one_after_another if way == WAYS[0] else partial(Sweeps.rollout, late=late)

    def lifted(self) -> tuple[Sweeps, Tensor, Tensor]:
        embedded = self.decoder.embedding(self.tokens)
        sweeps = Sweeps(self.decoder, self.tokens, WHOLE_ROWS)
        return sweeps, sweeps.run(self.memory, range(self.tokens.shape[1]), embedded), embedded

    def second(self, sweeps: Sweeps, lifted: Tensor, embedded: Tensor) -> Tensor:
        return self.roll(sweeps, lifted, self.steps, embedded).float().square().sum()


def storages() -> dict[int, int]:
    """Bytes of every storage that Python knows of."""
    gc.collect()
    # by type: some objects warn when they are asked for their class, and some tensors have no storage
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def on_cpu(passes: Passes, repeats: int) -> dict[str, float]:
    """What is kept is what backward was told to, which Python does not see, and what it keeps by itself."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    times = []
    for _ in range(repeats):
        sweeps, lifted, embedded = passes.lifted()
        kept.clear()
        before = storages()
        began = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = passes.second(sweeps, lifted, embedded)
        forward = time.perf_counter() - began
        held = storages() | kept
        began = time.perf_counter()
        loss.backward()
        times.append(forward + time.perf_counter() - began)
        del loss
    return {"seconds": min(times), "kept_bytes": sum(size for place, size in held.items() if place not in before)}


def on_gpu(passes: Passes, repeats: int) -> dict[str, float]:
    """The first pass is in it; one of `swa-ssss`'s cost says how little of it that is."""

    def whole() -> Tensor:
        loss = passes.second(*passes.lifted())
        loss.backward()
        return loss

    whole()
    whole()
    torch.cuda.synchronize()
    began = time.perf_counter()
    whole()
    torch.cuda.synchronize()
    plain = time.perf_counter() - began
    release(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    _, replay = capture(whole, torch.device("cuda", 0))
    for _ in range(WARM_UPS):
        replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda event: -event.device_time_total)
    for event in found[:14]:
        print(f"    {event.count:6} x {event.device_time_total / event.count:6.2f} us  {event.key[:100]}")
    return {
        "seconds": min(times),
        "kept_bytes": torch.cuda.max_memory_allocated(),
        "unrecorded_seconds": plain,
        "kernels": sum(event.count for event in found),
        "busy_seconds": sum(event.device_time_total for event in found) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="W,CONTEXT,ROLLOUT")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=SIZES)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    measure = {"cpu": on_cpu, "cuda": on_gpu}[asked.device]
    results: list[dict[str, Any]] = []
    for shape in asked.shapes:
        window, context, steps = (int(number) for number in shape.split(","))
        print(f"W {window}, context {context}, rollouts of {steps}")
        for way in asked.ways:
            found = measure(Passes(way, window, context, steps, asked.device), asked.repeats)
            results.append({"window": window, "context": context, "rollout": steps, "way": way} | found)
            more = f", {found['kernels']:,} kernels" if "kernels" in found else ""
            print(f"  {way:20} {found['seconds']:.3f} s, {found['kept_bytes'] / 1e6:,.0f} MB{more}", flush=True)
    rows, depth, width = SIZES[asked.device]
    facts = {"device": asked.device, "rows": rows, "depth": depth, "width": width, "torch": torch.__version__}
    print(json.dumps(facts | {"found": results}))


if __name__ == "__main__":
    main()
