"""`maglev train`"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from maglev.cli.options import AsJson, DataFolder
from maglev.cli.output import Meter, emit, progress, say


class Unseen:
    """The meter of a rank that shows nothing."""

    def update(self, stage: str, done: int, total: int | None = None, note: str = "") -> None:
        pass


class MeterWatch:
    def __init__(self, meter: Meter, stage: str, quiet: bool) -> None:
        self.meter, self.stage, self.quiet = meter, stage, quiet
        # a bar shows the time left by itself
        self.tells_time = not sys.stderr.isatty()
        self.first: tuple[int, float] | None = None

    def say(self, line: str) -> None:
        if not self.quiet:
            say(line)

    def step(self, done: int, total: int, note: str) -> None:
        if not self.quiet:
            self.meter.update(self.stage, done, total, note + (self.time_left(done, total) if self.tells_time else ""))

    def time_left(self, done: int, total: int) -> str:
        """By what the steps of this session took, saving and validation included."""
        now = time.monotonic()
        if self.first is None:
            self.first = (done, now)
            return ""
        steps, seconds = done - self.first[0], now - self.first[1]
        minutes, rest = divmod(round((total - done) * seconds / max(steps, 1)), 60)
        return f" {minutes // 60}:{minutes % 60:02d}:{rest:02d} left"


@contextmanager
def watching(recipe: str, rank: int) -> Iterator[MeterWatch]:
    """Rank 0 shows how it goes."""
    if rank:
        yield MeterWatch(Unseen(), recipe, quiet=True)
        return
    with progress("steps") as meter:
        yield MeterWatch(meter, recipe, quiet=False)


def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A named run, such as maglev-shared-0.1.")],
    data: DataFolder,
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="The run folder to write.")],
    depth: Annotated[
        int | None, typer.Option("--depth", help="Layers; the width is 64 times that. [default: 20]")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the recipe.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of RUN.")] = False,
    init_from: Annotated[
        str | None, typer.Option("--init-from", metavar="RUN", help="Start from another run's decoder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a recipe; under torchrun on many processes."""
    from maglev.recipes import PAPER_DEPTH
    from maglev.settings import parse_assignments
    from maglev.train import launch
    from maglev.train.distributed import SaidElsewhere, read_place

    chosen: dict[str, Any] = dict(parse_assignments(settings or []))
    if init_from is not None:
        chosen["train.init_from"] = init_from
    rank = read_place(os.environ)[0]
    try:
        with watching(recipe, rank) as watch:
            summary = launch.train(
                recipe,
                data,
                out,
                watch,
                depth=PAPER_DEPTH if depth is None else depth,
                settings=chosen,
                resume=resume,
            )
    except SaidElsewhere as error:
        raise typer.Exit(error.status) from None
    if rank == 0:
        emit(summary, as_json, render)
    if summary["signal"] and rank == 0:
        say(f"go on with: maglev train {recipe} --resume, and the same options")
    if summary["signal"]:
        raise typer.Exit(128 + summary["signal"])


def render(summary: dict[str, Any]) -> None:
    print(f"{summary['run']}: step {summary['step']} of {summary['steps']}, {summary['tokens']:,} tokens")
