"""`maglev eval tasks` and `maglev eval score`"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson, Device, Memory, Passes, RunArgument, memory_source
from maglev.cli.output import check_place, console, emit, finite, keep, progress, say
from maglev.cli.weights import Weights, weight_format
from maglev.errors import RequestError

if TYPE_CHECKING:
    from maglev.evaluate.harness import TaskSetting
    from maglev.evaluate.requests import Request, Score
    from maglev.evaluate.scoring import ScoringRun

# in scores, by what they know their run again; in no result
IDENTITY = ("settings", "weights_sha256")

ReadingMethod = Annotated[
    str,
    typer.Option("--reading", help="Recurrent memories by passes to the fixed point (parallel), or by steps (step)."),
]
BatchRows = Annotated[int, typer.Option("--batch-rows", help="Continuations side by side, each with a state.")]
BatchTokens = Annotated[int, typer.Option("--batch-tokens", help="Tokens of a batch, padding included.")]


def tasks(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run folder; with --scores the one that they name. For --requests with --max-length, and for their "
            "--scores, prepared data serves as well: all they need is the tokenizer.",
        ),
    ] = None,
    names: Annotated[
        str | None,
        typer.Option("--tasks", help="paper, or names of lm_eval's tasks with commas between them. [default: paper]"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Local files of the paper's tasks. [default: from the Hub]"),
    ] = None,
    requests: Annotated[
        Path | None, typer.Option("--requests", metavar="FILE", help="Only build requests, into this file.")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option("--scores", metavar="FILE", help="Only aggregate what 'maglev eval score' wrote.")
    ] = None,
    memory: Memory = "recurrent",
    passes: Passes = None,
    reading: ReadingMethod = "parallel",
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first items of each task.")] = None,
    fewshot: Annotated[
        int | None, typer.Option("--fewshot", help="Examples before each item. [default: the task's own]")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", help="Tokens to read at most, 0 for any number. [default: the run's context]"),
    ] = None,
    batch_rows: BatchRows = 128,
    batch_tokens: BatchTokens = 32_768,
    weights: Weights = "plain",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The eight tasks of the paper's table, or any of lm-evaluation-harness's.

    Where the harness cannot be installed beside the GPU: build --requests here, 'maglev eval score' them there, and
    aggregate --scores here.
    """
    check_extra()
    if requests is not None and scores is not None:
        raise RequestError("--requests builds and --scores aggregates; give one of them")
    for name, value, least in (("--limit", limit, 1), ("--fewshot", fewshot, 0), ("--max-length", max_length, 0)):
        if value is not None and value < least:
            raise RequestError(f"{name} is {value}; it must be at least {least}")
    if scores is not None:
        given = {"--tasks": names, "--limit": limit, "--fewshot": fewshot, "--max-length": max_length}
        given |= {"--passes": passes, "--memory": None if memory == "recurrent" else memory}
        for name, option in given.items():
            if option is not None:
                raise RequestError(f"{name} was settled when the requests were built and scored; leave it away")
        emit(aggregate(run, scores, data), as_json, render)
        return
    if run is None:
        raise RequestError("no RUN; name the run folder to evaluate")
    setting = setting_for(run, names or "paper", data, limit, fewshot, max_length)
    if requests is not None:
        check_place("--requests", requests)
        emit(build(run, setting, requests), as_json, render_built)
        return
    opened = open_run(run, memory, passes, reading, batch_rows, batch_tokens, weights, device)
    emit(in_one_step(run, setting, opened), as_json, render)


