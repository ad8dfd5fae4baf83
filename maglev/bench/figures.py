"""Plots of what the benchmarks found, as files: the format is that of the name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from maglev.plots import save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#d97706", "#3b82f6", "#059669", "#db2777", "#7c3aed")
# by way to step and format of its weights
STYLES = {("plain", "plain"): ":", ("fast", "plain"): "-", ("fast", "int8"): "--", ("fast", "fp8"): "-."}


def models_of(result: dict[str, Any]) -> dict[str, str]:
    """Each model with its colour, in order of appearance."""
    return dict(zip(dict.fromkeys(row["model"] for row in result["rows"]), COLOURS))


def recipes_of(result: dict[str, Any]) -> dict[str, str]:
    names = dict.fromkeys(row["recipe"] for row in result["rows"])
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def plot_train(result: dict[str, Any], path: Path) -> None:
    """Share of the matrix rate, and speed beside SWA's with what the counted FLOPs allow."""

    def draw(figure: "Figure") -> None:
        rate, speed = figure.subplots(1, 2)
        labels = [f"{row['recipe']}\nd{row['depth']}" for row in result["rows"]]
        colours = [recipes_of(result)[row["recipe"]] for row in result["rows"]]
        rate.bar(labels, [100 * row["mfu"] for row in result["rows"]], color=colours)
        rate.set_ylabel("% of the matrix rate")
        own = [f"{each['recipe']}\nd{each['depth']}" for each in result["summary"]]
        tints = [recipes_of(result)[each["recipe"]] for each in result["summary"]]
        speed.bar(own, [each["speed_by_swa"] for each in result["summary"]], color=tints)
        allowed = [each["allowed_by_flops"] for each in result["summary"]]
        speed.plot(own, allowed, "_", color="black", markersize=18, label="what the counted FLOPs allow")
        speed.set_ylabel("tokens/s by SWA's")
        speed.legend()
        for axes in (rate, speed):
            axes.tick_params("x", labelrotation=90, labelsize=6)
        figure.suptitle(f"Training on {result['device']}, {result['dtype']}")

    save_plot(path, draw)


def plot_scaling(result: dict[str, Any], path: Path) -> None:
    """Time of a step along each axis, with the counted FLOPs beside it, both by the axis's second point."""
    sizes = {"rows": "rows", "layers": "depth", "context": "context"}
    titles = {"rows": "rows of a pass", "layers": "layers at one width", "context": "context at one W"}

    def draw(figure: "Figure") -> None:
        for axes, (axis, key) in zip(figure.subplots(1, 3), sizes.items()):
            for recipe, colour in recipes_of(result).items():
                own = [row for row in result["rows"] if (row["recipe"], row["axis"]) == (recipe, axis)]
                if not own:
                    continue
                middle = own[min(1, len(own) - 1)]
                places = [row[key] for row in own]
                times = [row["seconds_per_step"] / middle["seconds_per_step"] for row in own]
                counted = [row["flops_per_token"] * row["tokens_per_step"] for row in own]
                base = middle["flops_per_token"] * middle["tokens_per_step"]
                axes.plot(places, times, marker="o", color=colour, label=recipe)
                axes.plot(places, [count / base for count in counted], ":", color=colour, label=f"{recipe}, FLOPs")
            axes.set_xlabel(titles[axis])
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
        figure.axes[0].set_ylabel("time of a step, by the second point")
        figure.axes[0].legend(fontsize=7)
        figure.suptitle(f"Training on {result['device']}, {result['dtype']}, from depth {result['depth']}")

    save_plot(path, draw)


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

    save_plot(path, draw)


def plot_read(result: dict[str, Any], path: Path) -> None:
    """Passes by block, and the relative change of the memories by pass."""

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
            errors = row["distance_to_stepping_by_pass"]
            if errors:
                change.plot(range(1, len(errors) + 1), errors, ":", color=colour, label="distance to stepping")
            if moved:
                change.legend()
        passes.set_xlabel("block")
        passes.set_ylabel(f"passes ({result['passes_are']})")
        passes.set_ylim(bottom=0)
        passes.legend()
        change.set_yscale("log")
        change.set_xlabel("pass")
        change.set_ylabel("change in a pass, distance to stepping")
        figure.suptitle(f"{result['device']}, {result['dtype']}, depth {result['depth']}, {result['text']}")

    save_plot(path, draw)
