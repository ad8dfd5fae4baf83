"""The table's figures, as files: what training did, and what quality costs. What was not measured is not drawn."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maglev.errors import RequestError
from maglev.evaluate.figures import LINE, LINE_STYLES, colours, running_average
from maglev.evaluate.recall_results import draw_rows
from maglev.evaluate.table import BASELINE, FINEWEB, OURS, Column, PaperTable, labelled_groups
from maglev.evaluate.table_facts import Facts
from maglev.plots import WIDE, save_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# one per row, so that rows that lie on each other are told apart
MARKERS = "osD^vPX<>ph*"
# with room for a legend beside the axes
BROAD = (WIDE[0] + 2, WIDE[1] + 0.8)
# how much of an axis lies between models of equal cost
BESIDE = 1 / 40
# curves that lie on each other: bands and lines, in usual widths, and the positions from one sign to the next
BAND, FINE, PALE, APART = 2.2, 0.7, 0.55, 7
# the part of training that an axis of losses need not hold
UNSETTLED = 0.15


def draw_figures(folder: Path, facts: Sequence[Facts], table: PaperTable, ending: str = ".svg") -> list[Path]:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(
            "the figures need matplotlib, which is missing; install the extra 'report' of maglev, or give --no-figures"
        ) from None
    found = []
    for name, size, draw in figures(facts, table):
        save_plot(folder / (name + ending), draw, size)
        found.append(folder / (name + ending))
    rows = [row for run in facts for row in run["recall"]]
    if rows:
        draw_rows(folder / ("recall" + ending), rows)
        found.append(folder / ("recall" + ending))
    return found


Drawing = tuple[str, tuple[float, float], Callable[["Figure"], None]]


def figures(facts: Sequence[Facts], table: PaperTable) -> Iterator[Drawing]:
    with_target = [run for run in facts if "lifted" in run["training"]["memory"]]
    if with_target:
        yield "consistency", WIDE, partial(draw_training, runs=with_target, facts=facts)
    for text in dict.fromkeys(result["data"] for run in facts for result in run["bpb"]):
        yield f"position-{text}", (BROAD[0], BROAD[1] + 1), partial(draw_positions, facts=facts, text=text)
    for column in table.columns:
        if column.unit == "BPB" and any(line.origin == OURS and column.key in line.cells for line in table.lines):
            name = "fineweb" if column is FINEWEB else column.title
            yield f"cost-{name}", BROAD, partial(draw_cost, table=table, column=column)


def draw_training(figure: "Figure", runs: Sequence[Facts], facts: Sequence[Facts] = ()) -> None:
    """The paper's figure: the distance of memory and target while the next-token loss falls. One run per row. Losses
    are drawn less SWA's if it is among the facts: by themselves they would be one line."""
    shown = [(label, group[0]) for label, group in labelled_groups(runs)] or [(run["recipe"], run) for run in runs]
    palette = colours([run["recipe"] for _, run in shown])
    axes = figure.subplots(1, 2)
    bases = [swa_losses(run, facts) for _, run in shown]
    compares = all(base is not None for base in bases)
    for (label, run), base in zip(shown, bases, strict=True):
        losses = run["training"]["next_token_loss"]
        gains = [minus(own, other) for own, other in zip(losses, base or (), strict=True)] if compares else losses
        draw_smoothed(axes[0], run, run["training"]["consistency_loss"], palette[run["recipe"]], label)
        draw_smoothed(axes[1], run, gains, palette[run["recipe"]], label)
    axes[0].set_ylabel("consistency loss")
    axes[0].set_ylim(bottom=0)
    axes[0].legend()
    axes[1].set_ylabel("next-token loss, lifted" + (", less SWA's (nats)" if compares else " (nats)"))
    if compares:
        axes[1].axhline(0, color="#888888", linewidth=0.8)
    settled = [value for line in axes[1].lines for value in settled_part(line.get_ydata())]
    if settled and max(settled) > min(settled):
        margin = 0.08 * (max(settled) - min(settled))
        axes[1].set_ylim(min(settled) - margin, max(settled) + margin)
    for place in axes:
        place.set_xlabel("step")


def draw_smoothed(axes: "Axes", run: Facts, values: Sequence[float | None], colour: str, label: str) -> None:
    known = [(step, value) for step, value in zip(run["training"]["step"], values, strict=True) if value is not None]
    if known:
        x, y = zip(*known, strict=True)
        axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
        axes.plot(x, running_average(y), color=colour, linewidth=LINE, label=label)


def swa_losses(run: Facts, facts: Sequence[Facts]) -> list[float | None] | None:
    """At the steps of a run, after the same text: rows of a seed read it in the same order."""
    return next(
        (
            other["training"]["next_token_loss"]
            for other in facts
            if (other["recipe"], other["seed"], other.get("tokens")) == (BASELINE, run["seed"], run.get("tokens"))
            and other["training"]["step"] == run["training"]["step"]
        ),
        None,
    )


