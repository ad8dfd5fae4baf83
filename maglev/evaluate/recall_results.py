"""Rows of recall: one per distance and memory source, kept in a JSON file, drawn as a figure."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any

from maglev import files
from maglev.config import RunConfig, SharedMaglevConfig
from maglev.data.recall import RecallConfig, distance_unit
from maglev.errors import RequestError
from maglev.evaluate.costs import start_costs, training_flops, until
from maglev.evaluate.figures import LINE, LINE_STYLES, SIZE, colours
from maglev.model.accounting import objective_flops
from maglev.plots import WIDE, save_plot

if TYPE_CHECKING:
    # which brings torch; what reads and draws rows does without
    from matplotlib.figure import Figure

    from maglev.evaluate.recall import RecallResult

Row = dict[str, Any]
MARKERS = "osD^v*"
# more curves than that have their legend beside the axes
INSIDE = 4
# inches of one more panel, and of a line in a legend
PANEL, ENTRY = 3.4, 0.19
# long enough to show dashes beside a marker
HANDLE = 3.5
# what was found; all else says what was measured
MEASURED = {"accuracy", "items", "training_seconds", "nats", "gain", "gain_error", "loop"}
# what follows from the rest, as far as what a run began from can be read
MEASURED |= {"training_flops", "start_flops", "cost"}
# what a figure is drawn from, and of what kind it is
NEEDED: dict[str, type | UnionType] = {"recipe": str, "variant": str, "memory": str, "distance": str, "settings": dict}
NEEDED |= dict.fromkeys(("pairs", "items", "seed", "context", "depth", "window"), int)
NEEDED |= dict.fromkeys(("chance", "accuracy"), int | float)
POSITIVE = ("items", "context", "depth", "window")
DISTANCE = re.compile(r"\d{1,6}-\d{1,6}")
# distances, in plain reaches, that recall is drawn for against its cost
COST_RANGES = ((1, 4), (4, 16))


def result_rows(
    config: RunConfig,
    task: RecallConfig,
    context: int,
    results: "Sequence[RecallResult]",
    *,
    steps: int,
    seconds: float,
    settings: dict[str, Any],
    rows: int | None = None,
    text: Row | None = None,
    trained: Row | None = None,
    gains: Mapping[tuple[str, str], Row] | None = None,
    loop: Row | None = None,
) -> list[Row]:
    """`settings` are those in which the run differs from its recipe's defaults. Of needles, `text` says what they lie
    in and whether the run was trained on them, and `gains` what they are worth, by memory source and distance.
    `trained` is in what the run's own task differs from what is asked: without it, two runs would be one row. `rows` is
    how many were measured, where that is not the usual number: it is another measure then. `training_flops` are of
    `steps` steps and of what the run began from, which `start_flops` tells, null where that is not there any more;
    `cost` is of the steps alone. `loop`, the last diagnostics of training, stands once, in the first recurrent
    row."""
    facts: Row = {"recipe": config.recipe, "variant": task.variant, "pairs": task.pairs, "chance": task.chance}
    facts |= {"query_share": task.query_share, "spread": task.spread, "context": context}
    facts |= {"depth": config.model.depth, "width": config.model.width, "window": config.model.window}
    facts |= {"seed": config.train.seed, "steps": steps, "settings": settings} | (text or {})
    facts |= {"trained": trained} if trained else {}
    # told since there were others
    facts |= {"keys": task.keys} if task.keys != RecallConfig.keys else {}
    facts |= {} if rows is None else {"rows": rows}
    began = start_costs(config)
    facts["training_flops"] = round(training_flops(config, steps) + (began[0] if began else 0))
    facts |= {"start_flops": None if began is None else round(began[0])} if config.train.init_from else {}
    facts["training_seconds"] = round(seconds, 1)
    facts["cost"] = round(objective_flops(until(config, steps)) / objective_flops(papers(config)), 3)
    found = [
        facts
        | {"memory": result.source, "passes": result.passes, "distance": bucket.label}
        | {"accuracy": round(bucket.accuracy, 5), "items": bucket.items}
        | (gains or {}).get((result.source, bucket.label), {})
        for result in results
        for bucket in result.buckets
    ]
    first = next((row for row in found if row["memory"] == "recurrent"), None)
    if loop and first is not None:
        first["loop"] = loop
    return found


def papers(config: RunConfig) -> RunConfig:
    """The paper's objective at that size: what a training cost is told in, for the same steps."""
    model = dataclasses.replace(config.model, window_pattern="SSSS", memory="kv", injection="shared_kv", delay=1)
    return dataclasses.replace(config, model=model, objective=SharedMaglevConfig())


def read_rows(path: Path, option: str = "--results") -> list[Row]:
    """Of a file that may not be there yet."""
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_bytes())["rows"]
        whole = isinstance(rows, list) and all(map(is_row, rows))
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise RequestError(f"{path} is not a file of recall results; choose another {option}")
    return [*rows]


