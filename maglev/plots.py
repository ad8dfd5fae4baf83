"""Plots as files: the format is that of the name, the style is one, and the same numbers give the same file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maglev.errors import RequestError
from maglev.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Figure"], None]
FORMATS = (".svg", ".png", ".pdf")
WIDE = (9.6, 3.8)


def check_plot(path: Path, option: str = "--plot") -> None:
    """Before anything is measured: a name that can be drawn to, and something to draw with."""
    if path.suffix.lower() not in FORMATS:
        raise RequestError(f"{option} is {path}; its name must end in one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError("plots need matplotlib, which is missing; install the extra 'report' of maglev") from None


def save_plot(path: Path, draw: Draw, size: tuple[float, float] = WIDE) -> None:
    check_plot(path)
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "legend.frameon": False,
        "legend.fontsize": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.15,
        "svg.hashsalt": path.name,
    }
    kind = path.suffix.lower().removeprefix(".")
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)
