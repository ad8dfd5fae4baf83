"""Whether a decoder holds far beyond the length that it was trained on: bits per byte by position in long rows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Facts = dict[str, Any]


def doubling_edges(trained: int, context: int) -> list[int]:
    """0, once the trained length, twice, four times and so on, up to `context`."""
    edges = [0]
    while (following := trained * max(1, 2 ** (len(edges) - 1))) < context:
        edges.append(following)
    return [*edges, context]


def draw_lengths(figure: "Figure", runs: list[Facts]) -> None:
    from maglev.evaluate.figures import colours

    axes = figure.add_subplot()
    palette = colours([run["recipe"] for run in runs])
    for run in runs:
        parts = run["by_position"]
        ends = [(part["last"] + 1) / run["trained_context"] for part in parts]
        axes.plot(ends, [part["bpb_recurrent"] for part in parts], "o-", color=palette[run["recipe"]], label=run["run"])
    axes.set_xscale("log", base=2)
    axes.set_xlabel("positions up to this many times the trained length")
    axes.set_ylabel("bits per byte, recurrent")
    axes.legend()
