"""Options that several verbs have."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from maglev.errors import RequestError
from maglev.runs import run_folder

if TYPE_CHECKING:
    from maglev.evaluate.memories import Source

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
# for verbs that write nothing into it
ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", parser=run_folder, help="A run folder, or the name of weights that come with maglev."
    ),
]
DataFolder = Annotated[Path, typer.Option("--data", metavar="DIR", help="What 'maglev data prepare' made.")]
Memory = Annotated[str, typer.Option("--memory", help="Where memories come from: recurrent, lifted or refined.")]
Passes = Annotated[
    int | None, typer.Option("--passes", help="Parallel passes of refined memories, 3 where nothing is said.")
]
Split = Annotated[str, typer.Option("--split", help="Which split of the data.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def memory_source(memory: str, passes: int | None = None) -> "Source":
    """What --memory names; --passes goes with refined memories alone."""
    from maglev.evaluate.memories import SOURCES

    for source in SOURCES:
        if source == memory:
            break
    else:
        raise RequestError(f"--memory is {memory!r}; it must be one of {', '.join(SOURCES)}")
    if passes is not None and passes < 1:
        raise RequestError(f"--passes is {passes}; it must be at least 1")
    if passes is not None and source != "refined":
        raise RequestError(f"--passes goes with --memory refined, not with {memory}; leave it away")
    return source
