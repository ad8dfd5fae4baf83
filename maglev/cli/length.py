"""`maglev eval length`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson, DataFolder, Device, Split
from maglev.cli.output import check_place, console, emit, keep, progress, say
from maglev.errors import RequestError

if TYPE_CHECKING:
    from maglev.data.loader import Loader
    from maglev.data.shards import TokenData

TIMES = 64


def length(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    data: DataFolder,
    times: Annotated[int, typer.Option("--times", help="Tokens of a row, in lengths of the training rows.")] = TIMES,
    split: Split = "validation",
    rows: Annotated[int, typer.Option("--rows", help="Only so many rows; 0 is all.")] = 0,
    rows_per_pass: Annotated[int, typer.Option("--rows-per-pass", help="Sequences at a time.")] = 16,
    device: Device = "auto",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="All runs in one picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """Bits per byte by position far beyond the trained length, on recurrent memories.

    Documents come one after another, and the state is carried through all of them. What texts are hard to predict
    differs from place to place: compare runs at the same positions, each with the first. Full layers see as many
    positions back as rows were long in training.
    """
    for name, value, least in (("--times", times, 2), ("--rows", rows, 0), ("--rows-per-pass", rows_per_pass, 1)):
        if value < least:
            raise RequestError(f"{name} is {value}; it must be at least {least}")
    if plot is not None:
        from maglev.plots import check_plot

        check_plot(plot)
        check_place("--plot", plot)
    check_alike(runs)
    for run in runs:
        # all of them before the first is measured
        open_rows(run, data, times, split)
    found: list[dict[str, Any]] = []
    for run in runs:
        found.append(measure(run, data, times, split, rows, rows_per_pass, device))
        # a part of the rows is no result to keep
        if not rows:
            keep(run, f"length-{data.resolve().name}-{times}", found[-1])
    if plot is not None:
        from maglev.evaluate.length import draw_lengths
        from maglev.plots import save_plot

        save_plot(plot, lambda figure: draw_lengths(figure, found))
    emit({"runs": found}, as_json, render)


def check_alike(runs: list[Path]) -> None:
    """Runs of one picture have one unit."""
    from maglev.runs import read_config

    contexts = {run: read_config(run).model.context for run in runs}
    if len(set(contexts.values())) > 1:
        told = ", ".join(f"{run} with {context}" for run, context in contexts.items())
        raise RequestError(f"runs were trained on rows of different lengths: {told}; measure them apart")


def open_rows(run: Path, data: Path, times: int, split: str) -> "tuple[TokenData, Loader]":
    """So many trained lengths of text to a row."""
    from maglev.data.loader import Loader
    from maglev.evaluate.runs import open_matching_data
    from maglev.runs import read_config

    tokens, trained = open_matching_data(run, data), read_config(run).model.context
    loader = Loader(tokens, split, times * trained, seed=0, shuffle=False)
    most = loader.tokens_per_epoch // trained
    if times > most:
        raise RequestError(
            f"--times is {times}, rows of {times * trained:,} tokens, and {split} of {data} has "
            f"{loader.tokens_per_epoch:,}; use at most {most}, or more text"
        )
    return tokens, loader


def measure(
    run: Path, data: Path, times: int, split: str, rows: int, rows_per_pass: int, device: str
) -> dict[str, Any]:
    from maglev.evaluate.bpb import bits_per_byte
    from maglev.evaluate.length import doubling_edges
    from maglev.evaluate.runs import load_objective
    from maglev.train.distributed import resolve_device

    place = resolve_device(device, setting="--device")
    config, objective, step = load_objective(run, place, say, with_prefiller=False)
    tokens, loader = open_rows(run, data, times, split)
    trained = config.model.context
    with progress("rows") as meter:
        result = bits_per_byte(
            objective,
            loader,
            "recurrent",
            tokens.tokenizer.token_byte_counts(),
            rows=rows,
            rows_per_pass=rows_per_pass,
            data=config.data,
            edges=doubling_edges(trained, times * trained),
            progress=lambda done, total: meter.update(f"{run}, {times} x {trained} tokens", done, total),
        )
    facts = {"run": str(run), "recipe": config.recipe, "step": step, "seed": config.train.seed, "split": split}
    facts |= {"data": data.resolve().name, "trained_context": trained, "context": times * trained}
    return facts | result.to_dict()


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    runs = value["runs"]
    table = Table("positions / trained length", title="bits per byte, recurrent memories")
    for run in runs:
        table.add_column(f"{run['run']} ({run['recipe']})", justify="right")
    trained = runs[0]["trained_context"]
    for number, part in enumerate(runs[0]["by_position"]):
        found = [run["by_position"][number]["bpb_recurrent"] for run in runs]
        shown = [f"{found[0]:.4f}", *(f"{value:.4f} ({value - found[0]:+.4f})" for value in found[1:])]
        table.add_row(f"{part['first'] / trained:g} to {(part['last'] + 1) / trained:g}", *shown)
    console().print(table)
