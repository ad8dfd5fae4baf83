"""Plots of what the benchmarks found, as files: the format is that of the name."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maglev.errors import RequestError
from maglev.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
SIZE = (9.6, 3.8)
COLOURS = ("#d97706", "#3b82f6")
# by way to step and format of its weights
STYLES = {("plain", "plain"): ":", ("fast", "plain"): "-", ("fast", "int8"): "--", ("fast", "fp8"): "-."}


def check_plot(path: Path) -> None:
    """Before anything is measured: a name that can be drawn to, and something to draw with."""
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"--plot is {path}; its name must end in one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError("--plot needs matplotlib, which is missing; install the extra 'report' of maglev") from None


def save(path: Path, draw: Callable[["Figure"], None]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.15,
        # the same numbers give the same file
        "svg.hashsalt": path.name,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=path.suffix.lower().removeprefix("."))


def models_of(result: dict[str, Any]) -> dict[str, str]:
    """Each model with its colour, in order of appearance."""
    return dict(zip(dict.fromkeys(row["model"] for row in result["rows"]), COLOURS))


def plot_decode(result: dict[str, Any], path: Path) -> None:
    """Share of the copy bandwidth by batch, and the time of a step by position relative to the first one."""
    rows = result["rows"]
    batches = sorted({row["batch"] for row in rows})

    def draw(figure: "Figure") -> None:
        share, flat = figure.subplots(1, 2)
        for model, colour in models_of(result).items():
            for way in dict.fromkeys((row["step"], row["weight_format"]) for row in rows):
                style, label = STYLES[way], f"{model}, {way[0]}" + (f", {way[1]}" if way[1] != "plain" else "")
                entries = [e for e in result["summary"] if (e["step"], e["weight_format"]) == way]
                each = {entry["batch"]: entry for entry in entries}
                shares = [100 * each[batch]["share_of_copy"][model] for batch in batches]
                share.plot(batches, shares, style, marker="o", color=colour, label=label)
                keys = ("model", "step", "weight_format", "batch")
                own = [row for row in rows if tuple(row[key] for key in keys) == (model, *way, batches[0])]
                times = [row["ms"] / own[0]["ms"] for row in own]
                flat.plot([row["position"] for row in own], times, style, marker="o", color=colour, label=label)
        share.set_xscale("log", base=2)
        share.set_xticks(batches, [str(batch) for batch in batches])
        share.set_xlabel("sequences in the batch")
        share.set_ylabel("% of the copy bandwidth")
        share.set_ylim(0, 100)
        flat.set_xscale("symlog", linthresh=1)
        flat.set_xlabel("position (tokens read before)")
        flat.set_ylabel(f"step time, batch {batches[0]}, by the first")
        flat.set_ylim(0, max(1.2, flat.get_ylim()[1]))
        # the right-hand plot is one line where all is well, so there is room
        flat.legend(loc="lower center", ncols=2)
        figure.suptitle(f"{result['device']}, {result['dtype']}, depth {result['depth']}, random weights")

    save(path, draw)


def plot_read(result: dict[str, Any], path: Path) -> None:
    """Passes by chunk, and the relative change of the memories by pass."""

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        passes, change = figure.subplots(1, 2)
        for axes in (passes, change):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        colours = models_of(result)
        for row in result["rows"]:
            label, colour = f"{row['model']}, {row['weights']} weights", colours[row["model"]]
            passes.step(range(1, len(row["passes"]) + 1), row["passes"], where="mid", color=colour, label=label)
            moved = [(number, value) for number, value in enumerate(row["largest_change_by_pass"], 1) if value > 0]
            if moved:
                change.plot(*zip(*moved), marker="o", color=colour, label=label)
            for (stride, errors), line in zip(row["distance_to_stepping_by_pass"].items(), (":", "--"), strict=False):
                change.plot(range(1, len(errors) + 1), errors, line, color=colour, label=f"to stepping, {stride}")
            if moved:
                change.legend()
        passes.set_xlabel("chunk")
        passes.set_ylabel(f"passes ({result['passes_are']})")
        passes.set_ylim(bottom=0)
        passes.legend()
        change.set_yscale("log")
        change.set_xlabel("pass")
        change.set_ylabel("change in a pass, distance to stepping")
        figure.suptitle(f"{result['device']}, {result['dtype']}, depth {result['depth']}, {result['text']}")

    save(path, draw)
