"""Whether training on kernels follows plain PyTorch: 200 steps of a small model from one seed, every recipe.

    python benchmarks/follow.py [--steps 200] [--jobs 8] [--out FILE] [--plot FILE]
    python benchmarks/follow.py --one swa-ssss plain --rows 4 --stop 17 --precision bfloat16 --device cpu

`fast` is what training takes on this device, `plain` the same model without compilation, with attention and loss as
plain PyTorch. Each is run twice, a step as one pass and as two (`plain-2`), which only add up in another order;
`nudge-1` to `nudge-4` are `plain` with every initial weight off by a rounding of bfloat16. So all plain runs have the
same rows, seed and arithmetic, and what lies between the two that are farthest apart is what rounding alone can make of
a run: the spread. Kernels follow where each run on them is at most that far from the plain one that is nearest to it.
To see what this can tell, plain runs of all other recipes are held against it too (`wrong_ones_that_follow`), and each
plain run is left out once (`hangs_on`: those without which kernels do not follow). `fp8` is `fast` with products
in 8 bits, for two recipes and no part of the verdict. Losses are means over 20 steps; the text is the documentation of
Python's own modules, byte by byte, so it depends on Python's version. The last line of stdout is JSON; with `--one`
that is the losses of one recipe and way, up to `--stop` where it is given; there, `exact` is `plain` in float32 and
`compiled` is `plain` with compiled blocks on any device. FILE has every run that is done as soon as it is, and what is
in it is not run again. Exits with 1 where kernels do not follow.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev import files, plots
from maglev.bench.clock import machine_facts
from maglev.bench.lines import Lines
from maglev.bench.sources import source_fingerprint
from maglev.bench.train_worker import RandomTask
from maglev.data.loader import Batch
from maglev.data.stdlib_text import documents
from maglev.ops import fp8
from maglev.recipes import RECIPES, run_config
from maglev.train.distributed import Ranks
from maglev.train.loop import Trainer
from maglev.train.passes import StepLosses
from maglev.train.task import Rows

DEPTH, WIDTH, CONTEXT, WINDOW, ROWS = 4, 256, 512, 128, 32
FAST = ["fast", "fast-2"]
NUDGES = 4
PLAIN = ["plain", "plain-2", *(f"nudge-{number}" for number in range(1, NUDGES + 1))]
WAYS = [*FAST, *PLAIN]
# relative; half of the distance between two numbers of bfloat16
NUDGE = 2.0**-9
COMPILED = ("fast", "fp8")
# and beside them, for these
BESIDE, BESIDES = ("swa-ssss", "maglev-shared-0.1"), ("fp8",)
SMOOTH = 20
Curves = dict[str, list[float]]


class TextRows:
    """Pieces of the text at random places, as bytes."""

    fingerprint = "documentation of Python's modules"
    tokens_per_epoch = float("inf")

    def __init__(self, context: int, seed: int) -> None:
        text = "".join(text for _, text in documents()).encode()
        self.text = np.frombuffer(text, np.uint8).astype(np.int64)
        self.context, self.seed = context, seed

    def batch(self, rows: Any) -> Batch:
        draws = (np.random.default_rng((self.seed, row)).integers(len(self.text) - self.context - 1) for row in rows)
        tokens = np.stack([self.text[first : first + self.context + 1] for first in draws])
        return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.zeros_like(tokens[:, 1:]))


class TextTask(RandomTask):
    def rows(self, context: int, seed: int) -> Rows:
        return TextRows(context, seed)


def trainer_of(recipe: str, way: str, asked: argparse.Namespace, device: torch.device) -> Trainer:
    steps, rows = asked.steps, asked.rows
    kind, _, number = way.partition("-")
    passes = 1 if kind == "nudge" else int(number or 1)
    settings = {
        "model.width": WIDTH,
        "model.context": CONTEXT,
        "model.window": WINDOW,
        "model.vocab_size": 256,
        "train.steps": steps,
        "train.tokens_per_step": rows * CONTEXT,
        "train.rows_per_pass": rows // passes,
        "train.seed": 0,
        "train.precision": "float32" if kind == "exact" else asked.precision,
        "train.validate_every": 0,
        "train.compile": "on" if kind == "compiled" else "auto" if kind in COMPILED else "off",
        "train.attention": "auto" if kind in COMPILED else "blockwise",
        "train.products": "fp8" if kind == "fp8" else "plain",
    }
    trainer = Trainer(run_config(recipe, DEPTH, settings), TextTask(256), Path(), Ranks(0, 1, 0, device), Lines())
    if kind == "nudge":
        nudge(trainer.objective.parameters(), int(number))
    return trainer


@torch.no_grad()
def nudge(parameters: Iterable[torch.Tensor], seed: int) -> None:
    """Every number off by up to a rounding."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = 2 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) - 1
        parameter.mul_(1 + NUDGE * noise.to(parameter.device))


