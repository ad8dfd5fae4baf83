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
    from maglev.evaluate.history import Far, Reading, Spans
    from maglev.objectives import Objective

TIMES, SPANS, TOKENS = 8, 512, 64


def history(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    data: DataFolder,
    times: Annotated[int, typer.Option("--times", help="The longest history, in plain reaches.")] = TIMES,
    spans: Annotated[int, typer.Option("--spans", help="So many places in the text, at most.")] = SPANS,
    tokens: Annotated[int, typer.Option("--tokens", help="What is asked for at each place.")] = TOKENS,
    far: Annotated[
        str,
        typer.Option("--far", help="Beyond one reach: the text's own, the same shuffled, or foreign."),
    ] = "own",
    prefiller: Annotated[
        bool,
        typer.Option("--prefiller", help="Also what Q itself predicts, which the paper does not train."),
    ] = False,
    split: Split = "validation",
    device: Device = "auto",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="All runs in one picture.")] = None,
    as_json: AsJson = False,
) -> None:
    """What text read long ago is worth: the same tokens after more and more of what stands before them.

    Bits per byte in float32, recurrent, and lifted where the run has a prefiller. The unit is what the windows reach by
    themselves, layers x (W - 1): what is gained beyond one of it is memory's, or that of full layers. Places are those
    that have the longest history, so numbers of other --times, --tokens or --spans are of other text.
    """
    for name, value, least in (("--times", times, 2), ("--spans", spans, 1), ("--tokens", tokens, 1)):
        if value < least:
            raise RequestError(f"{name} is {value}; it must be at least {least}")
    if plot is not None:
        from maglev.plots import check_plot

        check_plot(plot)
        check_place("--plot", plot)
    from maglev.evaluate.history import draw_history, find_spans, histories
    from maglev.train.distributed import resolve_device

    beyond = check_far(far)
    place = resolve_device(device, setting="--device")
    # all of them before the first is measured
    reach = check_runs(runs, times, tokens)
    opened = open_texts(runs, data, split)
    lengths = histories(reach, times)
    chosen = find_spans(opened.splits[split], lengths[-1], tokens, spans)
    if not len(chosen.rows):
        raise RequestError(
            f"no document in {split} of {data} has {lengths[-1] + tokens:,} tokens; use a smaller --times, or "
            "longer documents"
        )
    asked = {"spans": (spans, SPANS), "tokens": (tokens, TOKENS), "far": (far, "own"), "split": (split, "validation")}
    words = [f"{name}-{value}" for name, (value, usual) in asked.items() if value != usual]
    words += ["prefiller"] if prefiller else []
    labels = [run.name for run in runs] if len({run.name for run in runs}) == len(runs) else [str(run) for run in runs]
    found = []
    for run, label in zip(runs, labels, strict=True):
        found.append(measure(run, label, opened, chosen, reach, lengths, beyond, prefiller, split, place))
        keep(run, "-".join(["history", found[-1]["data"], str(times), *words]), found[-1])
    if plot is not None:
        from maglev.plots import save_plot

        save_plot(plot, lambda figure: draw_history(figure, found))
    emit({"runs": found}, as_json, render)


def check_far(far: str) -> "Far":
    from maglev.evaluate.history import FARS

    for kind in FARS:
        if kind == far:
            return kind
    raise RequestError(f"--far is {far!r}; it must be one of {', '.join(FARS)}")


