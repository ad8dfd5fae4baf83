"""What a verb prints and where: its result on stdout, everything else on stderr."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress

PIPE_WIDTH = 110


def emit(value: dict[str, Any], as_json: bool, render: Callable[[dict[str, Any]], None]) -> None:
    """The result of a verb: one JSON document on stdout, or what `render` prints for people."""
    if as_json:
        print(json.dumps(finite(value), allow_nan=False, default=os.fspath))
    else:
        render(value)


def keep(run: "Path", name: str, value: dict[str, Any]) -> None:
    """A result in the run's folder, for 'maglev table'. One that cannot be kept there has been shown all the same."""
    from maglev.evaluate.results import save_result
    from maglev.runs import is_shipped

    if is_shipped(run):
        return say(f"{run} comes with maglev, so this result is not kept there")
    try:
        save_result(run, name, finite(value))
    except OSError as error:
        say(f"could not keep this result in {run} ({error}), so 'maglev table' will not find it")


def check_place(option: str, path: "Path") -> None:
    """Whether a file can be written there, before the work whose result it is to hold."""
    import tempfile

    from maglev.errors import RequestError

    if path.is_dir():
        raise RequestError(f"{option} is {path}, which is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise RequestError(f"{option} {path} cannot be written ({error.strerror}); name another place") from None


def check_folder(option: str, path: "Path") -> None:
    """Whether files can be written there."""
    from maglev.errors import RequestError

    if path.exists() and not path.is_dir():
        raise RequestError(f"{option} is {path}, which is a file; name a folder")
    check_place(option, path / "table.txt")


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def say(message: str) -> None:
    """A remark for the person watching."""
    print(message, file=sys.stderr, flush=True)


def console() -> "Console":
    """For results on stdout; a pipe gets a fixed width, so that tables are not squeezed into 80 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


class Meter(Protocol):
    def update(self, stage: str, done: int, total: int | None = None, note: str = "") -> None:
        """`stage` is at `done` of `total` (None: unknown). `note` is free text, such as the current loss."""


@contextmanager
def progress(unit: str = "", every: float = 10.0) -> Iterator[Meter]:
    """Progress on stderr: bars on a terminal, else a plain line per stage at most every `every` seconds.

    `unit` is what is counted; "bytes" are shown as kB, MB and so on.
    """
    if not sys.stderr.isatty():
        meter = LineMeter(unit, every)
        try:
            yield meter
        finally:
            meter.finish()
        return
    from rich.console import Console

    # stdout stays as it is: results may be written there while the bar is shown.
    with make_bars(Console(stderr=True)) as bars:
        yield BarMeter(bars, unit)


def make_bars(console: "Console") -> "Progress":
    """Bars whose notes have a line of their own: beside the bar, 80 columns would cut them off."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    class NotedBars(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            notes = [task.fields["note"] for task in self.tasks if task.fields["note"]]
            if notes:
                yield Text("  " + notes[-1], style="dim", no_wrap=True, overflow="ellipsis")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
    )
    return NotedBars(*columns, console=console, redirect_stdout=False)


class BarMeter:
    """One rich bar per stage, in the order of their first update."""

    def __init__(self, bars: Any, unit: str) -> None:
        self.bars = bars
        self.unit = unit
        self.tasks: dict[str, Any] = {}

    def update(self, stage: str, done: int, total: int | None = None, note: str = "") -> None:
        amount = describe_amount(done, total, self.unit)
        if stage not in self.tasks:
            self.finish_open_ended()
            self.tasks[stage] = self.bars.add_task(stage, total=total, amount=amount, note=note)
        self.bars.update(self.tasks[stage], completed=done, total=total, amount=amount, note=note)

    def finish_open_ended(self) -> None:
        """A stage of unknown length is over when the next one begins: its bar stops moving."""
        for task in self.bars.tasks:
            if task.total is None:
                self.bars.update(task.id, total=1, completed=1)


class LineMeter:
    """Plain lines for logs: the first update of a stage, its last, and one now and then between them."""

    def __init__(self, unit: str, every: float) -> None:
        self.unit = unit
        self.every = every
        self.stage = ""
        self.pending = ""
        self.last = 0.0

    def update(self, stage: str, done: int, total: int | None = None, note: str = "") -> None:
        if stage != self.stage:
            self.finish()
            self.stage, self.last = stage, -math.inf
        said = " ".join(filter(None, (describe_amount(done, total, self.unit), note)))
        self.pending = f"{stage}: {said}" if said else stage
        if time.monotonic() - self.last >= self.every or done == total:
            self.finish()

    def finish(self) -> None:
        if self.pending:
            say(self.pending)
        self.pending, self.last = "", time.monotonic()


def describe_amount(done: int, total: int | None, unit: str) -> str:
    """Nothing for a stage that counts nothing."""
    if not done and total is None:
        return ""
    if unit == "bytes":
        return describe_bytes(done) + (f" of {describe_bytes(total)}" if total else "")
    return f"{done:,}" + (f" of {total:,}" if total else "") + (f" {unit}" if unit else "")


def describe_bytes(count: int) -> str:
    size = float(count)
    for suffix in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1000
    return f"{size:.1f} TB"