def losses_of(recipe: str, way: str, asked: argparse.Namespace, device: torch.device) -> list[float]:
    trainer = trainer_of(recipe, way, asked, device)
    found: list[float] = []

    def record(losses: StepLosses, skipped: bool, seconds: float) -> None:
        found.append(losses.next_token)

    trainer.record = record  # type: ignore[method-assign]
    for _ in range(asked.stop or asked.steps):
        trainer.one_step()
    return found


def run_one(recipe: str, way: str, asked: argparse.Namespace) -> list[float]:
    command = [sys.executable, __file__, "--one", recipe, way, "--steps", str(asked.steps), "--device", asked.device]
    command += ["--rows", str(asked.rows), "--precision", asked.precision]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{recipe}, {way}: {done.stderr[-1500:]}")
    print(f"{recipe}, {way}: done", file=sys.stderr, flush=True)
    losses: list[float] = json.loads(done.stdout.splitlines()[-1])
    return losses


def kept(path: Path | None, facts: dict[str, Any]) -> dict[str, Any]:
    """Losses that an earlier call left there, if it asked for the same."""
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    if {name: found.get(name) for name in facts} != facts:
        raise SystemExit(f"{path} is of other settings or other code; remove it or name another file")
    return {recipe: {"losses": row["losses"]} for recipe, row in found["recipes"].items()}


def smooth(losses: list[float]) -> np.ndarray:
    size = min(SMOOTH, len(losses))
    return np.convolve(losses, np.full(size, 1 / size), mode="valid")


