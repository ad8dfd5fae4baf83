"""Whether the facts of a run are what a table can be made of: they come from files that anybody may have written."""

from typing import Any

from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.recall_results import NEEDED

SOURCES = ("recurrent", "lifted", "refined")
NUMBER = (int, float)
# without which there is no line
KEYS: dict[str, Any] = {
    "run": str,
    "recipe": str,
    "seed": int,
    "settings": dict,
    "training_flops": NUMBER,
    "state_bytes": NUMBER,
    "bpb": list,
    "tasks": list,
    "recall": list,
    "training": dict,
}
CURVES = ("step", "next_token_loss", "consistency_loss", "memory")
METRICS = {task.name: (task.metric,) for task in TASKS} | {"lambada_openai": ("acc", "perplexity")}


def check_facts(run: Any) -> None:
    """ValueError, with what is wrong."""
    require_keys(run, KEYS, "a run")
    if "stopped_at" in run:
        require_keys(run, {"stopped_at": int}, "a run that was not finished")
        require_keys(run["settings"], {"train.steps": int}, f"settings of {run['run']}")
    curves = [run["training"].get(key) for key in CURVES]
    if not all(isinstance(curve, list) for curve in curves) or len({len(curve) for curve in curves}) > 1:
        raise ValueError(f"the training of {run['run']} has no curves of one length")
    for result in run["bpb"]:
        what = f"bits per byte of {run['run']}"
        source = check_measured(result, what)
        require_keys(result, {"data": str, "bytes": int, "by_position": list}, what)
        require_number(result, f"bpb_{source}", what)
        for part in result["by_position"]:
            require_keys(part, {"first": NUMBER, "last": NUMBER}, what)
            require_number(part, f"bpb_{source}", what)
    for result in run["tasks"]:
        what = f"tasks of {run['run']}"
        source = check_measured(result, what)
        require_keys(result, {"tasks": dict}, what)
        for name, metrics in METRICS.items():
            for metric in metrics if name in result["tasks"] else ():
                require_keys(result["tasks"], {name: dict}, what)
                require_number(result["tasks"][name], f"{metric}_{source}", f"{name} of {run['run']}")
    for row in run["recall"]:
        require_keys(row, dict.fromkeys(NEEDED, object), f"recall of {run['run']}")


def check_measured(result: Any, what: str) -> str:
    """-> its memory source"""
    require_keys(result, {"memory": str, "weights": str, "passes": (int, type(None))}, what)
    if result["memory"] not in SOURCES:
        raise ValueError(f"memory in {what} is {result['memory']!r}")
    return str(result["memory"])


def require_keys(value: Any, kinds: dict[str, Any], what: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no object")
    for key, kind in kinds.items():
        if key not in value:
            raise ValueError(f"{what} has no {key!r}")
        if not isinstance(value[key], kind):
            raise ValueError(f"{key} in {what} is {value[key]!r:.60}")


def require_number(value: dict[str, Any], key: str, what: str) -> None:
    """Or null, which is what JSON has for what is no number."""
    require_keys(value, {key: (*NUMBER, type(None))}, what)
