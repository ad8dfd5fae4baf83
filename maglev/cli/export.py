"""`maglev export`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from maglev.cli.options import AsJson
from maglev.cli.output import emit, say
from maglev.errors import RequestError
from maglev.runs import run_folder

FORMATS = ("hf", "run")
EXPORTED_DTYPES = ("float32", "bfloat16", "float16")


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", parser=run_folder, help="A run folder, an exported one, or weights that come with maglev."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    format: Annotated[
        str, typer.Option("--format", help="hf: a Hugging Face folder; run: a run folder, from an exported one.")
    ] = "hf",
    without_prefiller: Annotated[
        bool, typer.Option("--without-prefiller", help="Leave Q away: enough to use the model, not to train it.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16: round the weights. [as they are]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as a Hugging Face folder, or such a folder as a run."""
    if format not in FORMATS:
        raise RequestError(f"--format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if format == "run" and without_prefiller:
        raise RequestError("--without-prefiller goes with --format hf alone; leave it away")
    if format == "run" and dtype is not None:
        raise RequestError("--dtype goes with --format hf alone: a run is trained in float32; leave it away")
    if dtype not in (None, *EXPORTED_DTYPES):
        raise RequestError(f"--dtype is {dtype!r}; it must be one of {', '.join(EXPORTED_DTYPES)}")
    try:
        from maglev.hf import convert
    except ImportError as error:
        raise RequestError(f"exporting needs transformers ({error}); pip install 'maglev[hf]'") from None
    if format == "hf":
        result = convert.to_hugging_face(run, out, say, prefiller=not without_prefiller, dtype=dtype)
    else:
        result = convert.to_run(run, out, say)
    emit(result, as_json, show)


def show(result: dict[str, Any]) -> None:
    parts = ", ".join(f"{part} {count:,}" for part, count in result["parameters"].items())
    print(f"{result['out']}: step {result['step']}, parameters: {parts}")
