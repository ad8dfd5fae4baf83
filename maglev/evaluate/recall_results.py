"""Rows of recall: one per distance and memory source, kept in a JSON file, drawn as a figure."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maglev import files
from maglev.config import RunConfig, SharedMaglevConfig
from maglev.data.recall import RecallConfig
from maglev.errors import RequestError
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
# long enough to show dashes beside a marker
HANDLE = 3.5
# what was found; all else says what was measured
MEASURED = {"accuracy", "items", "training_seconds", "nats", "gain", "gain_error"}
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
    text: Row | None = None,
    gains: Mapping[tuple[str, str], Row] | None = None,
) -> list[Row]:
    """`settings` are those in which the run differs from its recipe's defaults. Of needles, `text` says what they lie
    in and whether the run was trained on them, and `gains` what they are worth, by memory source and distance."""
    facts: Row = {"recipe": config.recipe, "variant": task.variant, "pairs": task.pairs, "chance": task.chance}
    facts |= {"query_share": task.query_share, "spread": task.spread, "context": context}
    facts |= {"depth": config.model.depth, "width": config.model.width, "window": config.model.window}
    facts |= {"seed": config.train.seed, "steps": steps, "settings": settings} | (text or {})
    facts["training_flops"] = round(3 * objective_flops(config) * config.train.tokens_per_step * steps)
    facts["training_seconds"] = round(seconds, 1)
    facts["cost"] = round(objective_flops(config) / objective_flops(papers(config)), 3)
    return [
        facts
        | {"memory": result.source, "passes": result.passes, "distance": bucket.label}
        | {"accuracy": round(bucket.accuracy, 5), "items": bucket.items}
        | (gains or {}).get((result.source, bucket.label), {})
        for result in results
        for bucket in result.buckets
    ]


def papers(config: RunConfig) -> RunConfig:
    """The paper's objective at that size: what a training cost is told in, for the same steps."""
    model = dataclasses.replace(config.model, window_pattern="SSSS", memory="kv", injection="shared_kv")
    return dataclasses.replace(config, model=model, objective=SharedMaglevConfig())


def read_rows(path: Path) -> list[Row]:
    """None where there is no file yet."""
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_bytes())["rows"]
        assert isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise RequestError(f"{path} is not a file of recall results; choose another --results") from None
    return rows


def add_rows(path: Path, rows: Sequence[Row]) -> list[Row]:
    """Into the file; a row that measures the same again takes the old one's place. All of the file's rows then."""
    merged = {identity(row): row for row in (*read_rows(path), *rows)}
    files.write_json(path, {"rows": list(merged.values())})
    return list(merged.values())


def identity(row: Row) -> str:
    return json.dumps({key: value for key, value in row.items() if key not in MEASURED}, sort_keys=True)


def draw_rows(path: Path, rows: Sequence[Row]) -> None:
    """Accuracy over distance, the mean over seeds; SVG, PNG or PDF by the file's ending."""
    save_plot(path, partial(draw_recall, rows=rows), SIZE if len(curves(rows)) <= INSIDE else WIDE)


def draw_recall(figure: "Figure", rows: Sequence[Row]) -> None:
    palette = colours(list(dict.fromkeys(row["recipe"] for row in rows)))
    axes = figure.add_subplot()
    drawn = curves(rows)
    # of each recipe and memory source one after another, so that settings can be told apart
    counted: dict[tuple[str, str], int] = {}
    for name, recipe, source, lines in drawn:
        x, y = zip(*lines, strict=True)
        number = counted.get((recipe, source), 0)
        counted[recipe, source] = number + 1
        axes.plot(
            x,
            y,
            LINE_STYLES[source],
            marker=MARKERS[number % len(MARKERS)],
            markersize=3.5,
            color=palette[recipe],
            linewidth=LINE,
            label=name,
        )
    for chance in sorted({row["chance"] for row in rows}):
        axes.axhline(chance, color="#888888", linewidth=0.8, linestyle=(0, (1, 2)))
    axes.axvline(1, color="#888888", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("distance, in plain reaches: layers x (W - 1)")
    axes.set_ylabel("recall (dotted: chance)")
    if len(drawn) <= INSIDE:
        axes.legend(handlelength=HANDLE)
    else:
        figure.legend(loc="outside right upper", handlelength=HANDLE)


def draw_costs(path: Path, rows: Sequence[Row]) -> None:
    """Recurrent accuracy over what training took, the mean over seeds: a line where only the steps differ."""
    save_plot(path, partial(draw_cost_curves, rows=[row for row in rows if row["memory"] == "recurrent"]), WIDE)


def draw_cost_curves(figure: "Figure", rows: Sequence[Row]) -> None:
    palette = colours(list(dict.fromkeys(row["recipe"] for row in rows)))
    for axes, (first, last) in zip(figure.subplots(1, len(COST_RANGES), sharey=True), COST_RANGES, strict=True):
        for name, recipe, points in cost_curves(rows, first, last):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, marker="o", markersize=4, color=palette[recipe], linewidth=LINE, label=name)
        axes.set_xscale("log")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("FLOPs of training")
        axes.set_title(f"{first} to {last} plain reaches", fontsize=9)
    figure.axes[0].set_ylabel("recall, recurrent")
    figure.axes[0].legend()


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


def groups(rows: Sequence[Row], but: Sequence[str]) -> list[tuple[str, list[Row]]]:
    """Rows that differ in these alone, with what tells them from others."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        same = {key: value for key, value in row.items() if key not in but}
        found.setdefault(identity(same), []).append(row)
    tasks = {(row["variant"], row["pairs"]) for row in rows}
    named = []
    for group in found.values():
        first = group[0]
        telling = telling_settings([row for row in rows if row["recipe"] == first["recipe"]])
        words = [first["recipe"], first["memory"]]
        words += [f"{first['variant']} {first['pairs']}"] if len(tasks) > 1 else []
        words += ["trained on text"] if first.get("trained_on") == "text" else []
        words += [f"{key.split('.')[-1]} {shown(value)}" for key, value in first["settings"].items() if key in telling]
        named.append((", ".join(words), group))
    return named


def curves(rows: Sequence[Row]) -> list[tuple[str, str, str, list[tuple[float, float]]]]:
    """(name, recipe, memory source, points) of all rows that differ in seed and distance alone."""
    drawn = []
    for name, group in groups(rows, ("seed", "distance")):
        first = group[0]
        values: dict[str, list[float]] = {}
        for row in group:
            values.setdefault(row["distance"], []).append(row["accuracy"])
        points = sorted((middle(label), sum(own) / len(own)) for label, own in values.items())
        drawn.append((name, first["recipe"], first["memory"], points))
    return drawn


def telling_settings(rows: Sequence[Row]) -> set[str]:
    """Those that tell one curve of a recipe from another."""
    every = {key for row in rows for key in row["settings"]}
    return {key for key in every if len({json.dumps(row["settings"].get(key)) for row in rows}) > 1}


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def middle(label: str) -> float:
    """Of a bucket, on the logarithmic axis."""
    first, last = map(int, label.split("-"))
    return math.sqrt(first * last) if first else last / 2
