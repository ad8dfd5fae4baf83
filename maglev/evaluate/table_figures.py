"""The table's figures, as files: what training did, and what quality costs. What was not measured is not drawn."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maglev.errors import RequestError
from maglev.evaluate.figures import LINE, LINE_STYLES, SIZE, colours, running_average
from maglev.evaluate.recall_results import draw_rows
from maglev.evaluate.table import FINEWEB, LABELS, OURS, Column, PaperTable, group_runs
from maglev.evaluate.table_facts import Facts
from maglev.plots import WIDE, save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v"


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
        yield f"position-{text}", SIZE, partial(draw_positions, facts=facts, text=text)
    for column in table.columns:
        if column.unit == "BPB" and any(line.origin == OURS and column.key in line.cells for line in table.lines):
            name = "fineweb" if column is FINEWEB else column.title
            yield f"cost-{name}", WIDE, partial(draw_cost, table=table, column=column)


def label_of(run: Facts) -> str:
    recipe: str = run["recipe"]
    return LABELS.get(recipe, recipe)


def draw_training(figure: "Figure", runs: Sequence[Facts]) -> None:
    """The paper's figure: the distance of memory and target while the next-token loss falls. One run per recipe."""
    shown = {run["recipe"]: run for run in reversed(runs)}
    palette = colours(list(shown))
    axes = figure.subplots(1, 2)
    for key, place, words in (
        ("consistency_loss", axes[0], "consistency loss"),
        ("next_token_loss", axes[1], "next-token loss, lifted (nats)"),
    ):
        for recipe, run in reversed(shown.items()):
            pairs = zip(run["training"]["step"], run["training"][key], strict=True)
            x, y = zip(*[(step, value) for step, value in pairs if value is not None], strict=True)
            place.plot(x, y, color=palette[recipe], alpha=0.3, linewidth=0.7)
            place.plot(x, running_average(y), color=palette[recipe], linewidth=LINE, label=label_of(run))
        place.set_xlabel("step")
        place.set_ylabel(words)
    axes[0].set_ylim(bottom=0)
    axes[0].legend()


def draw_positions(figure: "Figure", facts: Sequence[Facts], text: str) -> None:
    """Mean over seeds where the positions agree, else the first run's."""
    axes = figure.add_subplot()
    groups = group_runs(facts)
    palette = colours([group[0]["recipe"] for group in groups])
    for group in groups:
        for source, style in LINE_STYLES.items():
            curves = [
                curve_of(result)
                for run in group
                for result in run["bpb"]
                if (result["data"], result["memory"], result["weights"]) == (text, source, "plain")
            ]
            if not curves:
                continue
            same = [y for x, y in curves if x == curves[0][0]]
            mean = [sum(values) / len(values) for values in zip(*same, strict=True)]
            label = f"{label_of(group[0])}, {source}"
            colour = palette[group[0]["recipe"]]
            axes.plot(curves[0][0], mean, style, color=colour, linewidth=LINE, label=label)
    axes.set_xlabel("position in the text (tokens)")
    axes.set_ylabel(f"bits per byte, {text}")
    axes.legend()


def curve_of(result: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Middles of positions and their bits per byte."""
    parts = result["by_position"]
    return [(part["first"] + part["last"]) / 2 for part in parts], [part[f"bpb_{result['memory']}"] for part in parts]


def draw_cost(figure: "Figure", table: PaperTable, column: Column) -> None:
    """Recurrent bits per byte against what training took and against what a reader keeps."""
    left, right = figure.subplots(1, 2, sharey=True)
    palette = colours([line.recipe for line in table.lines])
    drawn: list[str] = []
    for line in table.lines:
        cell = line.cells.get(column.key)
        if cell is None or line.memory != "recurrent" or line.training_flops is None or line.state_bytes is None:
            continue
        # rows of one recipe have its colour, and each a sign of its own
        sign = MARKERS[drawn.count(line.recipe) % len(MARKERS)]
        drawn.append(line.recipe)
        for axes, x in ((left, line.training_flops), (right, line.state_bytes)):
            axes.errorbar(
                [x],
                [cell.value],
                yerr=None if cell.spread is None else [cell.spread],
                fmt=sign,
                capsize=3,
                color=palette[line.recipe],
                label=line.model,
            )
    left.set_xlabel("FLOPs of training")
    right.set_xlabel("bytes of state, bfloat16")
    left.set_ylabel(f"{column.title} bits per byte, recurrent")
    for axes in (left, right):
        axes.set_xscale("log")
    left.legend()
