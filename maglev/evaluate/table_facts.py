"""What a table is made of: the facts of runs, from their folders or from one JSON file that keeps them. No torch."""

import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from maglev import files
from maglev.config import RunConfig
from maglev.errors import RequestError
from maglev.evaluate.costs import start_costs, training_flops
from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.results import FOLDER, load_results
from maglev.evaluate.table_checks import check_facts
from maglev.model.accounting import BYTES, describe, state_nbytes, training_steps
from maglev.recipes import RECIPES, run_config
from maglev.runs import read_config, read_metrics
from maglev.settings import setting_values
from maglev.values import canonical_json

FORMAT = "maglev-table-1"
# of a run's training, enough to draw
POINTS = 200
# what does not make another row of the table
SECTIONS = ("model.", "objective.", "optimizer.", "data.")
TRAINING = ("train.steps", "train.tokens_per_step", "train.init_from")

Facts = dict[str, Any]


def collect(places: Sequence[Path]) -> list[Facts]:
    """The facts of run folders, of files that `save_facts` wrote, and of files of recall, in the order given. What is
    named twice comes once."""
    found: list[Facts] = []
    seen: dict[str, tuple[str, Facts]] = {}
    for place in places:
        own = load_file(place) if place.is_file() else [facts_of(place)]
        if not own:
            raise RequestError(f"{place} holds no runs; name a file with some, or run folders")
        for run in own:
            name = f"{run['run']} in {place}" if place.is_file() else str(place)
            if not has_lines(run) or is_new(run, name, seen):
                found.append(run)
    return found


def is_new(run: Facts, name: str, seen: dict[str, tuple[str, Facts]]) -> bool:
    """Among those seen, to which it then belongs; another run of the same seed would take its place in the line."""
    first, known = seen.setdefault(canonical_json([row_of(run), run["seed"]]), (name, run))
    if known != run:
        raise RequestError(
            f"{first} and {name} have the same recipe, settings and seed {run['seed']}, so one line cannot tell them "
            f"apart; leave one of them out, or make a table of each"
        )
    return known is run


def has_lines(run: Facts) -> bool:
    """Runs of recall alone are drawn and have no line."""
    return bool(run["bpb"] or run["tasks"])


def row_of(run: Facts) -> str:
    """What the runs of one line have in common."""
    return canonical_json([run["recipe"], all_settings(run), run.get("stopped_at")])


def all_settings(run: Facts) -> Facts:
    """With those that came after the run was measured, as its recipe has them: until then it could not be otherwise."""
    own = run["settings"]
    if run["recipe"] not in RECIPES:
        return own
    return defaults(run["recipe"], own.get("model.depth")) | own


@cache
def defaults(recipe: str, depth: int | None) -> Facts:
    try:
        values = setting_values(run_config(recipe, depth, {})) if depth else {}
    except RequestError:
        # of a recipe that is there no more as it was
        values = {}
    return {key: value for key, value in values.items() if tells(key)}


def tells(key: str) -> bool:
    """Whether runs that differ in this setting are different lines."""
    return key.startswith(SECTIONS) or key in TRAINING


def load_file(path: Path) -> list[Facts]:
    try:
        value = json.loads(path.read_bytes())
        rows = value["rows"] if isinstance(value, dict) and "format" not in value else []
        is_recall = bool(rows) and all({"distance", "accuracy", "chance", "settings"} <= row.keys() for row in rows)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        is_recall = False
    return [recall_facts(path, rows)] if is_recall else load_facts(path)


def recall_facts(path: Path, rows: list[Facts]) -> Facts:
    """What 'eval recall --results' and `benchmarks/recall.py` keep, of many runs: for the figure, not for a line."""
    unmeasured: Facts = {"bpb": [], "tasks": [], "settings": {}, "seed": 0, "training_flops": 0, "state_bytes": 0}
    return {"run": path.stem, "recipe": "recall", "recall": rows} | unmeasured | training_of([])


def telling_settings(config: RunConfig) -> Facts:
    """What makes a line of its own, with the number of steps that follows from the rest."""
    values = setting_values(config) | {"train.steps": training_steps(config), "train.init_from": start_of(config)}
    return {key: value for key, value in values.items() if tells(key)}


def same_settings(stored: Any, own: Facts) -> bool:
    """As far as both have them: later versions have more."""
    found = as_dict(stored)
    return all(found[key] == own[key] for key in found.keys() & own.keys())


