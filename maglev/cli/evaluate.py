"""`maglev eval ...`"""

from typing import Annotated, Any

import typer

from maglev.cli.options import AsJson, DataFolder, Device, Memory, Passes, RunArgument, Split, memory_source
from maglev.cli.output import console, emit, keep, progress, say
from maglev.cli.weights import Weights, weight_format
from maglev.errors import RequestError


def bpb(
    run: RunArgument,
    data: DataFolder,
    memory: Memory = "recurrent",
    passes: Passes = None,
    split: Split = "validation",
    rows: Annotated[int, typer.Option("--rows", help="Only so many rows of it; 0 is all.")] = 0,
    rows_per_pass: Annotated[int, typer.Option("--rows-per-pass", help="Sequences at a time.")] = 64,
    weights: Weights = "plain",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Bits per byte by memory source, also by position."""
    from maglev.evaluate.memories import DEFAULT_PASSES

    source = memory_source(memory, passes)
    for name, value, least in (("--rows", rows, 0), ("--rows-per-pass", rows_per_pass, 1)):
        if value < least:
            raise RequestError(f"{name} is {value}; it must be at least {least}")
    stored = weight_format(weights)
    if stored != "plain" and memory == "lifted":
        raise RequestError(
            f"--weights {weights} goes with --memory recurrent or refined, the prefiller of lifted memories is not "
            f"rounded; leave one of them away"
        )
    from maglev.data.loader import Loader
    from maglev.evaluate.bpb import bits_per_byte
    from maglev.evaluate.results import source_name
    from maglev.evaluate.runs import load_objective, open_matching_data
    from maglev.train.distributed import resolve_device

    place = resolve_device(device, setting="--device")
    config, objective, step = load_objective(run, place, say, with_prefiller=memory == "lifted", weights=stored)
    tokens = open_matching_data(run, data)
    loader = Loader(tokens, split, config.model.context, seed=0, shuffle=False)
    with progress("rows") as meter:
        result = bits_per_byte(
            objective,
            loader,
            source,
            tokens.tokenizer.token_byte_counts(),
            passes=DEFAULT_PASSES if passes is None else passes,
            rows=rows,
            rows_per_pass=rows_per_pass,
            data=config.data,
            progress=lambda done, total: meter.update(f"bits per byte, {memory}", done, total),
        )
    facts = {"run": str(run), "recipe": config.recipe, "step": step, "split": split, "weights": weights}
    facts |= {"data": data.resolve().name}
    found = facts | result.to_dict()
    # a part of the rows is no result to put into a table
    if not rows and split == "validation":
        keep(run, f"bpb-{found['data']}-{source_name(found)}", found)
    emit(found, as_json, render)


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    key = f"bpb_{value['memory']}"
    passes = f", {value['passes']} passes" if value["passes"] else ""
    weights = f", {value['weights']} weights" if value["weights"] != "plain" else ""
    out = console()
    out.print(
        f"{value['run']} ({value['recipe']}, step {value['step']}), {value['split']}: "
        f"{value[key]:.4f} bits per byte with {value['memory']} memories{passes}{weights} "
        f"({value['tokens']:,} tokens, {value['bytes']:,} bytes)"
    )
    table = Table("positions", f"bits per byte ({value['memory']})")
    for bucket in value["by_position"]:
        table.add_row(f"{bucket['first']} to {bucket['last']}", f"{bucket[key]:.4f}")
    out.print(table)
