"""`maglev eval history`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson, DataFolder, Device, Split
from maglev.cli.output import check_place, console, emit, keep, progress, say
from maglev.errors import RequestError

if TYPE_CHECKING:
    import torch

    from maglev.config import RunConfig
    from maglev.data.shards import TokenData
    from maglev.evaluate.memories import Source

TIMES, SPANS, TOKENS = 8, 512, 64


def history(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    data: DataFolder,
    times: Annotated[int, typer.Option("--times", help="The longest history, in plain reaches.")] = TIMES,
    spans: Annotated[int, typer.Option("--spans", help="So many places in the text.")] = SPANS,
    tokens: Annotated[int, typer.Option("--tokens", help="What is asked for at each place.")] = TOKENS,
    split: Split = "validation",
    rows_per_pass: Annotated[int, typer.Option("--rows-per-pass", help="Sequences at a time.")] = 64,
    device: Device = "auto",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="All runs in one picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """What text read long ago is worth: the same tokens after more and more of what stands before them.

    Bits per byte, recurrent, and lifted where the run has a prefiller. The unit is what the windows reach by
    themselves, layers x (W - 1): what is gained beyond one of it is memory's, or that of full layers.
    """
    given = {
        "--times": (times, 2),
        "--spans": (spans, 1),
        "--tokens": (tokens, 1),
        "--rows-per-pass": (rows_per_pass, 1),
    }
    for name, (value, least) in given.items():
        if value < least:
            raise RequestError(f"{name} is {value}; it must be at least {least}")
    if plot is not None:
        from maglev.plots import check_plot

        check_plot(plot)
        check_place("--plot", plot)
    from maglev.train.distributed import resolve_device

    place = resolve_device(device, setting="--device")
    # all of them before the first is measured
    reach = check_runs(runs, times, tokens)
    opened = open_texts(runs, data, split)
    found = [measure(run, opened, reach, times, spans, tokens, split, rows_per_pass, place) for run in runs]
    asked, usual = {"spans": spans, "tokens": tokens}, {"spans": SPANS, "tokens": TOKENS}
    words = [] if split == "validation" else [split]
    words += [f"{name}-{value}" for name, value in asked.items() if value != usual[name]]
    for run, result in zip(runs, found, strict=True):
        keep(run, "-".join(["history", result["data"], str(times), *words]), result)
    if plot is not None:
        from maglev.evaluate.history import draw_history
        from maglev.plots import save_plot

        save_plot(plot, lambda figure: draw_history(figure, found))
    emit({"runs": found}, as_json, render)


def check_runs(runs: list[Path], times: int, tokens: int) -> int:
    """Runs of one table have one unit: the plain reach of all of them."""
    from maglev.evaluate.recall import plain_reach
    from maglev.runs import read_config

    reaches = {}
    for run in runs:
        model = read_config(run).model
        reaches[run] = reach = plain_reach(model)
        if max(model.windows) > model.window and times * reach + 1 + tokens > model.context:
            most = (model.context - 1 - tokens) // reach
            raise RequestError(
                f"{run} has layers that see the whole context, {model.context} tokens in training, and --times {times} "
                f"needs {times * reach + 1 + tokens}; "
                + (f"use at most {most}" if most > 1 else "train it on longer rows or with shorter windows")
            )
    if len(set(reaches.values())) > 1:
        told = ", ".join(f"{run} with {reach}" for run, reach in reaches.items())
        raise RequestError(f"runs have different plain reaches: {told}; measure them apart")
    return next(iter(reaches.values()))


def open_texts(runs: list[Path], data: Path, split: str) -> "TokenData":
    from maglev.data.shards import open_data
    from maglev.evaluate.runs import check_tokenizer

    found = open_data(data)
    for run in runs:
        check_tokenizer(run, found)
    if split not in found.splits:
        raise RequestError(f"{data} has no split {split!r}; it has {', '.join(found.splits)}")
    return found


def measure(
    run: Path,
    data: "TokenData",
    reach: int,
    times: int,
    most: int,
    tokens: int,
    split: str,
    rows_per_pass: int,
    device: "torch.device",
) -> dict[str, Any]:
    from maglev.evaluate.history import find_spans, gains, histories, span_nats
    from maglev.evaluate.memories import sources_of
    from maglev.evaluate.runs import has_prefiller, load_objective

    lengths = histories(reach, times)
    spans = find_spans(data.splits[split], lengths[-1], tokens, most)
    if not len(spans.rows):
        raise RequestError(
            f"no document in {split} of {data.folder} has {lengths[-1] + tokens:,} tokens; use a smaller --times, or "
            "longer documents"
        )
    own_q = has_prefiller(run, say)
    config, objective, step = load_objective(run, device, say, with_prefiller=own_q)
    sources = lifted_where_it_fits(run, config, sources_of(objective), lengths[-1] + tokens)
    result: dict[str, Any] = {"run": str(run), "label": run.name, "recipe": config.recipe, "step": step}
    result |= {"seed": config.train.seed, "data": data.folder.resolve().name, "split": split, "plain_reach": reach}
    result |= {"memory": objective.decoder.injection is not None}
    result |= {"spans": len(spans.rows), "tokens": tokens, "documents": len(set(spans.documents.tolist()))}
    rows: list[dict[str, Any]] = [{"reaches": (length - 1) // reach, "history": length} for length in lengths]
    with progress("rows") as meter:
        for source in sources:
            done, nats = 0, []

            def count(more: int, source: str = source) -> None:
                nonlocal done
                done += more
                meter.update(f"{run.name}, {source}", done, len(lengths) * len(spans.rows))

            for length in lengths:
                bos = data.tokenizer.bos_id
                nats.append(span_nats(objective, spans, length, bos, source, rows_per_pass, count))
            for row, facts in zip(rows, gains(nats, spans, data.tokenizer.token_byte_counts()), strict=True):
                row |= {f"{name}_{source}": value for name, value in facts.items()}
    return result | {"sources": list(sources), "rows": rows}


def lifted_where_it_fits(run: Path, config: "RunConfig", sources: "tuple[Source, ...]", longest: int) -> "list[Source]":
    """Refined memories know nothing beyond a few reaches, whatever the model; Q knows rows as long as in training."""
    kept: list[Source] = [source for source in sources if source != "refined"]
    if "lifted" in kept and longest > config.model.context:
        say(f"{run}: lifted memories are left out, for Q was trained on {config.model.context} tokens, not {longest}")
        kept.remove("lifted")
    return kept


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    runs = value["runs"]
    first = runs[0]
    where = f"{first['spans']} x {first['tokens']} tokens of {first['documents']} documents"
    table = Table("run", "memories", "1", title=f"bits per byte by text read before, {where}")
    for row in first["rows"][1:]:
        table.add_column(f"{row['reaches']}", justify="right")
    for run in runs:
        for source in run["sources"]:
            cells = [f"{run['rows'][0][f'bpb_{source}']:.4f}"]
            for row in run["rows"][1:]:
                error = row[f"error_{source}"]
                cells.append(f"{-row[f'gain_{source}']:+.4f}" + (f" ± {error:.4f}" if error == error else ""))
            table.add_row(run["label"], source if run["memory"] else "-", *cells)
    console().print(table)
    console().print(
        f"After one plain reach of text, {first['plain_reach']} tokens; then what it is less after so many; ± is the "
        "standard error over documents.",
        soft_wrap=True,
    )