def is_row(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(key in value and isinstance(value[key], kind) for key, kind in NEEDED.items())
        and value["memory"] in LINE_STYLES
        and DISTANCE.fullmatch(value["distance"]) is not None
        and not any(isinstance(value[key], bool) for key in NEEDED)
        and all(map(math.isfinite, (value["accuracy"], value["chance"])))
        and min(value[key] for key in POSITIVE) > 0
        and has_cost(value)
    )


def has_cost(row: Row) -> bool:
    """One that can be drawn, where there is one at all."""
    flops = row.get("training_flops", 1)
    return isinstance(flops, int | float) and not isinstance(flops, bool) and 0 < flops < math.inf


def add_rows(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Into the file; a row that measures the same again takes the old one's place. All of the file's rows then."""
    merged = {identity(row): row for row in (*read_rows(path), *rows)}
    files.write_json(path, {"rows": list(merged.values())})
    return list(merged.values())


def identity(row: Row) -> str:
    return json.dumps({key: value for key, value in row.items() if key not in MEASURED}, sort_keys=True)


def draw_rows(path: Path, rows: Sequence[Row]) -> None:
    """Accuracy over distance, the mean over seeds; SVG, PNG or PDF by the file's ending."""
    drawn = curves(rows)
    if len(drawn) <= INSIDE:
        save_plot(path, partial(draw_recall, rows=rows), SIZE)
        return
    names = {name for name, *_ in drawn}
    tasks = set(map(task_of, rows))
    entries = len(names) + len({source for _, _, source, _ in drawn})
    width = WIDE[0] + PANEL * (len(tasks) - 1)
    save_plot(path, partial(draw_recall, rows=rows), (width, max(WIDE[1], 0.6 + ENTRY * entries)))


def draw_recall(figure: "Figure", rows: Sequence[Row]) -> None:
    """A panel for every task. A colour for every recipe, shades of it for its settings; dashes tell the memories."""
    tasks = list(dict.fromkeys(map(task_of, rows)))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    looks = looks_of(curves(rows))
    for axes, task in zip(panels, tasks, strict=True):
        for name, _, source, points in curves([row for row in rows if task_of(row) == task], rows):
            x, y = zip(*points, strict=True)
            colour, marker = looks[name]
            axes.plot(x, y, LINE_STYLES[source], marker=marker, markersize=3.5, color=colour, linewidth=LINE)
        for chance in sorted({row["chance"] for row in rows if task_of(row) == task}):
            axes.axhline(chance, color="#888888", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.axvline(1, color="#888888", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("distance, in plain reaches: layers x (W - 1)")
        if len(tasks) > 1:
            axes.set_title(f"{task[0]} {task[1]}", fontsize=9)
    panels[0].set_ylabel("recall (dotted: chance)")
    sources = list(dict.fromkeys(row["memory"] for row in rows))
    add_legend(figure, sources, looks, len(curves(rows)))


def add_legend(figure: "Figure", sources: Sequence[str], looks: Mapping[str, tuple[Any, str]], lines: int) -> None:
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"linewidth": LINE}
    handles = [
        Line2D([], [], color=colour, marker=marker, markersize=3.5, label=name, **style)
        for name, (colour, marker) in looks.items()
    ]
    for source in sources:
        look = style | {"color": "#888888", "linestyle": LINE_STYLES[source]}
        handles.append(Line2D([], [], label=f"{source} memories", **look))
    if lines <= INSIDE:
        figure.axes[0].legend(handles=handles, handlelength=HANDLE)
    else:
        figure.legend(handles=handles, loc="outside right upper", handlelength=HANDLE)


Curve = tuple[str, str, str, list[tuple[float, float]]]


def looks_of(drawn: Sequence[Curve]) -> dict[str, tuple[Any, str]]:
    """Colour and marker by name: the recipe's own, then darker and lighter ones."""
    from matplotlib.colors import to_rgb

    recipes = list(dict.fromkeys(recipe for _, recipe, _, _ in drawn))
    palette = colours(recipes)
    found: dict[str, tuple[Any, str]] = {}
    for recipe in recipes:
        # the recipe as it is first
        names = sorted({name for name, own, _, _ in drawn if own == recipe}, key=lambda name: (len(name), name))
        for number, name in enumerate(names):
            goal, share = number % 2 == 0, min(0.3 * ((number + 1) // 2), 0.75)
            colour = tuple(value + share * (goal - value) for value in to_rgb(palette[recipe]))
            found[name] = colour, MARKERS[number % len(MARKERS)]
    return found


def draw_costs(path: Path, rows: Sequence[Row]) -> None:
    """Recurrent accuracy over what training took, the mean over seeds: a line where only the steps differ."""
    rows = [row for row in rows if row["memory"] == "recurrent" and "training_flops" in row]
    names = {name for first, last in COST_RANGES for name, _, _ in cost_curves(rows, first, last)}
    size = WIDE[0] + (PANEL if len(names) > INSIDE else 0), max(WIDE[1], 0.6 + ENTRY * len(names))
    save_plot(path, partial(draw_cost_curves, rows=rows), size)


def draw_cost_curves(figure: "Figure", rows: Sequence[Row]) -> None:
    drawn = [cost_curves(rows, first, last) for first, last in COST_RANGES]
    looks = looks_of([(name, recipe, "", points) for some in drawn for name, recipe, points in some])
    panels = figure.subplots(1, len(COST_RANGES), sharey=True)
    for axes, (first, last), some in zip(panels, COST_RANGES, drawn, strict=True):
        for name, _, points in some:
            x, y = zip(*points, strict=True)
            colour, marker = looks[name]
            axes.plot(x, y, marker=marker, markersize=4, color=colour, linewidth=LINE)
        axes.set_xscale("log")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("FLOPs of training")
        axes.set_title(f"{first} to {last} plain reaches", fontsize=9)
    figure.axes[0].set_ylabel("recall, recurrent")
    add_legend(figure, (), looks, len(looks))


def cost_curves(rows: Sequence[Row], first: int, last: int) -> list[tuple[str, str, list[tuple[float, float]]]]:
    """(name, recipe, points) of the questions from so far; a point is the FLOPs of a run and its accuracy."""
    drawn = []
    for name, group in groups(rows, ("seed", "distance", "steps", "training_flops")):
        right: dict[float, float] = {}
        asked: dict[float, int] = {}
        for row in group:
            near, far = map(int, row["distance"].split("-"))
            if first <= near and far <= last:
                cost = row["training_flops"]
                right[cost] = right.get(cost, 0.0) + row["accuracy"] * row["items"]
                asked[cost] = asked.get(cost, 0) + row["items"]
        if asked:
            drawn.append((name, group[0]["recipe"], [(cost, right[cost] / asked[cost]) for cost in sorted(asked)]))
    return drawn


def task_of(row: Row) -> tuple[str, int]:
    return row["variant"], row["pairs"]


def groups(
    rows: Sequence[Row], but: Sequence[str], among: Sequence[Row] = (), named_by_task: bool = True
) -> list[tuple[str, list[Row]]]:
    """Rows that differ in these alone, with what tells them from others, in all that they are `among`."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        same = {key: value for key, value in row.items() if key not in but}
        found.setdefault(identity(same), []).append(row)
    every = among or rows
    tasks = set(map(task_of, every))
    named = []
    for group in found.values():
        first = group[0]
        telling = telling_settings([row for row in every if row["recipe"] == first["recipe"]])
        words = [first["recipe"]]
        if named_by_task:
            words += [first["memory"], *([f"{first['variant']} {first['pairs']}"] if len(tasks) > 1 else [])]
        words += [f"trained with {key} {value}" for key, value in first.get("trained", {}).items()]
        for key, says in (("keys", "{} keys"), ("rows", "{} rows"), ("query_share", "questions at {} of the places")):
            differ = len({row.get(key) for row in every}) > 1
            words += [says.format(first[key])] if key in first and differ else []
        words += ["trained on text"] if first.get("trained_on") == "text" else []
        words += [f"{key.split('.')[-1]} {shown(value)}" for key, value in first["settings"].items() if key in telling]
        named.append((", ".join(words), group))
    return named


def curves(rows: Sequence[Row], among: Sequence[Row] = ()) -> list[Curve]:
    """(name, recipe, memory source, points) of all rows that differ in seed and distance alone. Names tell settings:
    dashes tell the memories, and tasks have panels."""
    drawn = []
    for name, group in groups(rows, ("seed", "distance"), among, named_by_task=False):
        first = group[0]
        values: dict[float, list[float]] = {}
        for row in group:
            values.setdefault(middle(row), []).append(row["accuracy"])
        points = sorted((place, sum(own) / len(own)) for place, own in values.items())
        drawn.append((name, first["recipe"], first["memory"], points))
    return drawn


def telling_settings(rows: Sequence[Row]) -> set[str]:
    """Those that tell one curve of a recipe from another."""
    every = {key for row in rows for key in row["settings"]}
    return {key for key in every if len({json.dumps(row["settings"].get(key)) for row in rows}) > 1}


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def middle(row: Row) -> float:
    """Of a row's distances, on the logarithmic axis; the last of them end where the context does."""
    first, last = map(int, row["distance"].split("-"))
    end = min(last, (row["context"] - 1) / distance_unit(row["depth"], row["window"]))
    return math.sqrt(first * end) if first else end / 2