def start_of(config: RunConfig) -> str:
    """The recipe whose weights a run began with: seeds have folders of their own."""
    if not config.train.init_from:
        return ""
    try:
        return read_config(Path(config.train.init_from)).recipe
    except RequestError:
        return "weights that are gone"


def facts_of(run: Path) -> Facts:
    config = read_config(run)
    bpb, tasks, recall = (
        [without_places(result) for result in load_results(run, kind)] for kind in ("bpb", "tasks", "recall")
    )
    tasks = [result for result in tasks if is_in_table(result, config.model.context)]
    if not (bpb or tasks or recall):
        raise RequestError(
            f"{run} has no results yet that a table shows; measure it with 'maglev eval bpb', 'maglev eval tasks' or "
            f"'maglev eval recall'"
        )
    settings = telling_settings(config)
    stopped_at = step_of(run, config.recipe, [*bpb, *tasks], settings["train.steps"])
    steps, began = stopped_at or settings["train.steps"], start_costs(config)
    flops, tokens = training_flops(config, steps), steps * config.train.tokens_per_step
    if began is not None:
        flops, tokens = flops + began[0], tokens + began[1]
    rows = [row for row in read_metrics(run) if row.get("kind") == "train"]
    found = {
        "run": run.name,
        "recipe": config.recipe,
        "seed": config.train.seed,
        "settings": settings,
        "parameters": describe(config)["parameters"]["deployed"],
        "tokens": tokens,
        "training_flops": flops,
        "state_bytes": state_nbytes(config.model, BYTES["bfloat16"]),
        "bpb": bpb,
        "tasks": tasks,
        "recall": [row for result in recall for row in result.get("rows", [None])],
    } | training_of(rows)
    if stopped_at is not None:
        found["stopped_at"] = stopped_at
    if began is None:
        found["without_start"] = True
    try:
        check_facts(found)
    except ValueError as error:
        raise RequestError(f"a result in {run / FOLDER} is damaged ({error}); evaluate the run again") from None
    return found


def step_of(run: Path, recipe: str, results: Sequence[Facts], steps: int) -> int | None:
    """Where all results are of one step before the last, that one; a line of several would be of no model."""
    others = {result["recipe"] for result in results} - {recipe}
    if others:
        raise RequestError(
            f"{run} is a run of {recipe}, and {run / FOLDER} has results of {', '.join(map(str, sorted(others)))}; "
            f"remove them and evaluate the run again"
        )
    found = sorted({result["step"] for result in results if isinstance(result.get("step"), int)})
    if len(found) > 1:
        raise RequestError(
            f"{run} has results of steps {', '.join(map(str, found))}, and a line is of one; evaluate the older again"
        )
    return found[0] if found and found[0] != steps else None


def is_in_table(result: Facts, context: int) -> bool:
    """Some of the paper's tasks, asked as the table's are: without examples and within the context."""
    setting = {"fewshot": None, "max_length": context} | as_dict(result.get("setting"))
    asked = any(task.name in as_dict(result.get("tasks")) for task in TASKS)
    return asked and setting["fewshot"] is None and setting["max_length"] == context


def as_dict(value: Any) -> Facts:
    return value if isinstance(value, dict) else {}


def training_of(rows: Sequence[dict[str, Any]]) -> Facts:
    """By the lines that training logged: its speed, and curves to draw."""
    # the first steps compile
    rates = [row["tokens_per_second"] for row in rows[len(rows) // 2 :] if "tokens_per_second" in row]
    drawn = rows[:: max(1, len(rows) // POINTS)]
    return {
        "train_seconds": rows[-1].get("seconds") if rows else None,
        "tokens_per_second": statistics.median(rates) if rates else None,
        "training": {
            key: [row.get(key) for row in drawn] for key in ("step", "next_token_loss", "consistency_loss", "memory")
        },
    }


def without_places(result: Facts) -> Facts:
    """Where runs and files lay on some machine is no fact of the run."""
    setting = {key: value for key, value in as_dict(result.get("setting")).items() if key != "data"}
    return {key: value for key, value in result.items() if key != "run"} | ({"setting": setting} if setting else {})


def save_facts(path: Path, facts: Sequence[Facts]) -> None:
    files.write_json(path, {"format": FORMAT, "runs": list(facts)})


def load_facts(path: Path) -> list[Facts]:
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}")
        runs = list(value["runs"])
        for run in runs:
            check_facts(run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{path} is no file of table facts ({error}); name run folders, what 'maglev table --save' wrote, or what "
            f"'maglev eval recall --results' wrote"
        ) from None
    return runs
