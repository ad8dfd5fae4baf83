"""`maglev bench ...`: speed on this machine, beside its measured limits."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson, Device
from maglev.cli.output import check_place, console, describe_bytes, emit, finite, progress, say
from maglev.cli.weights import weight_format
from maglev.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from maglev.inference import LanguageModel
    from maglev.model.decoder import Decoder

Depth = Annotated[int | None, typer.Option("--depth", help="Layers, width 64 x that; 20, with --quick 2.")]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (bfloat16 on a GPU, else float32), bfloat16 or float32.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny sizes: seconds on a CPU, and no figure to quote.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON there.")]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: .svg, .png or .pdf.")]

Result = dict[str, Any]


def decode(
    depth: Depth = None,
    batches: Annotated[
        str | None, typer.Option("--batches", metavar="N,N...", help="Sequences at once; 1,64,256 unless given.")
    ] = None,
    positions: Annotated[
        str | None,
        typer.Option("--positions", metavar="N,N...", help="Tokens read before; 1000,10000,100000,1000000."),
    ] = None,
    weights: Annotated[
        str, typer.Option("--weights", metavar="NAME,NAME...", help="Of the fast steps: plain, int8, fp8.")
    ] = "plain",
    device: Device = "auto",
    dtype: Dtype = "auto",
    quick: Quick = False,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What one token costs: SWA and Maglev with random weights, beside the bandwidth of a copy."""
    check_files(out, plot)
    from maglev.bench.decode import decode_plan, measure_decode
    from maglev.bench.figures import plot_decode

    plan = decode_plan(
        quick,
        depth=depth,
        batches=whole_numbers("--batches", batches),
        positions=whole_numbers("--positions", positions),
        weights=tuple(weight_format(each) for each in weights.split(",")),
    )
    place, precision = resolve(device, dtype)
    done = 0
    with progress("measurements") as meter:

        def watch(row: Result) -> None:
            nonlocal done
            done += 1
            meter.update("decoding", done, plan.measurements, f"{row['model']}, {described(row)}, batch {row['batch']}")

        result = measure_decode(plan, place, precision, watch)
    finish(result, out, plot, plot_decode, as_json, render_decode)


def read(
    run_or_recipe: Annotated[
        str, typer.Argument(metavar="[RUN_OR_RECIPE]", help="A run, read until it settles, or a recipe.")
    ] = "maglev-shared-0.1",
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Length of the prompt; 16384 unless given, with --quick 100.")
    ] = None,
    passes: Annotated[
        int | None,
        typer.Option("--passes", help="Always so many per block; a recipe's random weights have 4 unless given."),
    ] = None,
    block: Annotated[int | None, typer.Option("--block", help="Positions of a block; a window unless given.")] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", help="Blocks that a pass goes over, 4 unless given; 1: one after another.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", help="Every so-many-th position of a block at a time; all at once unless given."),
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", metavar="FILE", help="What a run reads; Python's docs unless given.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Prepared data whose held-out text a run reads.")
    ] = None,
    depth: Depth = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quick: Quick = False,
    out: Out = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """What reading a prompt in parallel costs, beside the matrix rate and beside stepping the same tokens."""
    check_files(out, plot)
    from maglev.bench.figures import plot_read
    from maglev.bench.read import PASSES, measure_read, read_plan
    from maglev.cli.runs import is_recipe
    from maglev.runs import run_folder

    random = is_recipe(run_or_recipe)
    passes = PASSES if random and passes is None else passes
    plan = read_plan(quick, tokens=tokens, passes=passes, block=block, blocks=blocks, stride=stride)
    place, precision = resolve(device, dtype)
    if random:
        for option, given in (("--prompt-file", prompt_file), ("--data", data)):
            if given is not None:
                raise RequestError(f"{option} is for a run; a recipe's random weights read random tokens")
        name, decoder, prompt = random_reader(run_or_recipe, depth, place, precision, quick, plan.tokens)
        facts = {"weights": "random", "text": "random tokens"}
    else:
        if depth is not None:
            raise RequestError(f"{run_or_recipe} is a run, its depth is fixed; leave --depth away")
        if prompt_file is not None and data is not None:
            raise RequestError("--prompt-file and --data exclude each other; give one of them")
        run = run_folder(run_or_recipe)
        name, lm = trained_reader(run, place, precision)
        facts = {"weights": "trained", "text": prompt_file or "Python's own documentation"}
        if data is None:
            decoder, prompt = lm.decoder, prompt_of(lm, prompt_file, plan.tokens)
        else:
            decoder, prompt = lm.decoder, held_out_prompt(run, data, plan.tokens).to(place)
            facts["text"] = f"held-out text of {data.resolve().name}"
    with progress() as meter:
        result = measure_read(name, decoder, prompt, plan, watch=lambda stage: meter.update(stage, 0), **facts)
    finish(result, out, plot, plot_read, as_json, render_read)


