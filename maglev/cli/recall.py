"""`maglev eval recall`: train a recipe on the recall task, or take a run that was, and measure it by distance."""

import dataclasses
import math
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson, Device
from maglev.cli.output import check_place, console, emit, keep, progress, say
from maglev.cli.train import watching
from maglev.errors import RequestError

if TYPE_CHECKING:
    from maglev.config import RunConfig
    from maglev.data.recall import RecallConfig
    from maglev.data.shards import TokenData

STEPS, DEPTH, WINDOW, CONTEXT = 2000, 4, 16, 1024
ROWS_PER_STEP = 64
# that are measured
ROWS = 256
# of the last validation: what a disturbance of the memory comes to, and how much of K/V is memory
LOOP = ("contraction_pass", "contraction_step", "disturbance_left", "disturbance_steps", "memory_share")
# of a rollout, in layers x W
REACHES = 4
# what these say is where and how a run goes, not what it is
UNTOLD = {"train.device", "train.tensorboard", "train.threads", "train.rows_per_pass", "train.compile", "train.graphs"}
UNTOLD |= {f"train.{name}" for name in ("checkpoint_every", "validate_every", "validation_rows", "log_every")}


def recall(
    run_or_recipe: Annotated[
        str,
        typer.Argument(metavar="RUN_OR_RECIPE", help="A recipe to train on the task, or a run that was."),
    ],
    steps: Annotated[int | None, typer.Option("--steps", help=f"Training steps. [default: {STEPS}]")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of weights and rows. [default: 0]")] = None,
    depth: Annotated[int | None, typer.Option("--depth", help=f"Layers. [default: {DEPTH}]")] = None,
    window: Annotated[int | None, typer.Option("--window", help=f"W of sliding layers. [default: {WINDOW}]")] = None,
    context: Annotated[
        int | None, typer.Option("--context", help=f"Tokens of a row. [default: {CONTEXT}, or the run's]")
    ] = None,
    pairs: Annotated[int | None, typer.Option("--pairs", help="Pairs to remember. [default: 4, or the run's]")] = None,
    variant: Annotated[
        str | None, typer.Option("--variant", help="pairs, overwrite, copy or needles. [default: pairs, or the run's]")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="The text of needles, from 'maglev data prepare'."),
    ] = None,
    query_share: Annotated[
        float | None,
        typer.Option("--query-share", help="Share of places with a question. [default: 0.75, or the run's]"),
    ] = None,
    spread: Annotated[
        str | None, typer.Option("--spread", help="Questions by distance: even or log. [default: even, or the run's]")
    ] = None,
    keys: Annotated[int | None, typer.Option("--keys", help="Different keys. [default: 32]")] = None,
    values: Annotated[int | None, typer.Option("--values", help="Different values. [default: 32]")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of a recipe.")
    ] = None,
    rates: Annotated[float | None, typer.Option("--rates", help="All learning rates times this. [default: 1]")] = None,
    rows: Annotated[int, typer.Option("--rows", help="Rows to measure on; fewer are not kept in the run.")] = ROWS,
    passes: Annotated[int | None, typer.Option("--passes", help="Of refined memories. [default: 3]")] = None,
    device: Device = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", help="The run folder of a recipe; one begun there goes on.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option("--results", metavar="FILE", help="A JSON file to add the rows to.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Of all rows of FILE. [default: RUN/recall.svg]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recall beyond the window, by distance and memory source.

    The defaults are for a GPU; a CPU does '--depth 2 --window 8 --context 64 --steps 600' in some minutes.
    With '--variant needles --data DIR' the pairs lie in real text, and a run trained on text can be asked as well.
    """
    from maglev.cli.runs import is_recipe
    from maglev.data.recall import RecallConfig
    from maglev.evaluate.recall_results import read_rows
    from maglev.plots import check_plot
    from maglev.runs import RECALL
    from maglev.train.distributed import read_place

    for name, number in (("--rows", rows), ("--passes", 1 if passes is None else passes)):
        if number < 1:
            raise RequestError(f"{name} is {number}; it must be at least 1")
    if context is not None and context < 1:
        raise RequestError(f"--context is {context}; it must be at least 1")
    if results is not None:
        read_rows(results)
        check_place("--results", results)
    if plot is not None:
        check_plot(plot)
        check_place("--plot", plot)
    asked: dict[str, Any] = {"variant": variant, "pairs": pairs, "query_share": query_share, "spread": spread}
    asked |= {"keys": keys, "values": values}
    task_changes = {name: value for name, value in asked.items() if value is not None}
    new = is_recipe(run_or_recipe)
    if new:
        task = RecallConfig(**task_changes)
        text = open_text(task, data, None)
        numbers = {"depth": depth, "steps": steps, "seed": seed, "window": window, "context": context}
        run = train_on(run_or_recipe, task, text, numbers, rates, settings or [], device, out)
        if read_place(os.environ)[0]:
            return
    else:
        training: dict[str, Any] = {"steps": steps, "seed": seed, "depth": depth, "window": window}
        training |= {"rates": rates, "set": settings or None, "out": out}
        run = Path(run_or_recipe)
        # a run on text knows all words alike
        training |= {"keys": keys, "values": values} if (run / RECALL).exists() else {}
        for name, given in training.items():
            if given is not None:
                raise RequestError(f"{run_or_recipe} is a run and only measured; leave --{name} away")
        task = task_of(run, task_changes)
        text = open_text(task, data, run)
    value = measure(run, task, text, None if new else context, rows, passes, device)
    # a part of the rows is no result to keep
    if rows >= ROWS:
        keep(run, kept_name(value), value)
    emit(write_down(value, run, results, plot, rows), as_json, render)


def kept_name(value: dict[str, Any]) -> str:
    """Of the file in the run's folder: other questions take no other's place."""
    from maglev.data.recall import RecallConfig
    from maglev.evaluate.memories import DEFAULT_PASSES

    task, usual = value["task"], RecallConfig().to_dict()
    words = [task["variant"], task["pairs"], value["context"]]
    words += [f"{key}-{task[key]}" for key in ("query_share", "spread", "keys", "values") if task[key] != usual[key]]
    rows = value["rows"]
    passes = next((row["passes"] for row in rows if row["passes"]), None)
    words += [f"passes-{passes}"] if passes not in (None, min(DEFAULT_PASSES, value["context"])) else []
    words += [rows[0]["data"]] if "data" in rows[0] else []
    return "-".join(["recall", *map(str, words)])


def default_settings(context: int, window: int, steps: int, seed: int, tokens_per_step: int = 0) -> dict[str, Any]:
    """Of the task. Rates of a recipe are given for 524,288 tokens per step and shrink with the root of it; here they
    are meant as they stand, and smaller: with those of text the lifted memories stay at one in `pairs`."""
    from maglev.train.param_groups import REFERENCE_TOKENS_PER_STEP

    tokens = tokens_per_step or ROWS_PER_STEP * context
    whole = (REFERENCE_TOKENS_PER_STEP / tokens) ** 0.5
    return {
        "model.context": context,
        "model.window": window,
        "train.steps": steps,
        "train.seed": seed,
        "train.tokens_per_step": tokens,
        # what a machine that goes down may cost
        "train.checkpoint_every": max(1, -(-steps // 8)),
        # half-way and at the end: whether the loop holds
        "train.validate_every": max(1, steps // 2),
        "train.log_every": max(1, steps // 200),
        "train.tensorboard": "false",
        "optimizer.matrix_lr": 0.006 * whole,
        "optimizer.embedding_lr": 0.1 * whole,
        "optimizer.readout_lr": 0.0012 * whole,
        "optimizer.gate_lr": 0.0012 * whole,
        "optimizer.residual_scale_lr": 0.0015 * whole,
        "optimizer.input_scale_lr": 0.006 * whole,
        "optimizer.weight_decay": 0.01,
        "optimizer.warmup_steps": 20,
    }


def rollouts_of(recipe: str, depth: int, window: int, context: int) -> dict[str, Any]:
    """Of a recipe that has them: as far as the windows reach, four times over, since memory is all that the task is
    about. What they teach then holds over several times that."""
    from maglev.config import ClosedMaglevConfig
    from maglev.recipes import RECIPES, run_config

    if recipe not in RECIPES or not isinstance(run_config(recipe, depth, {}).objective, ClosedMaglevConfig):
        return {}
    return {"objective.rollout": max(1, min(REACHES * depth * window, context // 2))}


def train_on(
    recipe: str,
    task: "RecallConfig",
    text: "TokenData | None",
    numbers: dict[str, int | None],
    rates: float | None,
    assignments: list[str],
    device: str,
    out: Path | None,
) -> Path:
    """To the end; the run folder then. What was begun there goes on, what is finished is left as it is."""
    from maglev.settings import parse_assignments
    from maglev.train import launch
    from maglev.train.distributed import SaidElsewhere, read_place
    from maglev.train.task import Recall
    from maglev.values import parse_value

    defaults = {"depth": DEPTH, "steps": STEPS, "seed": 0, "window": WINDOW, "context": CONTEXT}
    chosen = {name: defaults[name] if value is None else value for name, value in numbers.items()}
    for name in ("steps", "depth"):
        if chosen[name] < 1:
            raise RequestError(f"--{name} is {chosen[name]}; it must be at least 1")
    if rates is not None and not 0 < rates < float("inf"):
        raise RequestError(f"--rates is {rates}; it must be above 0")
    given: dict[str, Any] = dict(parse_assignments(assignments))
    for key in ("model.context", "model.window", "model.depth", "train.steps", "train.seed"):
        if key in given:
            raise RequestError(f"--set {key} is --{key.split('.')[1]} here; use that")
    key = "train.tokens_per_step"
    tokens = parse_value(key, given.get(key, 0), int)
    if tokens < 0:
        raise RequestError(f"{key} is {tokens}; it must be at least 1")
    depth = chosen.pop("depth")
    settings = default_settings(**chosen, tokens_per_step=tokens) | {"train.device": device}
    settings |= rollouts_of(recipe, depth, chosen["window"], chosen["context"])
    settings |= {key: value * (rates or 1) for key, value in settings.items() if key.endswith("_lr")} | given
    run = out or Path("runs") / f"recall-{recipe}-{task.variant}-{task.pairs}-seed{chosen['seed']}"
    rank = read_place(os.environ)[0]
    try:
        with watching(recipe, rank) as watch:
            summary = launch.train(recipe, Recall(task, text), run, watch, depth=depth, settings=settings, resume=True)
    except SaidElsewhere as error:
        raise typer.Exit(error.status) from None
    if summary["signal"]:
        if rank == 0:
            say("go on with the same command")
        raise typer.Exit(128 + summary["signal"])
    return run


def task_of(run: Path, changes: dict[str, Any]) -> "RecallConfig":
    """What a run is asked: otherwise than in training, if wanted, but in the same tokens."""
    from maglev.data.recall import RecallConfig
    from maglev.evaluate.runs import read_recall
    from maglev.runs import RECALL, read_config

    read_config(run)
    if changes.get("variant") == "needles" and not (run / RECALL).exists():
        return RecallConfig(**changes)
    trained = read_recall(run)
    task = dataclasses.replace(trained, **changes)
    if "needles" in (trained.variant, task.variant) and trained.variant != task.variant:
        raise RequestError(
            f"{run} was trained on {trained.variant} and does not know the tokens of {task.variant}; "
            f"leave --variant away, or name another run"
        )
    return task


def open_text(task: "RecallConfig", data: Path | None, run: Path | None) -> "TokenData | None":
    """Of needles; it has to speak the run's tokens."""
    from maglev.data.shards import open_data
    from maglev.evaluate.runs import open_matching_data

    if task.variant != "needles":
        if data is not None:
            raise RequestError(f"--data goes with --variant needles, not with {task.variant}; leave it away")
        return None
    if data is None:
        raise RequestError("needles are planted in text; add --data DIR, a folder that 'maglev data prepare' made")
    return open_data(data) if run is None else open_matching_data(run, data)


def measure(
    run: Path,
    task: "RecallConfig",
    text: "TokenData | None",
    context: int | None,
    count: int,
    passes: int | None,
    device: str,
) -> dict[str, Any]:
    """Every memory source that the run has."""
    from maglev.data.needles import NeedleRows, recall_rows
    from maglev.evaluate.memories import DEFAULT_PASSES
    from maglev.evaluate.needles import gain_rows, needle_gains
    from maglev.evaluate.recall import plain_reach, recall_sources
    from maglev.evaluate.recall import recall as measure_recall
    from maglev.evaluate.recall_results import result_rows
    from maglev.evaluate.runs import has_prefiller, load_objective
    from maglev.runs import RECALL, read_metrics
    from maglev.train.distributed import resolve_device

    place = resolve_device(device, setting="--device")
    config, objective, step = load_objective(run, place, say, with_prefiller=has_prefiller(run, say))
    rows = recall_rows(task, "validation", context or config.model.context, 0, text)
    if text is None and task.vocab_size > config.model.vocab_size:
        raise RequestError(
            f"the task has {task.vocab_size} tokens and {run} knows {config.model.vocab_size}; its {RECALL} is damaged"
        )
    # after as many passes as there are positions all of them are exact
    number = min(DEFAULT_PASSES if passes is None else passes, rows.context)
    reach = plain_reach(config.model)
    found, gains = [], dict[tuple[str, str], dict[str, Any]]()
    with progress("rows") as meter:
        for source in recall_sources(objective):
            show = partial(meter.update, f"recall, {source}")
            found.append(measure_recall(objective, rows, source, passes=number, count=count, progress=show))
            if isinstance(rows, NeedleRows):
                show = partial(meter.update, f"without a needle, {source}")
                answers = needle_gains(objective, rows, source, passes=number, count=count, progress=show)
                gains |= gain_rows(answers, source, reach)
    metrics = [row for row in read_metrics(run) if row["step"] <= step]
    seconds = next((row["seconds"] for row in reversed(metrics) if row["kind"] == "train"), 0.0)
    loop: dict[str, Any] = next((row for row in reversed(metrics) if "contraction_step" in row), {})
    on_text = not (run / RECALL).exists()
    table = result_rows(
        config,
        task,
        rows.context,
        found,
        steps=step,
        seconds=seconds,
        rows=None if count == ROWS else count,
        settings=changed_settings(config, on_text),
        trained=trained_otherwise(run, config, task, rows.context),
        text={"data": text.folder.resolve().name, "trained_on": "text" if on_text else "needles"} if text else {},
        gains=gains,
        loop={key: loop[key] for key in LOOP if key in loop},
    )
    if all(math.isnan(result.beyond_reach) for result in found):
        say(f"nothing is asked beyond the plain reach of {reach} tokens; a larger --context does")
    facts = {"run": str(run), "recipe": config.recipe, "seed": config.train.seed, "step": step}
    facts |= {"task": task.to_dict(), "context": rows.context, "window": config.model.window}
    facts |= {"depth": config.model.depth, "reach": reach, "chance": task.chance}
    facts["loop"] = {key: loop[key] for key in LOOP if key in loop}
    return facts | {f"recall_{result.source}": result.beyond_reach for result in found} | {"rows": table}


def trained_otherwise(run: Path, config: "RunConfig", task: "RecallConfig", context: int) -> dict[str, Any]:
    """In what a run's own task differs from the one that it is asked."""
    from maglev.evaluate.runs import read_recall
    from maglev.runs import RECALL

    if not (run / RECALL).exists():
        return {}
    own, asked = read_recall(run).to_dict() | {"context": config.model.context}, task.to_dict() | {"context": context}
    return {key: value for key, value in own.items() if value != asked[key]}


def changed_settings(config: "RunConfig", on_text: bool = False) -> dict[str, Any]:
    """In what the run differs from its recipe on this task, or on text."""
    from maglev.recipes import RECIPES, run_config
    from maglev.settings import setting_values

    if config.recipe not in RECIPES:
        return {}
    model, train = config.model, config.train
    defaults = default_settings(model.context, model.window, train.steps, train.seed, train.tokens_per_step)
    if on_text:
        defaults = {key: value for key, value in defaults.items() if not key.startswith("optimizer.")}
    else:
        defaults |= rollouts_of(config.recipe, model.depth, model.window, model.context)
    whole = default_settings(model.context, model.window, train.steps, train.seed)
    plain = run_config(config.recipe, model.depth, defaults | {"model.vocab_size": model.vocab_size})
    usual = setting_values(plain) | {"train.tokens_per_step": whole["train.tokens_per_step"]}
    return {
        key: value for key, value in setting_values(config).items() if key not in UNTOLD and value != usual.get(key)
    }


def write_down(value: dict[str, Any], run: Path, results: Path | None, plot: Path | None, count: int) -> dict[str, Any]:
    """A figure of other rows than the usual ones takes no other's place."""
    from maglev.evaluate.recall_results import add_rows, draw_rows

    rows = add_rows(results, value["rows"]) if results is not None else value["rows"]
    place = plot or run / ("recall.svg" if count == ROWS else f"recall-{count}-rows.svg")
    try:
        draw_rows(place, rows if plot else value["rows"])
    except RequestError as error:
        if plot:
            raise
        say(str(error))
        return value | {"plot": None}
    return value | {"plot": str(place)}


def render(value: dict[str, Any]) -> None:
    from rich.table import Table

    from maglev.evaluate.diagnostics import told_of

    rows, task = value["rows"], value["task"]
    sources = list(dict.fromkeys(row["memory"] for row in rows))
    cells = {(row["distance"], row["memory"]): row for row in rows}
    out = console()
    out.print(
        f"{value['run']} ({value['recipe']}, step {value['step']}, seed {value['seed']}): {task['variant']}, "
        f"{task['pairs']} pairs, context {value['context']}, plain reach {value['reach']}, "
        f"chance {value['chance']:.3f}"
    )
    passes = next((row["passes"] for row in rows if row["passes"]), None)
    names = [f"{source} ({passes} passes)" if source == "refined" else source for source in sources]
    gained = "gain" in rows[0]
    table = Table("distance / reach", "questions", *names, *(f"gain, {source}" for source in sources if gained))
    for distance in dict.fromkeys(row["distance"] for row in rows):
        own = [cells[distance, source] for source in sources]
        gains = [f"{row['gain']:+.4f}" for row in own if gained]
        table.add_row(distance, f"{own[0]['items']:,}", *(f"{row['accuracy']:.3f}" for row in own), *gains)
    beyond = [value[f"recall_{source}"] for source in sources]
    table.add_row("beyond 1", "", *(f"{number:.3f}" for number in beyond), style="bold")
    out.print(table)
    # runs of before have no curve
    if value["loop"].get("disturbance_left"):
        out.print(told_of(value["loop"]))
    if gained:
        out.print(
            "'gain': nats that the value costs more if another needle stood in its place; 0: nothing was remembered",
            soft_wrap=True,
        )
    if value["plot"]:
        out.print(f"plot: {value['plot']}", markup=False)