def minus(own: float | None, other: float | None) -> float | None:
    return None if own is None or other is None else own - other


def settled_part(values: Sequence[float]) -> list[float]:
    return [value for value in values[int(len(values) * UNSETTLED) :] if math.isfinite(value)]


def draw_positions(figure: "Figure", facts: Sequence[Facts], text: str) -> None:
    """What a user gets, and beside it how far each row is from SWA, on lifted memories too."""
    groups = labelled_groups(facts)
    palette = colours([group[0]["recipe"] for _, group in groups])
    found = {
        (label, source): (group[0]["recipe"], curve)
        for label, group in groups
        for source in ("recurrent", "lifted")
        if (curve := mean_curve(group, text, source)) is not None
    }
    base = next((curve for (_, source), (recipe, curve) in found.items() if recipe == BASELINE), None)
    axes = figure.subplots(1, 2 if base and len(found) > 1 else 1, squeeze=False)[0]
    looks = row_styles([label for label, _ in groups])
    for (label, source), (recipe, (x, y)) in found.items():
        style: dict[str, Any] = {"color": palette[recipe], "linestyle": LINE_STYLES[source]} | looks[label]
        if source == "recurrent":
            axes[0].plot(x, y, label=label, **style)
        if len(axes) > 1 and base is not None and x == base[0]:
            axes[1].plot(x, [own - other for own, other in zip(y, base[1], strict=True)], **style)
    axes[0].set_ylabel(f"bits per byte, {text}, recurrent")
    if len(axes) > 1:
        axes[1].set_ylabel("difference to SWA (dashed: lifted)")
    for place in axes:
        place.set_xlabel("position in the text (tokens)")
    figure.legend(loc="outside right upper")


def row_styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows lie on each other: every other one is a pale band beneath the fine lines, and each has its sign at positions
    of its own. Rows of one recipe have one colour, and this tells them apart as well."""
    signs = signs_of(labels)
    return {
        label: {
            "linewidth": LINE * (FINE if index % 2 else BAND),
            "alpha": 1 if index % 2 else PALE,
            "zorder": 2 + index % 2,
            "marker": signs[label],
            "markersize": 6,
            "markevery": (index % APART, APART),
        }
        for index, label in enumerate(labels)
    }


def mean_curve(group: Sequence[Facts], text: str, source: str) -> tuple[list[float], list[float]] | None:
    """Mean over seeds where the positions agree, else the first run's."""
    curves = [
        curve_of(result)
        for run in group
        for result in run["bpb"]
        if (result["data"], result["memory"], result["weights"]) == (text, source, "plain")
    ]
    if not curves:
        return None
    same = [y for x, y in curves if x == curves[0][0]]
    return curves[0][0], [sum(values) / len(values) for values in zip(*same, strict=True)]


def curve_of(result: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Middles of positions and their bits per byte."""
    parts = result["by_position"]
    values = [part[f"bpb_{result['memory']}"] for part in parts]
    # what is no number stands in JSON as null
    known = [math.nan if value is None else value for value in values]
    return [(part["first"] + part["last"]) / 2 for part in parts], known


def draw_cost(figure: "Figure", table: PaperTable, column: Column) -> None:
    """Recurrent bits per byte against what training took and against what a reader keeps."""
    left, right = figure.subplots(1, 2, sharey=True)
    palette = colours([line.recipe for line in table.lines])
    shown = [line for line in table.lines if column.key in line.cells and line.memory == "recurrent" and line.costs]
    signs = signs_of([line.model for line in shown])
    for axes, cost in ((left, "training_flops"), (right, "state_bytes")):
        for line, x in zip(shown, side_by_side([line.costs[cost] for line in shown]), strict=True):
            cell = line.cells[column.key]
            axes.errorbar(
                [x],
                [cell.value],
                yerr=None if cell.spread is None else [cell.spread],
                fmt=signs[line.model],
                capsize=3,
                color=palette[line.recipe],
                label=line.model if axes is left else None,
            )
    left.set_xlabel("FLOPs of training (equal ones side by side)")
    right.set_xlabel("bytes of state, bfloat16 (equal ones side by side)")
    left.set_ylabel(f"{column.title} bits per byte, recurrent")
    for axes in (left, right):
        axes.set_xscale("log")
    figure.legend(loc="outside right upper")


def signs_of(labels: Sequence[str]) -> dict[str, str]:
    return {label: MARKERS[index % len(MARKERS)] for index, label in enumerate(labels)}


def side_by_side(costs: Sequence[float]) -> list[float]:
    """Where to draw them on a logarithmic axis: equal ones would hide each other."""
    step = max(1.01, (max(costs) / min(costs)) ** BESIDE)
    places = []
    for index, cost in enumerate(costs):
        before = costs[:index].count(cost)
        places.append(cost * step ** (before - (costs.count(cost) - 1) / 2))
    return places
