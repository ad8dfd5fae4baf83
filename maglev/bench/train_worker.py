"""One model of `maglev bench train`, in a process of its own: start-up and peak memory are then its alone.

`python -m maglev.bench.train_worker` reads a JSON document on stdin (see `Order`) and leaves one on its last line.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from maglev.bench.clock import machine_facts, peak_bytes, reset_peak
from maglev.bench.limits import machine_rates
from maglev.bench.lines import Lines
from maglev.bench.trace import PREFIX, kinds_of_ops
from maglev.config import RunConfig
from maglev.data.loader import Batch
from maglev.errors import RequestError, WorkError
from maglev.model.accounting import objective_flops
from maglev.objectives.maglev import MaglevObjective
from maglev.recipes import run_config
from maglev.train.distributed import Ranks, first_line
from maglev.train.loop import Trainer
from maglev.train.setup import compute_dtype
from maglev.train.task import Rows, Validation

REPEATS = 5
PARTS = ("prefiller", "decoder", "loss", "backward", "optimizer")


@dataclass(frozen=True)
class Order:
    """What a worker measures: one recipe with each of the settings in turn. `began` is when its process was started;
    `split` asks for that start and for where the time of a step goes too."""

    recipe: str
    depth: int
    settings: list[dict[str, Any]]
    steps: int
    device: str
    quick: bool
    began: float
    split: bool = True


class RandomRows:
    """Tokens that mean nothing: what a step costs does not depend on them."""

    fingerprint = "random tokens"
    tokens_per_epoch = float("inf")

    def __init__(self, vocab_size: int, context: int, seed: int) -> None:
        self.vocab_size, self.context, self.seed = vocab_size, context, seed

    def batch(self, rows: Sequence[int]) -> Batch:
        draw = np.random.default_rng((self.seed, rows[0]))
        tokens = draw.integers(self.vocab_size, size=(len(rows), self.context + 1))
        return Batch(tokens[:, :-1], tokens[:, 1:], np.zeros_like(tokens[:, 1:]))


class RandomTask:
    source = file = fingerprint = "random tokens"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def rows(self, context: int, seed: int) -> Rows:
        return RandomRows(self.vocab_size, context, seed)

    def validation(self, context: int, rows: int) -> Validation:
        raise AssertionError("a benchmark validates nothing")

    def save(self, run: Path) -> None:
        pass

    def check(self, run: Path) -> None:
        pass

    def check_tokens(self, run: Path) -> None:
        pass


class Parts:
    """Where a step's time goes: marks at the borders of its parts, as events of the GPU's own stream where it has one.

    What lies between a mark and the next belongs to the part that the mark names.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def within(self, part: str, after: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self.mark(part)
            with torch.profiler.record_function(PREFIX + part):
                result = work(*arguments, **named)
            self.mark(after)
            return result

        return timed

    def milliseconds(self) -> dict[str, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        times = dict.fromkeys((*PARTS, "rest"), 0.0)
        for (part, begin), (_, end) in zip(self.marks, self.marks[1:]):
            cuda = self.device.type == "cuda"
            times[part] += begin.elapsed_time(end) if cuda else (end - begin) * 1e3
        return times


@contextmanager
def marked(trainer: Trainer) -> Iterator[Parts]:
    """The trainer's own step, with marks where its parts meet. The loss is what an objective does beside its passes;
    backward has the gradient norm in it."""
    parts, objective = Parts(trainer.device), trainer.objective
    places: list[tuple[Any, str, str, str]] = [
        (objective, "forward", "loss", "backward"),
        (objective.decoder, "run", "decoder", "loss"),
        (trainer.optimizer, "step", "optimizer", "rest"),
    ]
    if isinstance(objective, MaglevObjective):
        places.append((objective.prefiller, "forward", "prefiller", "loss"))
    for owner, name, part, after in places:
        setattr(owner, name, parts.within(part, after, getattr(owner, name)))
    try:
        with trainer.passes.recorder.paused():
            yield parts
    finally:
        for owner, name, *_ in places:
            delattr(owner, name)


def split_by_part(trainer: Trainer) -> dict[str, float]:
    with marked(trainer) as parts:
        parts.mark("rest")
        trainer.one_step()
        parts.mark("rest")
    return parts.milliseconds()


def split_by_op(trainer: Trainer) -> dict[str, float]:
    """Kernels of one step by kind, from the profiler; only a GPU has them."""
    if trainer.device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with marked(trainer), torch.profiler.profile(activities=activities) as profiler:
        trainer.one_step()
        torch.cuda.synchronize(trainer.device)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kinds_of_ops(json.loads(path.read_text())["traceEvents"])


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """What is asked for, as it stands in a row."""
    return {
        "recipe": config.recipe,
        "depth": config.model.depth,
        "width": config.model.width,
        "context": config.model.context,
        "window": config.model.window,
        "rows": config.train.rows_per_pass,
        "tokens_per_step": config.train.tokens_per_step,
        "recompute": config.train.recompute,
        "products": config.train.products,
    }


def measure_point(config: RunConfig, order: Order, device: torch.device) -> dict[str, Any]:
    """The first step, then warm ones, then one by part and one by kind of op: all of them the trainer's."""
    imported = time.time()
    trainer = Trainer(config, RandomTask(config.model.vocab_size), Path(), Ranks(0, 1, 0, device), Lines())
    built = time.time()
    trainer.fit_rows()
    trainer.one_step()
    first = time.time()
    trainer.one_step()
    while not trainer.passes.recorder.settled:
        trainer.one_step()
    times = []
    for _ in range(order.steps):
        before = trainer.progress.seconds
        trainer.one_step()
        times.append(trainer.progress.seconds - before)
    # what a recorded pass uses is not told apart
    with trainer.passes.recorder.paused():
        reset_peak(device)
        trainer.one_step()
        peak = peak_bytes(device)
    rate = config.train.tokens_per_step / median(times)
    row = sizes_of(config) | {
        "rows": trainer.passes.rows_per_pass,
        "steps_timed": len(times),
        "seconds_per_step": median(times),
        "least_seconds_per_step": min(times),
        "largest_seconds_per_step": max(times),
        "tokens_per_s": rate,
        "flops_per_token": 3 * objective_flops(config),
        "flops_per_s": 3 * objective_flops(config) * rate,
        "peak_bytes": peak,
        "recorded": trainer.passes.recorder.holds,
        "attention": trainer.describe()[1],
        "loss_finite": trainer.progress.bad_steps == 0,
    }
    if not order.split:
        return row
    row["start_to_first_step_s"] = first - order.began
    row["start_s_by_part"] = {"imports": imported - order.began, "set-up": built - imported, "step": first - built}
    return row | {"ms_by_part": split_by_part(trainer), "ms_by_op": split_by_op(trainer)}


def forget(device: torch.device) -> None:
    """Leave nothing of a model to the one after it: neither memory nor compiled code."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def work(order: Order) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device(order.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rows = []
    for settings in order.settings:
        config = run_config(order.recipe, order.depth, settings)
        try:
            rows.append(measure_point(config, order, device))
        except Exception as error:
            # a size that does not fit leaves the others their figures
            rows.append(sizes_of(config) | {"error": told(error)})
        forget(device)
    dtype = compute_dtype(config, device)
    return {"rows": rows} | machine_facts(device, dtype) | machine_rates(device, dtype, order.quick, REPEATS)


def told(error: Exception) -> str:
    own = isinstance(error, RequestError | WorkError)
    return first_line(error) if own else f"{type(error).__name__}: {first_line(error)}"


def as_json(order: Order) -> str:
    return json.dumps(asdict(order))


if __name__ == "__main__":
    print(json.dumps(work(Order(**json.load(sys.stdin)))))