def check_files(out: Path | None, plot: Path | None) -> None:
    """Minutes of measuring are not to end in a name that cannot be written."""
    from maglev.plots import check_plot

    if plot is not None:
        check_plot(plot)
    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None:
            check_place(option, path)


def whole_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise RequestError(f"{option} is {text!r}; it must be whole numbers with commas between them") from None


def resolve(device: str, dtype: str) -> "tuple[torch.device, torch.dtype]":
    import torch

    from maglev.train.distributed import resolve_device

    place = resolve_device(device, setting="--device")
    if dtype == "auto":
        return place, torch.bfloat16 if place.type == "cuda" else torch.float32
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in known:
        raise RequestError(f"--dtype is {dtype!r}; it must be one of auto, {', '.join(known)}")
    return place, known[dtype]


def random_reader(
    recipe: str, depth: int | None, device: "torch.device", dtype: "torch.dtype", quick: bool, length: int
) -> "tuple[str, Decoder, Tensor]":
    import torch

    from maglev.bench.clock import measuring_on
    from maglev.bench.models import QUICK, QUICK_DEPTH, random_decoder
    from maglev.recipes import PAPER_DEPTH, run_config

    standard = QUICK_DEPTH if quick else PAPER_DEPTH
    config = run_config(recipe, standard if depth is None else depth, QUICK if quick else {}).model
    with measuring_on(device):
        decoder = random_decoder(config, device, dtype)
        return recipe, decoder, torch.randint(config.vocab_size, (1, length), device=device)


def trained_reader(run: Path, device: "torch.device", dtype: "torch.dtype") -> "tuple[str, LanguageModel]":
    import maglev
    from maglev.runs import read_config

    return read_config(run).recipe, maglev.load(run, device=str(device), dtype=dtype, report=say)


def held_out_prompt(run: Path, folder: Path, length: int) -> "Tensor":
    """The first held-out documents one after another, each with its BOS, (1, T)."""
    import numpy as np
    import torch

    from maglev.evaluate.runs import open_matching_data

    split = open_matching_data(run, folder).splits["validation"]
    if split.tokens < length:
        raise RequestError(
            f"--tokens is {length:,}, and the held-out text of {folder} has {split.tokens:,}; ask for fewer"
        )
    parts, wanted = [], length
    for shard in split.shards:
        parts.append(shard.tokens[:wanted])
        wanted -= len(parts[-1])
        if not wanted:
            break
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))[None]


def prompt_of(lm: "LanguageModel", prompt_file: str | None, length: int) -> "Tensor":
    """BOS and the first tokens of a text, (1, T); fewer than asked for where the text is shorter."""
    import torch

    from maglev.cli.generate import read_prompt
    from maglev.data.stdlib_text import documents

    texts = (text for _, text in documents()) if prompt_file is None else iter([read_prompt(None, prompt_file)])
    tokens = [lm.tokenizer.bos_id]
    for text in texts:
        tokens += lm.tokenizer.encode(text)
        if len(tokens) >= length:
            break
    if len(tokens) < length:
        say(f"the text has {len(tokens):,} tokens, fewer than the {length:,} asked for; all of it is read")
    return torch.tensor([tokens[:length]], device=lm.decoder.device)