def check_runs(runs: list[Path], times: int, tokens: int) -> int:
    """Whether they can be measured in one table, and its unit: the plain reach of all of them."""
    from maglev.evaluate.recall import plain_reach
    from maglev.evaluate.runs import check_has_weights
    from maglev.runs import read_config

    reaches = {}
    for run in runs:
        model = read_config(run).model
        check_has_weights(run, say)
        reaches[run] = reach = plain_reach(model)
        longest = times * reach + 1 + tokens
        if max(model.windows) > model.window and longest > model.context:
            most = (model.context - 1 - tokens) // reach
            remedy = f"use at most {most}" if most > 1 else "train it on longer rows or with shorter windows"
            raise RequestError(
                f"{run} has layers that see the whole context, {model.context} tokens in training, and --times {times} "
                f"needs {longest}; {remedy}"
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
    label: str,
    data: "TokenData",
    spans: "Spans",
    reach: int,
    lengths: list[int],
    far: "Far",
    prefiller: bool,
    split: str,
    device: "torch.device",
) -> dict[str, Any]:
    from maglev.evaluate.diagnostics import in_float32
    from maglev.evaluate.history import gains, span_nats
    from maglev.evaluate.runs import has_prefiller, load_objective

    config, objective, step = load_objective(run, device, say, with_prefiller=has_prefiller(run, say))
    readings = readings_of(run, config, objective, lengths[-1] + spans.span, prefiller)
    result: dict[str, Any] = {"run": str(run), "label": label, "recipe": config.recipe, "step": step}
    result |= {"memory": objective.decoder.injection is not None, "seed": config.train.seed}
    result |= {"data": data.folder.resolve().name, "split": split, "plain_reach": reach, "far": far}
    result |= {"spans": len(spans.rows), "tokens": spans.span, "documents": len(set(spans.documents.tolist()))}
    result |= {"effective_documents": spans.effective_documents, "places": spans.digest, "sources": list(readings)}
    rows: list[dict[str, Any]] = [{"reaches": (length - 1) // reach, "history": length} for length in lengths]
    with progress("rows") as meter:
        for reading in readings:
            done, nats = 0, []

            def count(more: int, reading: str = reading) -> None:
                nonlocal done
                done += more
                meter.update(f"{label}, {reading}", done, len(lengths) * len(spans.rows))

            # rows of other lengths are rounded in another way, and differences are small
            with in_float32(objective.decoder):
                for length in lengths:
                    read = spans.with_far(length, lengths[0], far)
                    nats.append(span_nats(objective, spans, read, data.tokenizer.bos_id, reading, count))
            for row, facts in zip(rows, gains(nats, spans, data.tokenizer.token_byte_counts()), strict=True):
                row |= {f"{name}_{reading}": value for name, value in facts.items()}
    return result | {"rows": rows}


def readings_of(
    run: Path, config: "RunConfig", objective: "Objective", longest: int, prefiller: bool
) -> "list[Reading]":
    """Refined memories know nothing beyond a few reaches, whatever the model; Q knows rows as long as in training."""
    from maglev.evaluate.memories import sources_of

    # with_prefiller=False leaves an objective without lifted memories
    sources = sources_of(objective)
    kept: list[Reading] = [source for source in sources if source != "refined"]
    if "lifted" in kept and longest > config.model.context:
        say(f"{run}: lifted memories are left out, for Q was trained on {config.model.context} tokens, not {longest}")
        kept.remove("lifted")
    if prefiller and "lifted" in kept:
        kept.append("prefiller")
    return kept


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    runs = value["runs"]
    first = runs[0]
    where = f"{first['spans']} x {first['tokens']} tokens of {first['documents']} documents"
    table = Table("run", "memories", "bpb after 1", title=f"bits per byte by text read before, {where}")
    for row in first["rows"][1:]:
        table.add_column(f"gained by {row['reaches']}", justify="right")
    for run in runs:
        for source in run["sources"]:
            cells = [f"{run['rows'][0][f'bpb_{source}']:.4f}"]
            cells += [gained(row[f"gain_{source}"], row[f"error_{source}"]) for row in run["rows"][1:]]
            table.add_row(run["label"], source if run["memory"] else "-", *cells)
    console().print(table)
    beyond = {
        "own": "",
        "shuffled": " Beyond one reach tokens were shuffled.",
        "foreign": " Beyond one was other text.",
    }
    alone = " (of one document it is not known)" if first["documents"] == 1 else ""
    console().print(
        f"In plain reaches of {first['plain_reach']} tokens. ± is the standard error over documents{alone}, which here "
        f"are as good as {first['effective_documents']:.0f} of one size.{beyond[first['far']]}",
        soft_wrap=True,
    )


def gained(gain: float, error: float | None) -> str:
    return f"{gain:+.5f}" + ("" if error is None or error != error else f" ± {error:.5f}")
