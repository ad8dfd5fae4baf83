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
    from matplotlib.figure import Figure

MARKERS = "osD^v"
# with room for a legend beside the axes
BROAD = (WIDE[0] + 2, WIDE[1])


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
        yield "consistency", WIDE, partial(draw_training, runs=with_target)
    for text in dict.fromkeys(result["data"] for run in facts for result in run["bpb"]):
        yield f"position-{text}", BROAD, partial(draw_positions, facts=facts, text=text)
    for column in table.columns:
        if column.unit == "BPB" and any(line.origin == OURS and column.key in line.cells for line in table.lines):
            name = "fineweb" if column is FINEWEB else column.title
            yield f"cost-{name}", BROAD, partial(draw_cost, table=table, column=column)


def draw_training(figure: "Figure", runs: Sequence[Facts]) -> None:
    """The paper's figure: the distance of memory and target while the next-token loss falls. One run per row."""
    shown = [(label, group[0]) for label, group in labelled_groups(runs)] or [(run["recipe"], run) for run in runs]
    palette = colours([run["recipe"] for _, run in shown])
    axes = figure.subplots(1, 2)
    for key, place, words in (
        ("consistency_loss", axes[0], "consistency loss"),
        ("next_token_loss", axes[1], "next-token loss, lifted (nats)"),
    ):
        for label, run in shown:
            pairs = zip(run["training"]["step"], run["training"][key], strict=True)
            known = [(step, value) for step, value in pairs if value is not None]
            if not known:
                continue
            x, y = zip(*known, strict=True)
            colour = palette[run["recipe"]]
            place.plot(x, y, color=colour, alpha=0.3, linewidth=0.7)
            place.plot(x, running_average(y), color=colour, linewidth=LINE, label=label)
        place.set_xlabel("step")
        place.set_ylabel(words)
    axes[0].set_ylim(bottom=0)
    axes[0].legend()


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
    firsts: dict[str, str] = {}
    for (label, source), (recipe, (x, y)) in found.items():
        # another row of the same recipe has its colour and is thinner
        width = LINE if firsts.setdefault(recipe, label) == label else LINE / 2
        style: dict[str, Any] = {"color": palette[recipe], "linewidth": width, "linestyle": LINE_STYLES[source]}
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
    drawn: list[str] = []
    for line in table.lines:
        cell = line.cells.get(column.key)
        if cell is None or line.memory != "recurrent" or not line.costs:
            continue
        # rows of one recipe have its colour, and each a sign of its own
        sign = MARKERS[drawn.count(line.recipe) % len(MARKERS)]
        drawn.append(line.recipe)
        for axes, x in ((left, line.costs["training_flops"]), (right, line.costs["state_bytes"])):
            axes.errorbar(
                [x],
                [cell.value],
                yerr=None if cell.spread is None else [cell.spread],
                fmt=sign,
                capsize=3,
                color=palette[line.recipe],
                label=line.model if axes is left else None,
            )
    left.set_xlabel("FLOPs of training")
    right.set_xlabel("bytes of state, bfloat16")
    left.set_ylabel(f"{column.title} bits per byte, recurrent")
    for axes in (left, right):
        axes.set_xscale("log")
    figure.legend(loc="outside right upper")