def finish(
    result: Result,
    out: Path | None,
    plot: Path | None,
    draw: Callable[[Result, Path], None],
    as_json: bool,
    render: Callable[[Result], None],
) -> None:
    from maglev.files import write_json

    if out is not None:
        write_json(out, finite(result))
    if plot is not None:
        draw(result, plot)
    emit(result, as_json, render)


def render_machine(result: Result) -> None:
    size = " --quick: the sizes are too small for figures to quote." if result["quick"] else ""
    console().print(
        f"{result['device']}, {result['dtype']}, depth {result['depth']}: a copy moves "
        f"{result['copy_bytes_per_s'] / 1e9:,.0f} GB/s (read + write), a matrix product reaches "
        f"{result['matrix_flops'] / 1e12:,.2f} TFLOP/s.{size}",
        soft_wrap=True,
    )


def memory_shown(count: int | None) -> str:
    return "-" if count is None else describe_bytes(count)


def described(row: Result) -> str:
    """The way to step, with its weights where they are not the decoder's own."""
    return row["step"] if row["weight_format"] == "plain" else f"{row['step']}, {row['weight_format']}"


def render_decode(result: Result) -> None:
    from rich.table import Table

    render_machine(result)
    table = Table("batch", "step", "model")
    for title in ("ms", "tokens/s", "bytes", "of the copy", "by SWA", "by position", "peak memory"):
        table.add_column(title, justify="right")
    for entry in result["summary"]:
        for model in entry["ms"]:
            table.add_row(
                str(entry["batch"]),
                described(entry),
                model,
                f"{entry['ms'][model]:.3f}",
                f"{entry['tokens_per_s'][model]:,.0f}",
                describe_bytes(entry["bytes"][model]),
                f"{entry['share_of_copy'][model]:.1%}",
                f"{entry['ms'][model] / entry['ms']['swa']:.3f}",
                f"{entry['slowest_by_fastest_position'][model]:.3f}",
                memory_shown(entry["peak_bytes"][model]),
            )
    console().print(table)
    positions = ", ".join(f"{at:,}" for at in dict.fromkeys(row["position"] for row in result["rows"]))
    console().print(
        f"Random weights. Medians over positions {positions}; 'by position' is the slowest of them by the fastest. "
        "'bytes': every weight once, as it is stored, and every row's state once; 'of the copy': those per second, by "
        "what a copy moves.",
        soft_wrap=True,
    )


def render_read(result: Result) -> None:
    from rich.table import Table

    render_machine(result)
    table = Table("model", "weights")
    for title in ("tokens", "passes", "stepped", "s", "tokens/s", "of rate", "stepping", "peak"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["model"],
            row["weights"],
            f"{row['tokens']:,}",
            f"{row['passes_per_token']:.2f}",
            f"{row['stepped']:,}",
            f"{row['seconds']:.4f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['share_of_matrix_rate']:.1%}",
            f"{min(row['stepping_by_reading'].values()):.1f}x",
            memory_shown(row["peak_bytes"]),
        )
    console().print(table)
    steps = result["rows"][-1]["steps_timed"]
    console().print(
        f"Read: {result['text']}. 'passes': per token, {result['passes_are']}. 'of rate': their FLOPs per second, "
        "without a readout, by what a matrix product reaches. 'stepping': how many times longer steps would take, the "
        f"fastest that there are, extrapolated from {steps}.",
        soft_wrap=True,
    )
    for row in result["rows"]:
        if distances := row["distance_to_stepping_by_pass"]:
            shown = " ".join(f"{distance:.2g}" for distance in distances)
            told = (
                f"{row['model']}: relative distance from the memories of single steps after 1, 2, ... passes over "
                f"every block: {shown}. What the last ones leave is rounding."
            )
            if row["steps_to_float32"] is not None:
                shown = " ".join(f"{distance:.2g}" for distance in row["distance_to_float32_by_pass"])
                told += (
                    f" From single steps in float32: {shown}; single steps themselves: {row['steps_to_float32']:.2g}."
                )
            console().print(told, soft_wrap=True)
