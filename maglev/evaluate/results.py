"""Results of evaluation in a run's folder, where `maglev table` finds them: RUN/eval/*.json, one file per question."""

import json
import math
import re
from pathlib import Path
from typing import Any

from maglev import files
from maglev.errors import RequestError
from maglev.evaluate.paper_tasks import TASKS

FOLDER = "eval"


def save_result(run: Path, name: str, value: dict[str, Any]) -> Path:
    """The same question again takes the old answer's place."""
    path = run / FOLDER / (re.sub(r"[^A-Za-z0-9._-]+", "-", name) + ".json")
    files.write_json(path, value)
    return path


def load_results(run: Path, kind: str) -> list[dict[str, Any]]:
    """Those whose name begins with `kind`, in the order of their names."""
    found = []
    for path in sorted((run / FOLDER).glob(f"{kind}-*.json")):
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise RequestError(f"{path} cannot be read ({error}); evaluate the run again") from None
        if not isinstance(value, dict) or not isinstance(value.get("recipe"), str):
            raise RequestError(f"{path} is not a result of 'maglev eval'; move it away or evaluate the run again")
        found.append(value)
    return found


def source_name(facts: dict[str, Any]) -> str:
    """`recurrent`, `lifted`, `refined-3`, with the format of rounded weights."""
    words = [facts["memory"], str(facts["passes"]) if facts["passes"] else ""]
    words.append("" if facts["weights"] == "plain" else facts["weights"])
    return "-".join(filter(None, words))


def task_result(found: dict[str, Any], facts: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    """What the harness found, each number under a name that says where its memories came from."""
    source = facts["memory"]
    tasks: dict[str, dict[str, Any]] = {}
    for name, values in found["results"].items():
        own: dict[str, Any] = {"items": found["n-samples"][name]["effective"]} if name in found["n-samples"] else {}
        for key, value in values.items():
            metric, _, filtering = key.partition(",")
            if not filtering or not isinstance(value, int | float):
                continue
            suffix = "" if filtering == "none" else f"_{filtering}"
            if metric.endswith("_stderr"):
                own[f"{metric.removesuffix('_stderr')}{suffix}_{source}_stderr"] = float(value)
            else:
                own[f"{metric}{suffix}_{source}"] = float(value)
        tasks[name] = own
    result = facts | {"setting": setting, "tasks": tasks}
    if all(task.name in tasks for task in TASKS):
        accuracies = [tasks[task.name][f"{task.metric}_{source}"] for task in TASKS]
        result[f"average_{source}"] = sum(accuracies) / len(accuracies)
        errors = [tasks[task.name].get(f"{task.metric}_{source}_stderr") for task in TASKS]
        known = [error for error in errors if error is not None]
        if len(known) == len(TASKS):
            # no two tasks share an item
            result[f"average_{source}_stderr"] = math.hypot(*known) / len(TASKS)
    return result
