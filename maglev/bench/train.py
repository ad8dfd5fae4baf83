"""What a training step costs: SWA, SLSL, LRT and Maglev on the trainer's own path, each in a process of its own.

FLOPs are those of matrix products and attention that a step must do: 2 per weight and token, 4 x width per attended
key, lookups, norms and elementwise work 0; forward and backward are three times forward; what is computed again to
save memory does not count.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from maglev.bench.sources import source_fingerprint
from maglev.bench.train_worker import Order, as_json, sizes_of
from maglev.errors import RequestError, WorkError
from maglev.recipes import PAPER_DEPTH, RECIPES, run_config

CONVENTION = (
    "matrix products and attention counted once: 2 per weight and token, 4 x width per attended key; "
    "forward + backward = 3 x forward; recomputation not counted"
)
BASELINE = "swa-ssss"
COMPARED = (
    BASELINE,
    "transformer-slsl",
    "lrt-ssss",
    "maglev-shared-0.1",
    "maglev-shared-0.1+selective",
    "maglev-separate-1",
)
# what may stand behind a recipe's name and a plus
VARIANTS = {
    "selective": {"train.recompute": "selective"},
    "full": {"train.recompute": "full"},
    "fp8": {"train.products": "fp8"},
}
SCALED = (BASELINE, "maglev-shared-0.1")
MOST = 1 << 30
# of a pass, where nothing is said: what keeps an H200 busy and leaves two passes room
ROWS_UP_TO_12, ROWS_BEYOND = 32, 16
# seconds for each point that a worker measures: one that hangs is not to take the others with it
PATIENCE = 3600

Row = dict[str, Any]
Watch = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class TrainPlan:
    """`rows` 0 lets the trainer find the micro-batch that fits, None takes what suits the depth. `tokens` are those of
    a step, over all its passes."""

    recipes: tuple[str, ...]
    depths: tuple[int, ...]
    context: int
    window: int
    rows: int | None
    tokens: int
    steps: int
    recompute: str
    products: str
    vocab_size: int
    quick: bool = False

    def __post_init__(self) -> None:
        for name, values, least in (
            ("depth", self.depths, 1),
            ("context", (self.context,), 1),
            ("window", (self.window,), 1),
            ("rows", tuple(map(self.rows_at, self.depths)), 0),
            ("tokens", (self.tokens,), 1),
            ("steps", (self.steps,), 1),
        ):
            for value in values:
                if not least <= value <= MOST:
                    raise RequestError(f"--{name} has {value}; it must be at least {least} and at most {MOST:,}")
        for depth in self.depths:
            whole = self.context * max(1, self.rows_at(depth))
            if self.tokens % whole:
                near = max(1, round(self.tokens / whole)) * whole
                raise RequestError(
                    f"--tokens is {self.tokens}, not a multiple of rows x context = {whole}; set it to {near}"
                )
        # wrong names and sizes are to show before anything is measured
        for recipe in self.recipes:
            for depth in self.depths:
                run_config(recipe.split("+")[0], depth, self.settings(recipe, depth))

    def rows_at(self, depth: int) -> int:
        if self.rows is None:
            return ROWS_UP_TO_12 if depth <= 12 else ROWS_BEYOND
        return self.rows

    def settings(self, recipe: str = "", depth: int | None = None, **changed: Any) -> dict[str, Any]:
        """Of a recipe, whose variants are those behind a plus. At the first depth unless it is given."""
        own = {
            "model.context": self.context,
            "model.window": self.window,
            "model.vocab_size": self.vocab_size,
            "train.rows_per_pass": self.rows_at(depth or self.depths[0]),
            "train.tokens_per_step": self.tokens,
            "train.recompute": self.recompute,
            "train.products": self.products,
            # the learning rates' schedule is to see no end, and nothing is validated or written
            "train.steps": 1000,
            "train.validate_every": 0,
        }
        for variant in recipe.split("+")[1:]:
            own |= VARIANTS[variant]
        return own | {name.replace("__", "."): value for name, value in changed.items()}


def train_plan(quick: bool = False, scaling: bool = False, **given: Any) -> TrainPlan:
    """What is not given (None) is that of the paper's shape, of a look (`quick`), or of the scaling curves."""
    chosen = {key: value for key, value in given.items() if value is not None}
    if quick:
        standard: dict[str, Any] = {"depths": (2,), "context": 64, "rows": 2, "steps": 1, "vocab_size": 256}
    else:
        standard = {"depths": (12,) if scaling else (12, 20), "context": 2048, "steps": 5, "vocab_size": 32_768}
        standard["rows"] = ROWS_UP_TO_12 if scaling else None
    context, rows = chosen.get("context", standard["context"]), chosen.get("rows", standard["rows"])
    standard["window"] = max(1, context // 4)
    # both numbers of rows divide the larger
    one = context * max(1, ROWS_UP_TO_12 if rows is None else rows)
    # the optimizer's share is that of the paper's step, or as near to it as whole passes come
    standard["tokens"] = 2 * one if quick else (4 if scaling else max(1, round(524_288 / one))) * one
    standard |= {"recipes": SCALED if scaling else COMPARED, "recompute": "none", "products": "plain"}
    return TrainPlan(**(standard | chosen | {"quick": quick}))


def run_worker(order: Order) -> Row:
    """A fresh process, with nothing compiled before where its start is measured; what it says goes to stderr, its last
    line is the result."""
    patience = PATIENCE * len(order.settings)
    with TemporaryDirectory(prefix="maglev-bench-", ignore_cleanup_errors=True) as caches:
        own = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
        if order.split:
            own |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "maglev.bench.train_worker"],
                input=as_json(order),
                env=os.environ | own,
                capture_output=True,
                text=True,
                timeout=patience,
            )
        except subprocess.TimeoutExpired:
            raise WorkError(f"stopped after {patience} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise WorkError(lines[-1].strip())
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def ask_worker(order: Order, facts: list[Row]) -> list[Row]:
    """A row for each of its settings, with an `error` instead of figures where it failed; what it found out about the
    machine goes to `facts`."""
    try:
        found = run_worker(order)
    except WorkError as error:
        asked = [run_config(order.recipe, order.depth, each) for each in order.settings]
        return [sizes_of(config) | {"error": str(error)} for config in asked]
    rows: list[Row] = found.pop("rows")
    facts.append(found)
    return rows


def measured(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


def measure_train(plan: TrainPlan, device: str, watch: Watch, keep: Keep = lambda result: None) -> dict[str, Any]:
    """`keep` takes what there is after every model."""
    rows: list[Row] = []
    facts: list[Row] = []
    result: dict[str, Any] = {}
    for depth in plan.depths:
        for recipe in plan.recipes:
            watch(f"{recipe}, depth {depth}")
            settings = [plan.settings(recipe, depth)]
            order = Order(recipe.split("+")[0], depth, settings, plan.steps, device, plan.quick, time.time())
            rows += [row | {"recipe": recipe} for row in ask_worker(order, facts)]
            result = assemble("train", plan, rows, facts) | {"summary": summary(measured(rows))}
            keep(result)
    return result


def scaling_axes(plan: TrainPlan) -> dict[str, list[dict[str, Any]]]:
    """Four points each, from half to four times the plan: rows of a pass, layers at one width, context at one W."""
    depth, width = plan.depths[0], 64 * plan.depths[0]
    asked = plan.rows_at(depth)

    def sizes(middle: int) -> list[int]:
        return sorted({max(1, middle // 2), middle, 2 * middle, 4 * middle})

    def point(rows: int, layers: int, context: int) -> dict[str, Any]:
        passes = plan.tokens // (plan.context * asked)
        return plan.settings(
            model__depth=layers,
            model__width=width,
            model__context=context,
            train__rows_per_pass=rows,
            train__tokens_per_step=passes * rows * context,
        )

    # half of the rows: four times as much still fits, and half as much is more than launches
    few = max(1, asked // 2)
    return {
        "rows": [point(rows, depth, plan.context) for rows in sizes(few)],
        "layers": [point(few, layers, plan.context) for layers in sizes(depth)],
        "context": [point(few, depth, context) for context in sizes(plan.context) if context >= plan.window],
    }


def measure_scaling(plan: TrainPlan, device: str, watch: Watch, keep: Keep = lambda result: None) -> dict[str, Any]:
    """Cost along each axis; the points of a model share a process and leave nothing to one another."""
    if not plan.rows_at(plan.depths[0]):
        raise RequestError("--rows is 0; the scaling curves need one number of rows")
    if any("+" in recipe for recipe in plan.recipes):
        raise RequestError("--scaling takes recipes without a plus; set --recompute or --products for all of them")
    axes = scaling_axes(plan)
    # the axes cross in one point, which is measured once
    settings: list[dict[str, Any]] = []
    for each in itertools.chain(*axes.values()):
        settings += [] if each in settings else [each]
    rows: list[Row] = []
    facts: list[Row] = []
    result: dict[str, Any] = {}
    for recipe in plan.recipes:
        watch(f"{recipe}, along {', '.join(axes)}")
        order = Order(recipe, PAPER_DEPTH, settings, plan.steps, device, plan.quick, time.time(), split=False)
        points = ask_worker(order, facts)
        for axis, own in axes.items():
            rows += [points[settings.index(each)] | {"axis": axis} for each in own]
        result = assemble("train scaling", plan, rows, facts) | {"summary": growth(measured(rows))}
        keep(result)
    return result


def assemble(name: str, plan: TrainPlan, rows: list[Row], facts: list[Row]) -> dict[str, Any]:
    """The limit is the best that any of the processes saw: a rate measured while the clock was low is no limit. Where
    all of them failed, nothing is known of the machine."""
    rate, copy = (max((each[key] for each in facts), default=None) for key in ("matrix_flops", "copy_bytes_per_s"))
    for row in measured(rows):
        row["mfu"] = row["flops_per_s"] / rate
    machine = {key: facts[0][key] if facts else None for key in ("device", "dtype", "torch")}
    return {
        "benchmark": name,
        "quick": plan.quick,
        "weights": "random",
        "sources": source_fingerprint(),
        **machine,
        "depth": ", ".join(str(depth) for depth in plan.depths),
        "copy_bytes_per_s": copy,
        "matrix_flops": rate,
        "flop_convention": CONVENTION,
        "rows": rows,
    }


def summary(rows: list[Row]) -> list[Row]:
    """Each model beside SWA of its depth: speed, what the counted FLOPs allow, the share of that, peak memory."""
    found = []
    for row in rows:
        own = [each for each in rows if each["recipe"] == BASELINE and each["depth"] == row["depth"]]
        if not own:
            continue
        speed = row["tokens_per_s"] / own[0]["tokens_per_s"]
        allowed = own[0]["flops_per_token"] / row["flops_per_token"]
        both = row["peak_bytes"] is not None and own[0]["peak_bytes"]
        found.append(
            {
                "recipe": row["recipe"],
                "depth": row["depth"],
                "mfu": row["mfu"],
                "speed_by_swa": speed,
                "allowed_by_flops": allowed,
                "of_allowed": speed / allowed,
                "memory_by_swa": row["peak_bytes"] / own[0]["peak_bytes"] if both else None,
            }
        )
    return found


def growth(rows: list[Row]) -> list[Row]:
    """Per model and axis: how much more a step costs from the second point to the last, by how much larger it is, and
    the same for the counted FLOPs: 1 is linear. The first point is mostly launches."""
    found = []
    sizes = {"rows": "rows", "layers": "depth", "context": "context"}
    for recipe, axis in dict.fromkeys((row["recipe"], row["axis"]) for row in rows):
        own = [row for row in rows if (row["recipe"], row["axis"]) == (recipe, axis)]
        # the others failed
        if len(own) < 3:
            continue
        low, high = own[1], own[-1]
        ratio = high[sizes[axis]] / low[sizes[axis]]
        flops = {id(row): row["flops_per_token"] * row["tokens_per_step"] for row in (low, high)}
        found.append(
            {
                "recipe": recipe,
                "axis": axis,
                "larger": ratio,
                "cost_by_size": high["seconds_per_step"] / low["seconds_per_step"] / ratio,
                "flops_by_size": flops[id(high)] / flops[id(low)] / ratio,
            }
        )
    return found


def known_recipes(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between them, variants behind a plus; what is unknown is told with the nearest one."""
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        recipe, *variants = name.split("+")
        if recipe not in RECIPES:
            run_config(recipe)
        for variant in variants:
            if variant not in VARIANTS:
                raise RequestError(f"--recipes has {name!r}; behind a plus comes one of {', '.join(VARIANTS)}")
    return names
