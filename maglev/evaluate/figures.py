"""The report's plots, as SVG that stands inside a page and takes its ink and font from it."""

import io
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from maglev.errors import RequestError
from maglev.evaluate.report_content import Curve, RunReport, StateGrowth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_STYLES = {"recurrent": "-", "lifted": "--", "refined": ":"}

# Mid-tones: at least 3:1 against both a white and a near-black page.
RECIPE_COLOURS = {
    "transformer-slsl": "#858c98",
    "swa-ssss": "#d97706",
    "lrt-slsl": "#0d9488",
    "lrt-ssss": "#4d9b3a",
    "maglev-shared-0.1": "#3b82f6",
    "maglev-shared-1": "#6366c9",
    "maglev-separate-0.1": "#a855f7",
    "maglev-separate-1": "#db2777",
    "maglev-closed": "#ef4444",
    "gated-deltanet": "#a07d00",
    "mamba-2": "#8d6e63",
}
OTHER_COLOURS = ("#b45fbf", "#6b8e23", "#c2703d", "#5b8db8", "#b8860b", "#7c7fd6", "#3d9a6d", "#c75b7a")

# matplotlib has no "colour of the page's text": this one is written and then replaced.
INK, PAGE_INK = "#010203", "currentColor"
SIZE, TALL_SIZE = (5.8, 3.5), (5.8, 4.6)
LINE = 1.8
WARM_UP_SHARE = 0.05
AVERAGE_SHARE = 0.02


def colours(names: Sequence[str]) -> dict[str, str]:
    """A recipe's colour is fixed; any other name has one by its checksum, moved on where two would meet."""
    chosen: dict[str, str] = {}
    for name in names:
        colour = RECIPE_COLOURS.get(name)
        if colour is None:
            start = zlib.crc32(name.encode()) % len(OTHER_COLOURS)
            order = OTHER_COLOURS[start:] + OTHER_COLOURS[:start]
            colour = next((c for c in order if c not in chosen.values()), order[0])
        chosen[name] = colour
    return chosen


def training_figure(runs: Sequence[RunReport]) -> str:
    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        draw_smoothed(axes, runs, [run.training for run in runs])
        axes.set_ylabel("next-token loss (nats)")
        settled = [
            value
            for run in runs
            for value in running_average(run.training.y)[int(len(run.training.y) * WARM_UP_SHARE) :]
            if math.isfinite(value)
        ]
        if settled and max(settled) > min(settled):
            margin = 0.08 * (max(settled) - min(settled))
            axes.set_ylim(min(settled) - margin, max(settled) + margin)

    return render("training loss over steps", draw)


def consistency_figure(runs: Sequence[RunReport]) -> str:
    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        draw_smoothed(axes, runs, [run.consistency for run in runs])
        axes.set_ylabel("consistency loss")
        axes.set_ylim(bottom=0)

    return render("consistency loss over steps", draw)


CONTRACTION_STYLES = ("-", ":", "--")


def contraction_figure(runs: Sequence[RunReport]) -> str:
    def draw(axes: "Axes", run: RunReport, colour: str) -> None:
        for (name, curve), style in zip(run.contraction.items(), CONTRACTION_STYLES, strict=False):
            label = f"{run.label}, {name}"
            axes.plot(curve.x, curve.y, style, marker="o", color=colour, linewidth=LINE, label=label)

    title = "what is left of a disturbance of the memory"
    return over_steps(runs, title, "left of a disturbance", draw, level=1, bottom=0)


def gap_figure(runs: Sequence[RunReport], gap_of: Callable[[RunReport], Curve | None], unit: str) -> str:
    def draw(axes: "Axes", run: RunReport, colour: str) -> None:
        gap = gap_of(run)
        if gap is not None:
            axes.plot(gap.x, gap.y, marker="o", color=colour, linewidth=LINE, label=run.label)

    return over_steps(runs, "recurrent less lifted over steps", f"{unit}, recurrent less lifted", draw, level=0)


def share_figure(runs: Sequence[RunReport]) -> str:
    """A line per layer, the first one faintest."""

    def draw(axes: "Axes", run: RunReport, colour: str) -> None:
        for layer, curve in enumerate(run.memory_share, start=1):
            depth = layer / len(run.memory_share)
            label = f"{run.label}, last layer" if depth == 1 else None
            axes.plot(curve.x, curve.y, color=colour, alpha=depth, linewidth=LINE, label=label)

    title = "the part of keys and values that comes from memory"
    return over_steps(runs, title, "part of keys and values", draw, bottom=0, top=1)


def over_steps(
    runs: Sequence[RunReport],
    title: str,
    ylabel: str,
    draw_run: Callable[["Axes", RunReport, str], None],
    level: float | None = None,
    bottom: float | None = None,
    top: float | None = None,
) -> str:
    """What validations found, with a line at the `level` that it is to be read against."""
    palette = colours([run.name for run in runs])

    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        if level is not None:
            axes.axhline(level, color=INK, linewidth=0.8, alpha=0.5)
        for run in runs:
            draw_run(axes, run, palette[run.name])
        axes.set_xlabel("step of training")
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom, top, auto=None)
        axes.legend()

    return render(title, draw)


