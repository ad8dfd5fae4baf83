"""`maglev data ...`"""

from pathlib import Path
from typing import Annotated

import typer

from maglev.cli.options import AsJson
from maglev.cli.output import console, emit, progress


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="parquet, jsonl, jsonl.gz or txt files, folders of them, or a Hub data set (owner/name).",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the tokenizer and the token shards.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Tokens of the tokenizer that is trained.")] = 32_768,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Take this tokenizer file instead of training one.")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option("--validation", help="Source for validation; without it, 1% of the documents by hash."),
    ] = None,
    column: Annotated[str, typer.Option("--column", help="Column or field that holds the text.")] = "text",
    train_tokens: Annotated[
        int | None, typer.Option("--train-tokens", help="Read no further than this many tokens to train on.")
    ] = None,
    validation_tokens: Annotated[
        int | None, typer.Option("--validation-tokens", help="Keep no more than this many for validation.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what --out holds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a tokenizer and token shards from text."""
    from maglev.cli.tables import print_sections
    from maglev.data.prepare import prepare as prepare_data

    with progress(unit="bytes") as meter:
        result = prepare_data(
            sources,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            validation=validation,
            column=column,
            train_tokens=train_tokens,
            validation_tokens=validation_tokens,
            overwrite=overwrite,
            progress=meter.update,
        )
    emit(result, as_json, lambda value: print_sections(console(), value))