def gap(one: list[float], other: list[float]) -> float:
    """The widest of the smoothed curves, after the first tenth."""
    apart = np.abs(smooth(one) - smooth(other))
    return float(apart[len(apart) // 10 :].max())


def nearest(curve: list[float], curves: Curves, plain: Sequence[str] = PLAIN) -> float:
    """To a plain one."""
    return min(gap(curve, curves[way]) for way in plain)


def bounds(curves: Curves, plain: Sequence[str] = PLAIN) -> tuple[float, float]:
    """-> how far a run on kernels is from the nearest of these plain ones, at most; how far these are apart"""
    spread = max(gap(curves[one], curves[other]) for one, other in itertools.combinations(plain, 2))
    # a curve that is not finite does not follow
    return float(np.max([nearest(curves[way], curves, plain) for way in FAST])), spread


def compare(curves: Curves, others: dict[str, Curves]) -> dict[str, Any]:
    """Kernels beside plain runs of a recipe, and those of `others`, which are wrong models here."""
    row: dict[str, Any] = {"last": {way: float(smooth(losses)[-1]) for way, losses in curves.items()}}
    row["farthest"], row["spread"] = bounds(curves)
    row["follows"] = row["farthest"] <= row["spread"]
    without = {way: bounds(curves, [other for other in PLAIN if other != way]) for way in PLAIN}
    row["hangs_on"] = [way for way, (farthest, spread) in without.items() if row["follows"] and not farthest <= spread]
    wrong = {recipe: nearest(theirs["plain"], curves) for recipe, theirs in others.items()}
    row["nearest_wrong_one"] = min(wrong.values(), default=None)
    row["wrong_ones_that_follow"] = [recipe for recipe, distance in wrong.items() if distance <= row["spread"]]
    return row | {f"{way}_from_plain": nearest(curves[way], curves) for way in BESIDES if way in curves}


def verdict(recipe: str, row: dict[str, Any]) -> str:
    wrong = row["wrong_ones_that_follow"]
    control = f"so near are {', '.join(wrong)}" if wrong else "no other recipe is so near"
    gaps = f"at most {row['farthest']:.4f} from a plain run, which are up to {row['spread']:.4f} apart; {control}"
    gaps += f"; not without {' or '.join(row['hangs_on'])}" if row["hangs_on"] else ""
    return f"{recipe:20} kernels {'follow' if row['follows'] else 'do not follow'}: {gaps}"


def draw(results: dict[str, Any], path: Path) -> None:
    def panels(figure: Any) -> None:
        across = -(-len(results) // 2)
        axes = figure.subplots(2, across, sharex=True, sharey=True)
        for axis in axes.flat[len(results) :]:
            axis.set_axis_off()
        for (recipe, row), axis in zip(results.items(), axes.flat, strict=False):
            for way, losses in row["losses"].items():
                axis.plot(smooth(losses), label=way, linewidth=1, linestyle="-" if "fast" in way else "--")
            axis.set_title(recipe, fontsize=9)
        axes[0, 0].legend()
        figure.supxlabel("step")
        figure.supylabel("next-token loss (nats per byte, on the memories of training)", fontsize=9)

    plots.save_plot(path, panels, (11.4, 5.2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=8, help="processes at once; nothing is timed here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a step")
    parser.add_argument("--precision", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--stop", type=int, default=0, help="with --one: after so many of the steps")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("RECIPE", "WAY"), help="one run alone, here")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.one:
        print(json.dumps(losses_of(*asked.one, asked, device)))
        return 0
    if asked.plot:
        plots.check_plot(asked.plot)
    orders = [(recipe, way) for recipe in asked.recipes for way in WAYS]
    able = BESIDES if device.type == "cuda" and fp8.serves(device) else ()
    orders += [(recipe, way) for recipe in asked.recipes if recipe in BESIDE for way in able]
    # those that compile take longest
    orders.sort(key=lambda order: order[1].partition("-")[0] not in COMPILED)
    facts = {"steps": asked.steps, "rows": asked.rows, "depth": DEPTH, "width": WIDTH, "context": CONTEXT}
    narrow = asked.precision == "bfloat16" or (asked.precision == "auto" and device.type == "cuda")
    facts |= machine_facts(device, torch.bfloat16 if narrow else torch.float32) | {"sources": source_fingerprint()}
    results = kept(asked.out, facts)
    with ThreadPoolExecutor(asked.jobs) as pool:
        waiting = {
            pool.submit(run_one, recipe, way, asked): (recipe, way)
            for recipe, way in orders
            if way not in results.get(recipe, {"losses": {}})["losses"]
        }
        for done in as_completed(waiting):
            recipe, way = waiting[done]
            results.setdefault(recipe, {"losses": {}})["losses"][way] = done.result()
            if asked.out:
                files.write_text(asked.out, json.dumps(facts | {"recipes": results}))
    results = {recipe: results[recipe] for recipe in asked.recipes}
    for recipe, row in results.items():
        row |= compare(row["losses"], {other: its["losses"] for other, its in results.items() if other != recipe})
        print(f"{recipe:20} last: " + ", ".join(f"{way} {value:.4f}" for way, value in row["last"].items()))
    for recipe, row in results.items():
        print(verdict(recipe, row))
    apart = [recipe for recipe, row in results.items() if not row["follows"]]
    but = f"; not in {', '.join(apart)}" if apart else ""
    print(f"kernels follow in {len(results) - len(apart)} of {len(results)} recipes{but}")
    result = facts | {"follows": not apart, "recipes": results}
    if asked.out:
        files.write_text(asked.out, json.dumps(result))
    if asked.plot:
        draw(results, asked.plot)
    for row in results.values():
        del row["losses"]
    print(json.dumps(result))
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
