"""`maglev demo`: a small SWA and a small Maglev on English that every Python carries, side by side, with a report."""

import json
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson
from maglev.cli.output import console, describe_bytes, emit, progress, say
from maglev.cli.train import MeterWatch
from maglev.errors import RequestError

if TYPE_CHECKING:
    from maglev.evaluate.bpb import BitsPerByte
    from maglev.evaluate.report import Report, RunReport

MARKER = "demo.json"
PROMPT = "The function returns"
BASELINE, MAGLEV = "swa-ssss", "maglev-shared-0.1"
LABELS = {BASELINE: "SWA", MAGLEV: "Maglev"}
VOCABULARY = 1024
DEPTH = 3
# the plain reach, 3 x 15 positions, is far inside the context: what lies beyond it only memory can carry
SETTINGS: dict[str, Any] = {
    "model.context": 256,
    "model.window": 16,
    "train.tokens_per_step": 4096,
    "train.steps": 100,
    "train.checkpoint_every": 100,
    "train.validate_every": 20,
    "train.validation_rows": 8,
    # rates are given for 524,288 tokens per step and shrink with the root of it; a short run wants them back
    "optimizer.matrix_lr": 0.2,
    "optimizer.embedding_lr": 2.0,
    "optimizer.readout_lr": 0.03,
    "optimizer.gate_lr": 0.03,
    "optimizer.warmup_steps": 8,
}


@dataclass(frozen=True)
class Measured:
    recipe: str
    run: Path
    results: "dict[str, BitsPerByte]"
    text: str
    state_bytes: int


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything goes.")] = Path("demo"),
    steps: Annotated[int, typer.Option("--steps", help="Training steps of each model.")] = SETTINGS["train.steps"],
    as_json: AsJson = False,
) -> None:
    """Train a small Maglev and a small SWA, compare them, write text, leave a report to look at."""
    began = time.perf_counter()
    if steps < 1:
        raise RequestError(f"--steps is {steps}; it must be at least 1")
    clear(out)
    prepare_text(out)
    measured = [work_on(recipe, out, steps) for recipe in (BASELINE, MAGLEV)]
    from maglev.evaluate.report import write_report

    report = out / "report.html"
    write_report(report, compose(measured, out, time.perf_counter() - began))
    result: dict[str, Any] = {"report": str(report), "seconds": time.perf_counter() - began, "models": {}}
    for entry in measured:
        numbers = {f"bpb_{source}": found.value for source, found in entry.results.items()}
        result["models"][entry.recipe] = numbers | {"state_bytes": entry.state_bytes, "text": entry.text}
    emit(result, as_json, render)


def clear(out: Path) -> None:
    """Begin anew in a folder of an earlier demo; refuse any other that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / MARKER).is_file():
            raise RequestError(f"{out} holds something that is not a demo; choose another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text('{"made_by": "maglev demo"}\n')


def prepare_text(out: Path) -> None:
    from maglev.data.prepare import prepare
    from maglev.data.stdlib_text import documents

    with open(out / "python.jsonl", "w", encoding="utf-8") as file:
        for name, text in documents():
            file.write(json.dumps({"id": name, "text": text}) + "\n")
    with progress("bytes") as meter:
        prepare([str(out / "python.jsonl")], out / "data", vocab_size=VOCABULARY, progress=meter.update)


def work_on(recipe: str, out: Path, steps: int) -> Measured:
    """Train, measure by memory source, write text."""
    import maglev
    from maglev.data.loader import Loader
    from maglev.evaluate.bpb import bits_per_byte
    from maglev.evaluate.memories import sources_of
    from maglev.evaluate.runs import load_objective, open_matching_data
    from maglev.train import launch
    from maglev.train.distributed import resolve_device

    run, data = out / recipe, out / "data"
    with progress("steps") as meter:
        watch = MeterWatch(meter, f"train {LABELS[recipe]}", quiet=False)
        settings = SETTINGS | {"train.steps": steps}
        summary = launch.train(recipe, data, run, watch, depth=DEPTH, settings=settings)
    if not summary["finished"]:
        raise KeyboardInterrupt
    config, objective, _ = load_objective(run, resolve_device("auto"), say)
    tokens = open_matching_data(run, data)
    loader = Loader(tokens, "validation", config.model.context, seed=0, shuffle=False)
    results: dict[str, BitsPerByte] = {}
    with progress("rows") as meter:
        for source in sources_of(objective):
            stage = f"measure {LABELS[recipe]}, {source}"
            results[source] = bits_per_byte(
                objective,
                loader,
                source,
                tokens.tokenizer.token_byte_counts(),
                rows_per_pass=64,
                data=config.data,
                progress=partial(meter.update, stage),
            )
    lm = maglev.load(run)
    state = lm.read(PROMPT)
    text = "".join(lm.generate(state=state, max_tokens=120, temperature=0.7, top_p=0.95, seed=1))
    return Measured(recipe, run, results, text, state.nbytes)


def compose(measured: list[Measured], out: Path, seconds: float) -> "Report":
    import platform

    import torch

    from maglev.evaluate.report import Report, Sample
    from maglev.evaluate.run_report import growth_of
    from maglev.model.accounting import BYTES
    from maglev.runs import read_config

    config = read_config(measured[-1].run).model
    return Report(
        title="Maglev demo: bounded memory, measured in closed loop",
        introduction=(
            "Two small models read the documentation of Python's standard library. Both see only a short window; "
            "Maglev also carries a memory that it rewrites after every token. Its recurrent number is the one that "
            "counts: there it runs on its own memories, as it does when it writes."
        ),
        runs=[run_report(entry) for entry in measured],
        baseline=BASELINE,
        growth=growth_of(config, BYTES["float32"]),
        samples=[Sample(LABELS[entry.recipe], PROMPT, entry.text) for entry in measured],
        facts={
            "Layers, width": f"{config.depth}, {config.width}",
            "Window, context": f"{config.window}, {config.context} tokens",
            "Vocabulary": config.vocab_size,
            "Threads": torch.get_num_threads(),
            "Python, PyTorch": f"{platform.python_version()}, {torch.__version__}",
            "Seconds in all": round(seconds),
        },
        commands=["make demo", f"maglev generate {out / MAGLEV} --prompt '{PROMPT}'"],
    )


def run_report(entry: Measured) -> "RunReport":
    from maglev.evaluate.report import Curve
    from maglev.evaluate.run_report import describe_run

    bits = {
        source: (
            found.value,
            Curve([(first + last) / 2 for first, last, _ in found.by_position], [v for _, _, v in found.by_position]),
        )
        for source, found in entry.results.items()
    }
    return describe_run(entry.run, bits, entry.state_bytes, entry.recipe, LABELS[entry.recipe])


def render(result: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    table = Table("model", "memory", "bits per byte", "state", title="Lower is better; recurrent is what a user gets")
    for recipe, numbers in result["models"].items():
        for key, value in numbers.items():
            if key.startswith("bpb_"):
                source = "none" if recipe == BASELINE else key[4:]
                table.add_row(LABELS[recipe], source, f"{value:.4f}", describe_bytes(numbers["state_bytes"]))
    out.print(table)
    out.print(f"[bold]{LABELS[MAGLEV]} writes[/bold], with its own memories:", highlight=False)
    out.print(PROMPT + result["models"][MAGLEV]["text"], markup=False)
    out.print(f"\nThe report: {result['report']} ({result['seconds']:.0f} s in all)", markup=False)