def score(
    run: RunArgument,
    requests: Annotated[Path, typer.Option("--requests", metavar="FILE", help="What 'eval tasks --requests' wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where scores go, for 'eval tasks --scores'.")],
    memory: Memory = "recurrent",
    passes: Passes = None,
    reading: ReadingMethod = "parallel",
    batch_rows: BatchRows = 128,
    batch_tokens: BatchTokens = 32_768,
    weights: Weights = "plain",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Answer requests, token ids to log-probabilities, with the core alone."""
    from maglev.evaluate.requests import load_requests, save_scores
    from maglev.evaluate.runs import weights_digest
    from maglev.evaluate.table_facts import telling_settings
    from maglev.runs import read_config

    asked = load_requests(requests)
    check_place("--out", out)
    opened = open_run(run, memory, passes, reading, batch_rows, batch_tokens, weights, device)
    if opened.tokenizer.fingerprint != asked.tokenizer:
        raise RequestError(f"{requests} was built with another tokenizer than that of {run}; build them with this run")
    began = time.monotonic()
    found = scored(opened, asked.requests)
    seconds = round(time.monotonic() - began, 1)
    identity = {"settings": telling_settings(read_config(run)), "weights_sha256": weights_digest(run, say)}
    save_scores(out, asked, found, opened.facts | identity)
    facts = opened.facts | {"scores": str(out), "count": len(found), "seconds": seconds}
    emit(facts | effort_of(opened), as_json, render_scored)


def effort_of(opened: "ScoringRun") -> dict[str, Any]:
    """How many passes a token took, padding included, and how many tokens had to be stepped."""
    from maglev.evaluate.scoring import RecurrentScorer

    if not isinstance(opened.scorer, RecurrentScorer):
        return {}
    effort = opened.scorer.effort
    return {"passes_per_token": round(effort.passes, 2), "stepped_tokens": effort.stepped}


def check_extra() -> None:
    try:
        import lm_eval
    except ImportError:
        raise RequestError(
            "lm_eval is missing; install the extra 'tasks' of maglev, or build requests on a machine that has it "
            "and answer them here with 'maglev eval score'"
        ) from None
    try:
        import maglev.evaluate.harness  # noqa: F401
    except ImportError as error:
        version = getattr(lm_eval, "__version__", "of another kind")
        raise RequestError(
            f"lm_eval {version} does not fit ({error}); install the version of constraints.txt, or the extra 'tasks'"
        ) from None


def setting_for(
    run: Path, names: str, data: Path | None, limit: int | None, fewshot: int | None, max_length: int | None
) -> "TaskSetting":
    from maglev.evaluate.harness import TaskSetting, task_names
    from maglev.runs import CONFIG, TOKENIZER, read_config

    if max_length is None and (run / TOKENIZER).is_file() and not (run / CONFIG).is_file():
        raise RequestError(f"{run} is no run and so has no context of its own; add --max-length")
    length = read_config(run).model.context if max_length is None else max_length or None
    place = None if data is None else str(data)
    if data is not None and not data.is_dir():
        raise RequestError(f"--data is {data}, which is no folder; name the one with the tasks' jsonl files")
    if data is not None and fewshot:
        raise RequestError(
            f"--fewshot is {fewshot}, and the files of --data hold the asked items alone: examples would be answers; "
            f"leave --data away for the Hub's, which has others"
        )
    return TaskSetting(task_names(names), place, limit, fewshot, length)


def open_run(
    run: Path,
    memory: str,
    passes: int | None,
    reading: str,
    batch_rows: int,
    batch_tokens: int,
    weights: str,
    device: str,
) -> "ScoringRun":
    from maglev.evaluate.scoring import READINGS, Limits, open_scorer
    from maglev.train.distributed import resolve_device

    source = memory_source(memory, passes)
    if reading not in READINGS:
        raise RequestError(f"--reading is {reading!r}; it must be one of {', '.join(READINGS)}")
    for name, value in (("--batch-rows", batch_rows), ("--batch-tokens", batch_tokens)):
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be at least 1")
    if source != "recurrent" and (reading != "parallel" or weights != "plain"):
        raise RequestError(f"--reading and --weights go with --memory recurrent, not with {memory}; leave them away")
    limits = Limits(batch_rows, batch_tokens)
    place = resolve_device(device, setting="--device")
    return open_scorer(
        run,
        place,
        say,
        source=source,
        passes=passes,
        weights=weight_format(weights),
        reading=reading,
        limits=limits,
    )


def in_one_step(run: Path, setting: "TaskSetting", opened: "ScoringRun") -> dict[str, Any]:
    from maglev.evaluate.harness import HarnessLM, evaluate

    model = HarnessLM(opened.tokenizer, partial(scored, opened), setting.max_length, opened.lm)
    with tempfile.TemporaryDirectory() as work:
        found = evaluate(model, setting, Path(work))
    return write_down(run, found, opened.facts, asdict(setting) | {"cut": model.cut})


def scored(opened: "ScoringRun", requests: "Sequence[Request]") -> "list[Score]":
    """The harness shows its own progress before and after this, so ours is here and nowhere else."""
    with progress("requests") as meter:
        stage = f"scoring, {opened.facts['memory']} memories"
        return opened.scorer.score(requests, lambda done, total: meter.update(stage, done, total))


def build(run: Path, setting: "TaskSetting", out: Path) -> dict[str, Any]:
    from maglev.evaluate.harness import build_requests
    from maglev.evaluate.requests import RequestFile, save_requests
    from maglev.evaluate.scoring import run_tokenizer

    tokenizer = run_tokenizer(run)
    with tempfile.TemporaryDirectory() as work:
        found, cut = build_requests(tokenizer, setting, Path(work))
    kept = asdict(setting) | {"cut": cut, "run": str(run)}
    save_requests(out, RequestFile(found, tokenizer.fingerprint, kept))
    contexts = len({request.context for request in found})
    facts = {"requests": str(out), "count": len(found), "contexts": contexts, "cut": cut}
    return facts | {"max_length": setting.max_length, "tasks": list(setting.tasks)}


def aggregate(run: Path | None, scores: Path, data: Path | None) -> dict[str, Any]:
    """RUN and --data stand in where folders have moved since. What is found goes to the run that was scored alone."""
    from maglev.evaluate.harness import HarnessLM, Replay, TaskSetting, evaluate
    from maglev.evaluate.requests import load_scores
    from maglev.evaluate.scoring import run_tokenizer
    from maglev.runs import CONFIG, TOKENIZER

    found = load_scores(scores)
    kept = dict(found.setting)
    try:
        built_for, cut = Path(kept.pop("run")), kept.pop("cut")
        setting = TaskSetting(**kept | {"tasks": tuple(kept["tasks"])})
        for fact in ("run", "recipe", "step", "seed", "memory", "passes", "weights", "dtype"):
            found.model[fact]
        scored_run = Path(found.model["run"])
    except (KeyError, TypeError) as error:
        raise RequestError(
            f"{scores} does not say what was asked of whom ({error}); make it again with 'maglev eval score'"
        ) from None
    # several runs may have answered what was built for one of them
    is_here = (scored_run / TOKENIZER).is_file() or not (built_for / TOKENIZER).is_file()
    folder = run or (scored_run if is_here else built_for)
    setting = setting if data is None else replace(setting, data=str(data))
    tokenizer = run_tokenizer(folder)
    if tokenizer.fingerprint != found.tokenizer:
        raise RequestError(f"{scores} answers requests of another tokenizer than that of {folder}; name its run")
    check_scored(found.model, scores, folder)
    replay = Replay(found)
    with tempfile.TemporaryDirectory() as work:
        results = evaluate(HarnessLM(tokenizer, replay, setting.max_length), setting, Path(work))
    replay.check(tokenizer.fingerprint)
    facts = {key: value for key, value in found.model.items() if key not in IDENTITY}
    facts["run"] = str(folder if (folder / CONFIG).is_file() else scored_run)
    return write_down(folder, results, facts, asdict(setting) | {"cut": cut})


def check_scored(model: dict[str, Any], scores: Path, folder: Path) -> None:
    """A run's folder keeps its own numbers alone; prepared data lends the tokenizer to anybody and keeps nothing."""
    from maglev.evaluate.runs import weights_digest
    from maglev.evaluate.table_facts import same_settings, telling_settings
    from maglev.runs import CONFIG, read_config

    if not (folder / CONFIG).is_file():
        return
    config = read_config(folder)
    same = (model["recipe"], model["seed"]) == (config.recipe, config.train.seed)
    same = same and same_settings(model.get("settings"), telling_settings(config))
    scored = model.get("weights_sha256")
    # a run that was trained on since has other weights, and is the same
    if same and isinstance(scored, list) and (own := weights_digest(folder, say)) is not None:
        same = own[0] != scored[0] or list(own) == scored
    if not same:
        raise RequestError(
            f"{scores} are scores of {model['run']} ({model['recipe']}, seed {model['seed']}), and {folder} is another "
            f"run ({config.recipe}, seed {config.train.seed}); name the one that was scored, or prepared data with its "
            f"tokenizer"
        )


def write_down(run: Path, found: dict[str, Any], facts: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    import lm_eval

    from maglev.evaluate.results import source_name, task_result
    from maglev.runs import CONFIG, read_config

    value: dict[str, Any] = finite(task_result(found, facts, setting | {"lm_eval": lm_eval.__version__}))
    # a part of the items is no result to put into a table, and prepared data is no run
    if setting["limit"] is None and (run / CONFIG).is_file():
        words = ["paper" if f"average_{facts['memory']}" in value else "-".join(setting["tasks"])[:80]]
        # other questions, which take no other's place: the table's are asked without examples and within the context
        if setting["max_length"] != read_config(run).model.context:
            words.insert(0, f"length-{setting['max_length'] or 'any'}")
        if setting["fewshot"] is not None:
            words.insert(0, f"fewshot-{setting['fewshot']}")
        keep(run, "-".join(["tasks", *words, source_name(facts)]), value)
    return value


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    source, setting = value["memory"], value["setting"]
    out = console()
    passes = f", {value['passes']} passes" if value["passes"] else ""
    part = "" if setting["limit"] is None else f", the first {setting['limit']} items of each"
    part += "" if setting["fewshot"] is None else f", {setting['fewshot']} examples before each"
    out.print(
        f"{value['run']} ({value['recipe']}, step {value['step']}): {source} memories{passes}, {value['dtype']}, "
        f"lm_eval {setting['lm_eval']}{part}",
        markup=False,
    )
    if setting["cut"]:
        out.print(f"{setting['cut']:,} requests lost their beginning to --max-length {setting['max_length']}")
    table = Table("task", "items", "metric", f"{source}", "standard error")
    for name, own in value["tasks"].items():
        for key, number in own.items():
            if key == "items" or key.endswith("_stderr") or number is None:
                continue
            error = own.get(f"{key}_stderr")
            shown = "-" if error is None else f"{error:.4f}"
            metric = key.removesuffix(f"_{source}")
            table.add_row(name, f"{own.get('items', 0):,}", metric, f"{number:.4f}", shown)
    average = value.get(f"average_{source}")
    if average is not None:
        error = value.get(f"average_{source}_stderr")
        shown = "-" if error is None else f"{error:.4f}"
        table.add_row("average", "", "accuracy as in the paper", f"{average:.4f}", shown, style="bold")
    out.print(table)


def render_built(value: dict[str, Any]) -> None:
    console().print(
        f"{value['requests']}: {value['count']:,} requests on {value['contexts']:,} contexts "
        f"({value['cut']:,} of them lost their beginning); answer them with 'maglev eval score'",
        markup=False,
    )


def taken(value: dict[str, Any]) -> str:
    if not value.get("passes_per_token"):
        return ""
    stepped = f" and {value['stepped_tokens']:,} single steps" if value["stepped_tokens"] else ""
    return f", {value['passes_per_token']} passes per token{stepped}"


def render_scored(value: dict[str, Any]) -> None:
    console().print(
        f"{value['scores']}: {value['count']:,} scores of {value['run']} with {value['memory']} memories "
        f"in {value['seconds']:,} s{taken(value)}; "
        f"aggregate them with 'maglev eval tasks --scores {value['scores']}'",
        markup=False,
    )
