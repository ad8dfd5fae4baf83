"""`maglev bench train`"""

from pathlib import Path
from typing import Annotated, Any

import typer

from maglev.cli.bench import (
    Out,
    Plot,
    Quick,
    Result,
    check_files,
    finish,
    memory_shown,
    render_machine,
    whole_numbers,
)
from maglev.cli.options import AsJson, Device
from maglev.cli.output import console, finite, progress
from maglev.errors import RequestError, WorkError


def train(
    depth: Annotated[
        str | None, typer.Option("--depth", metavar="N,N...", help="Layers, width 64 x that; 12,20, with --quick 2.")
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(
            "--recipes",
            metavar="NAME,...",
            help="SWA, SLSL, LRT, Maglev shared and separate; NAME+selective, +full, +fp8.",
        ),
    ] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens of a row; 2048 unless given.")] = None,
    window: Annotated[int | None, typer.Option("--window", help="A quarter of the context unless given.")] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", help="Rows of a pass; 32 up to depth 12, else 16. 0: what fits.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens of a step, over all its passes; 524288 unless given.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Warm steps that are timed; the median counts.")] = None,
    recompute: Annotated[str, typer.Option("--recompute", help="none, selective or full.")] = "none",
    products: Annotated[str, typer.Option("--products", help="plain, or fp8 where the GPU has it.")] = "plain",
    scaling: Annotated[
        bool, typer.Option("--scaling", help="Cost by rows, layers and context at one W instead.")
    ] = False,
    device: Device = "auto",
    quick: Quick = False,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What a training step costs: each model in a process of its own, beside the matrix rate and beside SWA."""
    check_files(out, plot)
    from maglev.bench.figures import plot_scaling, plot_train
    from maglev.bench.train import known_recipes, measure_scaling, measure_train, measured, train_plan
    from maglev.files import write_json
    from maglev.train.distributed import resolve_device

    depths = whole_numbers("--depth", depth)
    if scaling and depths is not None and len(depths) > 1:
        raise RequestError(f"--depth is {depth}; the scaling curves start from one depth")
    plan = train_plan(
        quick,
        scaling,
        recipes=known_recipes(recipes),
        depths=depths,
        context=context,
        window=window,
        rows=rows,
        tokens=tokens,
        steps=steps,
        recompute=recompute,
        products=products,
    )
    place = str(resolve_device(device, setting="--device"))
    measure, draw, render = (
        (measure_scaling, plot_scaling, render_scaling) if scaling else (measure_train, plot_train, render_train)
    )
    with progress("models") as meter:
        done = -1

        def watch(name: str) -> None:
            nonlocal done
            done += 1
            meter.update("training", done, None, name)

        def keep(result: Result) -> None:
            if out is not None:
                write_json(out, finite(result))

        result = measure(plan, place, watch, keep)

    def draw_measured(result: Result, path: Path) -> None:
        draw(result | {"rows": measured(result["rows"])}, path)

    failed = failures(result)
    finish(result, out, None if len(failed) == len(result["rows"]) else plot, draw_measured, as_json, render)
    if failed:
        raise WorkError(f"{len(failed)} of {len(result['rows'])} rows could not be measured: {failed[0]}")


def failures(result: Result) -> list[str]:
    """A line for each row without figures."""
    return [
        f"{row['recipe']}, depth {row['depth']}, context {row['context']}: {row['error']}"
        for row in result["rows"]
        if "error" in row
    ]


def render_failures(result: Result) -> None:
    for line in dict.fromkeys(failures(result)):
        console().print(f"Failed: {line}", soft_wrap=True, markup=False)


def timed(rows: list[Result]) -> str:
    """How many steps stand behind a time."""
    return f"the median time of a step, of {rows[0]['steps_timed']} timed"


def render_train(result: Result) -> None:
    from rich.table import Table

    from maglev.bench.train import measured

    rows = measured(result["rows"])
    if rows:
        render_machine(result)
    table = Table("model")
    for title in ("depth", "rows", "tokens/s", "MFU", "by SWA", "allowed", "of it", "peak", "memory", "start s"):
        table.add_column(title, justify="right", no_wrap=True)
    beside = {(each["recipe"], each["depth"]): each for each in result["summary"]}
    for row in result["rows"]:
        if "error" in row:
            table.add_row(row["recipe"], str(row["depth"]), str(row["rows"]), "failed")
            continue
        each = beside.get((row["recipe"], row["depth"]), {})
        table.add_row(
            row["recipe"],
            str(row["depth"]),
            str(row["rows"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.1%}",
            *(shown(each.get(key)) for key in ("speed_by_swa", "allowed_by_flops", "of_allowed")),
            memory_shown(row["peak_bytes"]),
            shown(each.get("memory_by_swa")),
            f"{row['start_to_first_step_s']:.1f}",
        )
    console().print(table)
    render_failures(result)
    if not rows:
        return
    for title, key in (("part", "ms_by_part"), ("kind of op", "ms_by_op")):
        render_split(title, [(f"{row['recipe']} d{row['depth']}", row[key]) for row in rows if row[key]])
    for line in dict.fromkeys(row["attention"] for row in rows):
        models = dict.fromkeys(row["recipe"] for row in rows if row["attention"] == line)
        console().print(f"{', '.join(models)}: {line}.", soft_wrap=True)
    console().print(
        f"FLOPs: {result['flop_convention']}. 'tokens/s': by {timed(rows)}. 'MFU': of the matrix product's rate in "
        "this run. 'allowed': SWA's FLOPs by the model's; 'of it': the speed beside that. 'memory': peak by SWA's. "
        "'start': from the start of the process to the end of its first step, with nothing compiled before.",
        soft_wrap=True,
    )


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def render_split(title: str, splits: list[tuple[str, dict[str, float]]]) -> None:
    from rich.table import Table

    if not splits:
        return
    table = Table(f"ms of a step, by {title}")
    for name in splits[0][1]:
        table.add_column(name, justify="right")
    for label, times in splits:
        table.add_row(label, *(f"{value:.2f}" for value in times.values()))
    console().print(table)


def render_scaling(result: Result) -> None:
    from rich.table import Table

    from maglev.bench.train import measured

    rows = measured(result["rows"])
    if rows:
        render_machine(result)
    table = Table("model", "along")
    for title in ("depth", "rows", "context", "ms", "us/token", "MFU", "peak"):
        table.add_column(title, justify="right")
    for row in result["rows"]:
        sizes: list[Any] = [row["depth"], row["rows"], row["context"]]
        if "error" in row:
            table.add_row(row["recipe"], row["axis"], *map(str, sizes), "failed")
            continue
        table.add_row(
            row["recipe"],
            row["axis"],
            *map(str, sizes),
            f"{row['seconds_per_step'] * 1e3:.1f}",
            f"{1e6 / row['tokens_per_s']:.3f}",
            f"{row['mfu']:.1%}",
            memory_shown(row["peak_bytes"]),
        )
    console().print(table)
    render_failures(result)
    if rows:
        console().print(f"'ms': {timed(rows)}.")
    for each in result["summary"]:
        larger = f"{each['larger']:g} x"
        console().print(
            f"{each['recipe']}: {larger} {each['axis']} cost {each['cost_by_size']:.3f} of {larger} the time "
            f"(counted FLOPs: {each['flops_by_size']:.3f}).",
            soft_wrap=True,
        )
