"""`maglev report`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from maglev.cli.options import AsJson
from maglev.cli.output import check_place, console, emit

NAME = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, to be set side by side.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help=f"The page. [default: RUN/{NAME} of the first]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """A page about runs: bits per byte by memory source, losses, whether the loop holds, gates, size of the state."""
    from maglev.evaluate.report import measured, write_report
    from maglev.evaluate.run_report import report_of

    content = report_of(runs)
    place = runs[0] / NAME if out is None else out
    check_place("--out", place)
    write_report(place, content)
    told = {run.label: {f"bpb_{source}": value for source, value in measured(run)} for run in content.runs}
    emit({"report": str(place), "runs": told}, as_json, render)


def render(value: dict[str, Any]) -> None:
    console().print(f"report: {value['report']}", markup=False)