def draw_smoothed(axes: "Axes", runs: Sequence[RunReport], curves: Sequence[Curve | None]) -> None:
    palette = colours([run.name for run in runs])
    for run, curve in zip(runs, curves, strict=True):
        if curve is not None:
            colour = palette[run.name]
            axes.plot(curve.x, curve.y, color=colour, alpha=0.3, linewidth=0.7)
            axes.plot(curve.x, running_average(curve.y), color=colour, linewidth=LINE, label=run.label)
    axes.set_xlabel("step")
    axes.legend()


def position_figure(runs: Sequence[RunReport], baseline: str) -> str:
    """By position; below, where positions agree, the difference to the baseline's recurrent values."""
    palette = colours([run.name for run in runs])
    curves = [(run, s, run.by_position[s]) for run in runs for s in LINE_STYLES if s in run.by_position]
    base = next((item for item in curves if item[0].name == baseline and item[1] == "recurrent"), None)
    comparable = [item for item in curves if base is not None and list(item[2].x) == list(base[2].x)]

    def draw(figure: "Figure") -> None:
        rows = 2 if len(comparable) > 1 else 1
        upper = figure.add_subplot(rows, 1, 1)
        for run, source, curve in curves:
            style = LINE_STYLES[source]
            label = f"{run.label}, {source}"
            upper.plot(curve.x, curve.y, style, color=palette[run.name], linewidth=LINE, label=label)
        upper.set_ylabel("bits per byte")
        upper.legend()
        lower = upper
        if rows == 2 and base is not None:
            lower = figure.add_subplot(rows, 1, 2, sharex=upper)
            for run, source, curve in comparable:
                difference = [ours - theirs for ours, theirs in zip(curve.y, base[2].y, strict=True)]
                style = LINE_STYLES[source]
                lower.plot(curve.x, difference, style, color=palette[run.name], linewidth=LINE)
            lower.set_ylabel(f"minus {base[0].label}")
        lower.set_xlabel("position in the text (tokens)")

    return render("bits per byte by position", draw, TALL_SIZE if len(comparable) > 1 else SIZE)


def growth_figure(growth: StateGrowth) -> str:
    def draw(figure: "Figure") -> None:
        axes = figure.add_subplot()
        lengths = growth.lengths
        full, ours = RECIPE_COLOURS["transformer-slsl"], RECIPE_COLOURS["maglev-shared-0.1"]
        axes.plot(lengths, growth.full_attention, color=full, linewidth=LINE, label="full attention")
        axes.plot(lengths, growth.bounded, color=ours, linewidth=LINE, label=growth.bounded_label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: short_count(value, 1024, ("", "k", "M", "G")))
        axes.yaxis.set_major_formatter(lambda value, _: short_count(value, 1000, ("B", "kB", "MB", "GB", "TB")))
        axes.set_xlabel("tokens read")
        axes.set_ylabel("state")
        axes.legend()

    return render("bytes of state against tokens read", draw)


def running_average(values: Sequence[float]) -> list[float]:
    """Centred, narrow at the steep start, and blind to NaN, so that one bad step leaves no hole."""
    reach = int(len(values) * AVERAGE_SHARE)
    averages = []
    for index in range(len(values)):
        around = min(reach, index)
        near = [value for value in values[index - around : index + around + 1] if math.isfinite(value)]
        averages.append(sum(near) / len(near) if near else math.nan)
    return averages


def short_count(value: float, base: int, suffixes: Sequence[str]) -> str:
    index = 0
    while value >= base and index < len(suffixes) - 1:
        value /= base
        index += 1
    return f"{value:g} {suffixes[index]}".rstrip()


def render(description: str, draw: Callable[["Figure"], None], size: tuple[float, float] = SIZE) -> str:
    """An SVG element in the page's own ink and font; its ids are its own among the page's figures."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError(
            "the report's plots need matplotlib, which is missing; install the extra 'report' of maglev"
        ) from None
    settings: Any = {
        # Letters stay letters: smaller, sharper, and in the page's font.
        "svg.fonttype": "none",
        "text.parse_math": False,
        "svg.hashsalt": description,
        "font.size": 10,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.15,
        "grid.linewidth": 0.6,
    }
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    with matplotlib.rc_context(settings | dict.fromkeys(inked, INK)):
        drawing = Figure(figsize=size, layout="constrained")
        draw(drawing)
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", transparent=True)
    return inline_svg(buffer.getvalue(), description)


def inline_svg(document: str, description: str) -> str:
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg[^>]*viewBox="([^"]*)"[^>]*>', f'<svg viewBox="\\1" role="img" aria-label="{description}">', svg)
    own = description.replace(" ", "-")
    svg = re.sub(r'\bid="', f'id="{own}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{own}-', svg)
    svg = svg.replace("url(#", f"url(#{own}-").replace(INK, PAGE_INK)
    return svg.strip()
