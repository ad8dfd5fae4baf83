"""A handful of items of each of the paper's tasks, and a scorer that knows their answers."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maglev.data.tokenizer import Tokenizer
from maglev.evaluate.paper_tasks import TASKS
from maglev.evaluate.requests import Request, Score

Row = dict[str, Any]
ITEMS = 3
NOUNS = ("river", "engine", "teacher", "planet", "window", "garden", "signal", "bottle", "castle", "doctor")


def row_of(task: str, index: int) -> Row:
    a, b, c, d = (NOUNS[(index * 3 + shift) % len(NOUNS)] for shift in range(4))
    if task == "lambada_openai":
        return {"context": f'"Look at the {a}," she said, and he turned to the', "continuation": a}
    if task == "piqa":
        return {
            "goal": f"How to clean a {a}?",
            "sol1": f"Use the {b}.",
            "sol2": f"Ask a {c} for it.",
            "label": index % 2,
        }
    if task == "hellaswag":
        endings = [f"walks to the {a}.", f"[title] opens the {b} slowly.", f"sings to a {c}.", f"eats the {d}."]
        context = {"ctx_a": f"A man sits on a {d}.", "ctx_b": "he", "ctx": f"A man sits on a {d}. he"}
        return context | {"activity_label": "Sitting", "endings": endings, "label": str(index % 4)}
    if task == "winogrande":
        sentence = f"The {a} did not fit beside the {b} because the _ was too large."
        return {"sentence": sentence, "option1": a, "option2": b, "answer": str(1 + index % 2)}
    if task.startswith("arc"):
        choices = [f"a {a}", f"the {b} of a {c}", f"two {c}s", f"no {d}", "none"][: 3 + index % 3]
        return {
            "id": str(index),
            "query": f"Question: What moves a {a}?\nAnswer:",
            "choices": choices,
            "gold": index % 3,
        }
    if task == "social_iqa":
        answers = {"answerA": f"find a {a}", "answerB": f"sell the {b}", "answerC": "sleep"}
        return {"context": f"Ada saw a {c}.", "question": "What comes next?", "label": str(1 + index % 3)} | answers
    return {"passage": f"A {a} is not a {b}.", "question": f"is a {a} a {b}", "answer": index % 2 == 0}


def write_tasks(folder: Path, items: int = ITEMS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        lines = [json.dumps(row_of(task.name, index)) for index in range(items)]
        (folder / task.file).write_text("\n".join(lines) + "\n")
    return folder


def letters(text: str) -> str:
    """What is left of a text where spaces and signs do not count, nor brackets, which HellaSwag loses."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\[.*?\]", "", text).lower())


def right_answer(task: str, row: Row) -> tuple[str, str]:
    """(the end of the context, the continuation) of the right answer, from the rows of the file itself."""
    if task == "lambada_openai":
        return row["context"], row["continuation"]
    if task == "piqa":
        return row["goal"], row[f"sol{row['label'] + 1}"]
    if task == "hellaswag":
        return row["ctx"], row["endings"][int(row["label"])]
    if task == "winogrande":
        before, after = row["sentence"].split("_")
        return before + row[f"option{row['answer']}"], after
    if task.startswith("arc"):
        return row["query"], row["choices"][row["gold"]]
    if task == "social_iqa":
        return row["context"] + row["question"], row[f"answer{'ABC'[int(row['label']) - 1]}"]
    return row["passage"] + "Question" + row["question"], "yes" if row["answer"] else "no"


def choices_of(task: str, row: Row) -> tuple[int, int]:
    """(the right one, how many there are)"""
    if task == "lambada_openai":
        return 0, 1
    if task == "hellaswag":
        return int(row["label"]), len(row["endings"])
    if task.startswith("arc"):
        return row["gold"], len(row["choices"])
    if task == "social_iqa":
        return int(row["label"]) - 1, 3
    if task == "winogrande":
        return int(row["answer"]) - 1, 2
    return int(row["label"] if task == "piqa" else row["answer"]), 2


class Oracle:
    """Knows which request of each item is right, and that it must read so in the item's own words. One that is
    `shuffled` is as sure of any of an item's choices, and where there is but one of another item's."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, items: int, shuffled: bool = False) -> None:
        self.tokenizer = tokenizer
        chance = random.Random(0)
        # of every request in order: the right answer, None for a wrong one
        self.expected: list[tuple[str, str] | None] = []
        self.chosen: list[bool] = []
        for task in TASKS:
            lines = (folder / task.file).read_text(encoding="utf-8").splitlines()[:items]
            rows = [json.loads(line) for line in lines]
            for row in rows:
                right, count = choices_of(task.name, row)
                answer = right_answer(task.name, row)
                self.expected += [answer if index == right else None for index in range(count)]
                chosen = chance.randrange(count) if shuffled else right
                known = not shuffled or count > 1 or right_answer(task.name, chance.choice(rows))[1] == answer[1]
                self.chosen += [index == chosen and known for index in range(count)]

    def check(self, request: Request, context: str, continuation: str) -> None:
        read = letters(self.tokenizer.decode(request.context))
        assert any(text.endswith(letters(context)) for text in (read, read.removesuffix("answer"), read[:-1]))
        assert letters(self.tokenizer.decode(request.continuation)) == letters(continuation)

    def __call__(self, requests: Sequence[Request]) -> list[Score]:
        assert len(requests) == len(self.expected)
        for request, right in zip(requests, self.expected, strict=True):
            if right is not None:
                self.check(request, *right)
        return [Score(0.0, True) if chosen else Score(-100.0, False) for chosen in self.chosen]
