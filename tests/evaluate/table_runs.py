"""Run folders that look measured, for tests of the table."""

import json
from pathlib import Path
from typing import Any

from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.results import save_result
from maglev.recipes import run_config
from maglev.runs import CONFIG


def make_run(folder: Path, recipe: str, seed: int = 0, steps: int = 50, **numbers: float) -> Path:
    """A run folder that was measured; `numbers` are bits per byte by source, an accuracy for all tasks and its
    standard error."""
    run = folder / f"{recipe}-{seed}-{steps}"
    run.mkdir(parents=True)
    settings = {"train.seed": seed, "train.steps": steps, "model.context": 64}
    (run / CONFIG).write_text(json.dumps(run_config(recipe, 2, settings).to_dict()))
    facts: dict[str, Any] = {"recipe": recipe, "step": steps, "weights": "plain", "passes": None}
    for source in ("recurrent", "lifted", "refined"):
        if source in numbers:
            parts = [{"first": 0, "last": 3, f"bpb_{source}": numbers[source], "bytes": 9}]
            value = facts | {
                "memory": source,
                "passes": 3 if source == "refined" else None,
                "data": "fineweb",
                "bytes": 9,
                f"bpb_{source}": numbers[source],
                "by_position": parts,
            }
            save_result(run, f"bpb-fineweb-{source}", value)
    if "accuracy" in numbers:
        own = {task.name: {f"{task.metric}_recurrent": numbers["accuracy"]} for task in TASKS}
        own["lambada_openai"]["perplexity_recurrent"] = 20.0
        if "error" in numbers:
            own["lambada_openai"]["perplexity_recurrent_stderr"] = 3.0
            for task in TASKS:
                own[task.name][f"{task.metric}_recurrent_stderr"] = numbers["error"]
        value = facts | {"memory": "recurrent", "tasks": own, "average_recurrent": numbers["accuracy"]}
        save_result(run, "tasks-paper-recurrent", value)
    rows = [
        {"kind": "train", "step": step, "memory": "lifted" if "maglev" in recipe else "none"}
        | {"next_token_loss": 5 / step, "consistency_loss": 1 / step}
        for step in range(1, 20)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def five_runs(folder: Path) -> list[Path]:
    return [
        make_run(folder, "maglev-shared-0.1", 0, recurrent=1.28, lifted=1.25, accuracy=0.42),
        make_run(folder, "swa-ssss", 0, recurrent=1.30, accuracy=0.40),
        make_run(folder, "swa-ssss", 1, recurrent=1.32, accuracy=0.44),
        make_run(folder, "swa-ssss", 0, 100, recurrent=1.29),
        make_run(folder, "maglev-shared-0.1", 1, recurrent=1.26, lifted=1.24, accuracy=0.46),
    ]


def recall_rows(recipe: str, seed: int = 0) -> list[dict[str, Any]]:
    facts = {"recipe": recipe, "variant": "pairs", "pairs": 4, "chance": 0.03, "memory": "recurrent", "passes": None}
    facts |= {"depth": 2, "window": 8, "context": 64}
    return [
        facts | {"distance": label, "accuracy": 0.5, "items": 9, "settings": {}, "seed": seed}
        for label in ("0-1", "1-2")
    ]
