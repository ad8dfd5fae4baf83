"""What a run is trained on, as the loop sees it: rows, a file in the run folder that tells them, a validation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from maglev import files
from maglev.config import DataConfig
from maglev.data.loader import Batch, Loader
from maglev.data.needles import recall_rows
from maglev.data.recall import DrawnRows, RecallConfig
from maglev.data.shards import TokenData, fingerprint_of
from maglev.errors import RequestError
from maglev.evaluate.bpb import bits_per_byte
from maglev.evaluate.memories import DEFAULT_PASSES, sources_of
from maglev.evaluate.recall import recall
from maglev.evaluate.runs import check_tokenizer, read_recall
from maglev.objectives import Objective
from maglev.runs import RECALL, TOKENIZER


class Rows(Protocol):
    """Any row by its global index. Two with the same fingerprint give the same rows."""

    fingerprint: str

    @property
    def tokens_per_epoch(self) -> float: ...

    def batch(self, rows: Sequence[int]) -> Batch: ...


class Validation(Protocol):
    """`metric` is the key of a value before its memory source, `words` are the same for people."""

    metric: str
    words: str

    def measure(self, objective: Objective, rows_per_pass: int, data: DataConfig) -> dict[str, float]:
        """By memory source, what a user gets first."""

    def tokens(self, count: int) -> Tensor:
        """Some rows of it, (B, T)."""


class Task(Protocol):
    """`source` names it for people. `file` lies in the run folder and tells what the tokens mean."""

    source: str
    file: str
    vocab_size: int
    fingerprint: str

    def rows(self, context: int, seed: int) -> Rows: ...

    def validation(self, context: int, rows: int) -> Validation: ...

    def save(self, run: Path) -> None: ...

    def check(self, run: Path) -> None:
        """Refuse a run that was trained on something else."""

    def check_tokens(self, run: Path) -> None:
        """Refuse a run whose tokens mean something else: what such a one knows is of no use here."""


class Text:
    """Documents of a data folder."""

    file = TOKENIZER

    def __init__(self, data: TokenData) -> None:
        self.data = data
        self.source, self.vocab_size, self.fingerprint = str(data.folder), data.vocab_size, data.fingerprint

    def rows(self, context: int, seed: int) -> Rows:
        return Loader(self.data, "train", context, seed)

    def validation(self, context: int, rows: int) -> Validation:
        return TextValidation(self.data, context, rows)

    def save(self, run: Path) -> None:
        self.data.tokenizer.save(run / TOKENIZER)

    def check(self, run: Path) -> None:
        if (run / RECALL).exists():
            raise RequestError(f"{run} was trained on the recall task, not on text; choose another --out")
        check_tokenizer(run, self.data)

    def check_tokens(self, run: Path) -> None:
        # needles lie in text, and their run speaks its tokens
        if (run / RECALL).exists() and not (run / TOKENIZER).exists():
            raise RequestError(f"{run} was trained on the recall task, whose tokens are no text; name another run")
        check_tokenizer(run, self.data)


class TextValidation:
    """Bits per byte on part of the validation split."""

    metric, words = "bpb", "bits per byte"

    def __init__(self, data: TokenData, context: int, rows: int) -> None:
        self.count = rows
        self.bytes = data.tokenizer.token_byte_counts()
        self.loader = Loader(data, "validation", context, seed=0)
        # read once now: what is missing or damaged shall not show after hours
        self.loader.batch(range(min(rows, self.loader.rows_per_epoch)))

    def measure(self, objective: Objective, rows_per_pass: int, data: DataConfig) -> dict[str, float]:
        remembers = objective.decoder.injection is not None
        values: dict[str, float] = {}
        for source in sources_of(objective):
            result = bits_per_byte(
                objective,
                self.loader,
                source,
                self.bytes,
                passes=DEFAULT_PASSES,
                rows=self.count,
                # stepping wants many rows and keeps little of each; a pass at once takes what training takes
                rows_per_pass=self.count if remembers and source == "recurrent" else rows_per_pass,
                data=data,
            )
            values[source] = result.value
        return values

    def tokens(self, count: int) -> Tensor:
        return torch.from_numpy(self.loader.batch(range(min(count, self.count))).tokens)


class Recall:
    """The task of `data/recall.py`; its needles lie in the text of `data`, in whose tokens all is then said."""

    file = RECALL

    def __init__(self, config: RecallConfig, data: TokenData | None = None) -> None:
        self.config, self.data = config, data
        self.source, self.vocab_size, self.fingerprint = "the recall task", config.vocab_size, config.fingerprint
        if data is not None:
            self.source, self.vocab_size = f"needles in {data.folder}", data.vocab_size
            self.fingerprint = fingerprint_of([config.fingerprint, data.fingerprint])

    def rows(self, context: int, seed: int) -> Rows:
        return recall_rows(self.config, "train", context, seed, self.data)

    def validation(self, context: int, rows: int) -> Validation:
        return RecallValidation(recall_rows(self.config, "validation", context, 0, self.data), rows)

    def save(self, run: Path) -> None:
        if self.data is not None:
            self.data.tokenizer.save(run / TOKENIZER)
        files.write_json(run / RECALL, self.config.to_dict())

    def check(self, run: Path) -> None:
        theirs = read_recall(run)
        if theirs != self.config:
            raise RequestError(f"{run} was trained on another recall task, {theirs}; ask for that one")
        if self.data is not None:
            check_tokenizer(run, self.data)

    def check_tokens(self, run: Path) -> None:
        """Of text where needles lie in it, whatever was planted there; else the same keys and values at the same
        places, however many of them are asked for: few pairs are a start for many."""
        if self.data is not None:
            check_tokenizer(run, self.data)
            return
        theirs = read_recall(run)
        own = (self.config.fillers, self.config.keys, self.config.values)
        if theirs.variant == "needles" or (theirs.fillers, theirs.keys, theirs.values) != own:
            raise RequestError(
                f"{run} was trained on {theirs.variant} with {theirs.keys} keys, {theirs.values} values and "
                f"{theirs.fillers} fillers, which are other tokens than those of {self.config.variant} with {own[1]}, "
                f"{own[2]} and {own[0]}; make them equal"
            )


class RecallValidation:
    """Accuracy on what lies beyond the plain reach."""

    metric, words = "recall", "recall beyond the plain reach"

    def __init__(self, rows: DrawnRows, count: int) -> None:
        self.rows, self.count = rows, count

    def measure(self, objective: Objective, rows_per_pass: int, data: DataConfig) -> dict[str, float]:
        return {
            source: recall(objective, self.rows, source, passes=DEFAULT_PASSES, count=self.count).beyond_reach
            for source in sources_of(objective)
        }

    def tokens(self, count: int) -> Tensor:
        return torch.from_numpy(self.rows.batch(range(min(count, self.count))).tokens)
