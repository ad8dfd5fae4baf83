"""A verb's result as tables: plain values first, then one table per nested part."""

from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SUFFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def print_sections(console: "Console", result: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    plain = {name: value for name, value in result.items() if not isinstance(value, dict)}
    nested = {name: value for name, value in result.items() if isinstance(value, dict)}
    for title, part in {"": plain, **nested}.items():
        if not part:
            continue
        table = Table(title=words(title) or None, title_justify="left", box=box.SIMPLE, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column(style="dim", justify="right")
        for name, value in part.items():
            table.add_row(*(Text(cell) for cell in (words(name), show(value), rounded(value))))
        console.print(table)


def words(name: str) -> str:
    return name if "." in name else name.replace("_", " ")


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, list | tuple):
        runs = ((item, len(list(same))) for item, same in groupby(value))
        return " ".join(show(item) if count == 1 else f"{show(item)} x{count}" for item, count in runs)
    if isinstance(value, dict):
        return ", ".join(f"{words(str(name))} {show(item)}" for name, item in value.items())
    return "-" if value is None else str(value)


def rounded(value: Any) -> str:
    """A large count again with a suffix, for the eye."""
    if isinstance(value, int):
        for scale, suffix in SUFFIXES:
            if value >= scale:
                return f"{value / scale:.3g} {suffix}"
    return ""
