"""What lies in a run folder, for everything that reads one."""

import json
from pathlib import Path
from typing import Any

from maglev.config import RunConfig, SeparateMaglevConfig
from maglev.errors import RequestError

CONFIG, TOKENIZER, METRICS = "config.json", "tokenizer.json", "metrics.jsonl"
# what the tokens of a run on the recall task mean: in place of the tokenizer, or with it where text holds the needles
RECALL = "recall.json"
BAD_BATCHES = "bad-batches"
# what an exported configuration says it is of
MODEL_TYPE = "maglev"
# weights that come with the package, exported folders by name
SHIPPED = Path(__file__).parent / "weights"


def shipped_names() -> list[str]:
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def run_folder(name: str | Path) -> Path:
    """A folder by its path, or, where there is none, the weights of that name that come with the package."""
    path = Path(name)
    return SHIPPED / path if not path.exists() and str(path) in shipped_names() else path


def is_shipped(run: Path) -> bool:
    """Whether it lies in the package: that is read and never written to."""
    return run.resolve().parent == SHIPPED.resolve()


def read_config(run: Path) -> RunConfig:
    """Of a run folder, or of an exported one, whose configuration holds the run's."""
    file = Path(run) / CONFIG
    if not file.is_file():
        if not Path(run).exists() and str(run) in shipped_names():
            raise RequestError(
                f"{run} comes with maglev and is no run folder; 'maglev export {run} OUT' makes a folder to name here"
            )
        raise RequestError(f"{run} is not a run folder, it has no {CONFIG}; name one that 'maglev train' made")
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise RequestError(f"{file} is damaged ({error}); name another run") from None
    if isinstance(value, dict) and "model_type" in value:
        if value["model_type"] != MODEL_TYPE:
            raise RequestError(f"{run} holds a model of type {value['model_type']!r}; name a run or an export of one")
        value = value.get("run")
    if not isinstance(value, dict) or not all(isinstance(part, dict) for key, part in value.items() if key != "recipe"):
        raise RequestError(f"{file} is damaged (not an object of sections); name another run")
    try:
        return RunConfig.from_dict(value)
    except RequestError as error:
        raise RequestError(f"{file}: {error}") from None


def teacher_of(config: RunConfig) -> str:
    """The folder of the frozen model that serves as Q; empty where Q is trained, or there is none."""
    return config.objective.prefiller_from if isinstance(config.objective, SeparateMaglevConfig) else ""


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a line that a kill cut short is left out."""
    file = Path(run) / METRICS
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
