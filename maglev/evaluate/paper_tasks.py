"""The eight tasks of the paper's table: what the harness calls them, and local files in the columns that it expects.

Prompts, choices and metrics are those of lm-evaluation-harness's own task files; a local file only takes the place of
the Hub's data set. Where its columns differ, they are written anew as the Hub has them, and nothing else is touched.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maglev import files
from maglev.errors import RequestError

Row = dict[str, Any]
Parts = tuple[list[Any], int, list[Any]]
LETTERS = "ABCDEFGH"
PREFIX, SUFFIX = "Question: ", "\nAnswer:"


@dataclass(frozen=True)
class PaperTask:
    # in the harness
    name: str
    # of its definition, in the harness's folder of tasks
    definition: str
    # the split that it scores
    split: str
    # beside the others in a data folder
    file: str
    fields: tuple[str, ...]
    # of the official split
    items: int
    # that the paper reports
    metric: str
    chance: float
    # (choices, index of the right one, other texts) of an item
    parts: Callable[[Row], Parts]
    to_hub: Callable[[Row], Row] = dict


def lambada_parts(row: Row) -> Parts:
    if len(row["continuation"].split(" ")) != 1:
        raise ValueError(f"continuation is {row['continuation'][:40]!r}, not one word")
    return [row["continuation"]], 0, [row["context"]]


def piqa_parts(row: Row) -> Parts:
    return [row["sol1"], row["sol2"]], int(row["label"]), [row["goal"]]


def hellaswag_parts(row: Row) -> Parts:
    return list_of(row, "endings"), int(row["label"]), [row["ctx_a"], row["ctx_b"], row["activity_label"]]


def winogrande_parts(row: Row) -> Parts:
    if "_" not in row["sentence"]:
        raise ValueError("sentence has no _")
    return [row["option1"], row["option2"]], int(row["answer"]) - 1, [row["sentence"]]


def arc_parts(row: Row) -> Parts:
    return list_of(row, "choices"), row["gold"], [row["query"]]


def siqa_parts(row: Row) -> Parts:
    return [row[f"answer{letter}"] for letter in "ABC"], int(row["label"]) - 1, [row["context"], row["question"]]


def boolq_parts(row: Row) -> Parts:
    return ["no", "yes"], int(row["answer"]), [row["passage"], row["question"]]


def list_of(row: Row, name: str) -> list[Any]:
    if not isinstance(row[name], list):
        raise ValueError(f"{name} is no list")
    return list(row[name])


def check_item(choices: list[Any], right: int, others: list[Any]) -> None:
    """A wrong label would be scored as a wrong answer, and nobody would know."""
    if not all(isinstance(text, str) for text in (*choices, *others)) or not all(choices):
        raise ValueError("a text is missing, or is none")
    if not 0 <= right < len(choices):
        raise ValueError(f"the right answer is number {right + 1} of {len(choices)}")


def lambada_row(row: Row) -> Row:
    return {"text": f"{row['context']} {row['continuation']}"}


def arc_row(row: Row) -> Row:
    query, choices = row["query"], row["choices"]
    if not query.startswith(PREFIX) or not query.endswith(SUFFIX):
        raise ValueError(f"query is {query[:40]!r}..., not '{PREFIX}...\\nAnswer:'")
    labels = list(LETTERS[: len(choices)])
    question = query.removeprefix(PREFIX).removesuffix(SUFFIX)
    return {
        "question": question,
        "choices": {"text": choices, "label": labels},
        "answerKey": labels[row["gold"]],
    }


def boolq_row(row: Row) -> Row:
    return {"passage": row["passage"], "question": row["question"], "label": int(row["answer"])}


TASKS = (
    PaperTask(
        "lambada_openai",
        "lambada/lambada_openai.yaml",
        "test",
        "lambada.jsonl",
        ("context", "continuation"),
        5153,
        "acc",
        0.0,
        lambada_parts,
        lambada_row,
    ),
    PaperTask(
        "piqa",
        "piqa/piqa.yaml",
        "validation",
        "piqa.jsonl",
        ("goal", "sol1", "sol2", "label"),
        1838,
        "acc",
        1 / 2,
        piqa_parts,
    ),
    PaperTask(
        "hellaswag",
        "hellaswag/hellaswag.yaml",
        "validation",
        "hellaswag.jsonl",
        ("ctx_a", "ctx_b", "activity_label", "endings", "label"),
        10042,
        "acc_norm",
        1 / 4,
        hellaswag_parts,
    ),
    PaperTask(
        "winogrande",
        "winogrande/default.yaml",
        "validation",
        "winogrande.jsonl",
        ("sentence", "option1", "option2", "answer"),
        1267,
        "acc",
        1 / 2,
        winogrande_parts,
    ),
    PaperTask(
        "arc_easy",
        "arc/arc_easy.yaml",
        "test",
        "arc_easy.jsonl",
        ("query", "choices", "gold"),
        2376,
        "acc",
        1 / 4,
        arc_parts,
        arc_row,
    ),
    PaperTask(
        "arc_challenge",
        "arc/arc_challenge.yaml",
        "test",
        "arc_challenge.jsonl",
        ("query", "choices", "gold"),
        1172,
        "acc_norm",
        1 / 4,
        arc_parts,
        arc_row,
    ),
    PaperTask(
        "social_iqa",
        "siqa/siqa.yaml",
        "validation",
        "siqa.jsonl",
        ("context", "question", "answerA", "answerB", "answerC", "label"),
        1954,
        "acc",
        1 / 3,
        siqa_parts,
    ),
    PaperTask(
        "boolq",
        "super_glue/boolq/default.yaml",
        "validation",
        "boolq.jsonl",
        ("passage", "question", "answer"),
        3270,
        "acc",
        1 / 2,
        boolq_parts,
        boolq_row,
    ),
)
BY_NAME = {task.name: task for task in TASKS}


def read_rows(folder: Path, task: PaperTask, limit: int | None = None) -> list[Row]:
    """The items of a local file as the Hub has them. All of the official split must be there, or all up to `limit`."""
    path = folder / task.file
    if not path.is_file():
        raise RequestError(
            f"{path} does not exist; {task.name} needs it in the folder of --data, or leave --data away for the Hub's"
        )
    rows: list[Row] = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(read_row(line, f"{path}, line {number}", task))
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no UTF-8 text ({error}); bring the file again") from None
    wanted = task.items if limit is None else min(limit, task.items)
    if len(rows) < wanted:
        raise RequestError(
            f"{path} has {len(rows):,} items and {task.name} has {task.items:,}; bring the whole file"
            + (f", or ask for fewer with --limit {len(rows)}" if rows else "")
        )
    if limit is None and len(rows) > wanted:
        raise RequestError(f"{path} has {len(rows):,} items and {task.name} has {task.items:,}; bring the file again")
    return rows


def read_row(line: str, place: str, task: PaperTask) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        raise RequestError(f"{place}: this is no JSON; bring the file again, it may be cut short") from None
    missing = [name for name in task.fields if not isinstance(row, dict) or name not in row]
    if missing:
        raise RequestError(f"{place}: no field {missing[0]!r}; {task.name} needs {', '.join(task.fields)}")
    try:
        check_item(*task.parts(row))
        return task.to_hub(row)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        raise RequestError(f"{place}: {error}; this is not an item of {task.name}") from None


def find_definition(task: PaperTask, harness_tasks: Path) -> Path:
    path = harness_tasks / task.definition
    if not path.is_file():
        raise RequestError(
            f"this lm_eval has no {task.definition} and so no {task.name}; install the version of constraints.txt"
        )
    return path


def write_definition(task: PaperTask, definition: Path, data: Path, out: Path, limit: int | None) -> None:
    """A task file for the harness: its own definition, on the rows of a local file. YAML reads JSON."""
    rows = read_rows(data, task, limit)[:limit]
    content = out / f"{task.name}.jsonl"
    files.write_text(content, "".join(json.dumps(row) + "\n" for row in rows))
    local = {
        "include": str(definition),
        "task": task.name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {task.split: str(content)}, "cache_dir": str(out / "cache")},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        f"{task.split}_split": task.split,
    }
    files.write_json(out / f"{task.name}.yaml", local)
