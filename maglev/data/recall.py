"""Recall as a synthetic task: things said once, early in a row, and asked for at every distance.

A row begins with pairs of a key and a value. After them come filler and questions: a marker, then a key. The target at
the asked key is its value, and no value is ever given as an answer: the next token is filler or another question. So
whoever answers must have kept what was said once. Rows are a pure function of (seed, split, row), as those of text are.
Needles in real text are in `needles.py`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from maglev.data.loader import UNSCORED_TARGET, Batch
from maglev.data.shards import fingerprint_of
from maglev.errors import RequestError

Variant = Literal["pairs", "overwrite", "copy", "needles"]
Spread = Literal["even", "log"]
SPLITS = ("train", "validation")
MARKER = 0
LARGEST_VOCABULARY = 1 << 16


def distance_unit(depth: int, window: int) -> int:
    """layers x (W - 1): how far sliding layers reach without memory."""
    return max(1, depth * (window - 1))


@dataclass(frozen=True)
class RecallConfig:
    """What is asked. Chance is one in `values`; who knows the row's values but not whose they are gets one in `pairs`.

    variant: `pairs`; `overwrite`, where as many times as there are pairs a key is given again with another value and
    the newest counts; `copy`, where `pairs` values in a row are to be said in order from each marker on; `needles`,
    where keys and values are words of a text, given in sentences that are planted in it.
    query_share: the share of places for questions that hold one. spread: over all distances alike, or as many
    questions from 1 to 2 as from 2 to 4 and so on.
    """

    variant: Variant = "pairs"
    pairs: int = 4
    keys: int = 32
    values: int = 32
    fillers: int = 7
    query_share: float = 0.75
    spread: Spread = "even"

    def __post_init__(self) -> None:
        def require(condition: bool, message: str) -> None:
            if not condition:
                raise RequestError(message)

        for name, choices in (("variant", get_args(Variant)), ("spread", get_args(Spread))):
            value = getattr(self, name)
            require(value in choices, f"{name} is {value!r}; it must be one of {', '.join(choices)}")
        for name, least in (("pairs", 1), ("keys", 1), ("values", 2), ("fillers", 1)):
            value = getattr(self, name)
            require(
                isinstance(value, int) and least <= value <= LARGEST_VOCABULARY,
                f"{name} is {value}; it must be at least {least} and at most {LARGEST_VOCABULARY:,}",
            )
        require(
            self.variant == "copy" or self.pairs <= self.keys,
            f"pairs is {self.pairs}, more than the {self.keys} keys there are; raise keys",
        )
        require(
            self.variant != "needles" or self.pairs < self.keys,
            f"pairs is {self.pairs} and keys is {self.keys}; needles need a key more than there are pairs, raise keys",
        )
        require(
            0 < self.query_share <= 1,
            f"query_share is {self.query_share}; it must be above 0 and at most 1",
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Any) -> "RecallConfig":
        try:
            return cls(**value)
        except TypeError:
            raise RequestError(f"not the description of a recall task: {value!r}") from None

    @property
    def first_key(self) -> int:
        return 1 + self.fillers

    @property
    def first_value(self) -> int:
        return self.first_key + self.keys

    @property
    def vocab_size(self) -> int:
        """The marker, fillers, keys, values: each has its own tokens. Of needles the vocabulary is the text's."""
        return self.first_value + self.values

    @property
    def chance(self) -> float:
        return 1 / self.values

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(["recall", asdict(self)])


class RecallBatch(NamedTuple):
    tokens: np.ndarray  # (R, T) int64
    targets: np.ndarray  # (R, T) int64, UNSCORED_TARGET where nothing is asked
    distance: np.ndarray  # (R, T) int64, positions since the wanted value was given; 0 where nothing is asked


class DrawnRows:
    """Any row by its global index, without end: what `Loader` is for text. `sizes` says how many numbers make one."""

    sizes: dict[str, int]
    tokens_per_epoch = float("inf")

    def __init__(self, config: RecallConfig, split: str, context: int, seed: int) -> None:
        assert split in SPLITS, split
        self.config, self.context = config, context
        self.philox_key = np.array([seed, SPLITS.index(split)], dtype=np.uint64)
        self.fingerprint = fingerprint_of([config.fingerprint, split, context, seed])

    def draw(self, rows: Sequence[int]) -> RecallBatch:
        raise NotImplementedError

    def batch(self, rows: Sequence[int]) -> Batch:
        """As the training loop takes it."""
        tokens, targets, _ = self.draw(rows)
        return Batch(tokens, targets, np.zeros_like(tokens))

    def require_places(self, places: int, needed: int, least: int) -> None:
        if places < needed:
            raise RequestError(
                f"a context of {self.context} has no room for {self.config.pairs} pairs and a question; "
                f"use at least {least}, or fewer pairs"
            )

    def _numbers(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Raw Philox numbers, which no version of numpy may change: a row has a stretch of the stream of its own."""
        total = sum(self.sizes.values())
        # one tick of the counter gives four numbers
        ticks = -(-total // 4)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []
        parts = [np.zeros((0, 4 * ticks), dtype=np.uint64)]
        for run in runs:
            generator = np.random.Philox(key=self.philox_key)
            generator.advance(int(run[0]) * ticks)
            parts.append(generator.random_raw(len(run) * 4 * ticks).reshape(len(run), -1))
        ends = np.cumsum(list(self.sizes.values()))
        columns = np.split(np.concatenate(parts)[:, :total], ends[:-1], axis=1)
        # 63 bits, so that everything after this is int64
        return {name: (part >> np.uint64(1)).astype(np.int64) for name, part in zip(self.sizes, columns, strict=True)}


class RecallRows(DrawnRows):
    """Of synthetic tokens."""

    def __init__(self, config: RecallConfig, split: str, context: int, seed: int) -> None:
        super().__init__(config, split, context, seed)
        copying = config.variant == "copy"
        self.body = config.pairs if copying else 2 * config.pairs
        # places for questions, one after another: a marker and a key, or a marker and room for the span. Each begins at
        # the first or the second of its positions and rows shift theirs, so that all distances are asked alike
        self.width = 1 + (config.pairs if copying else 2)
        self.places = (context - self.body - self.width + 1) // self.width
        self.rewrites = config.pairs if config.variant == "overwrite" else 0
        self.require_places(self.places, self.rewrites + 1, self.body + self.width * (self.rewrites + 2) - 1)
        free = self.places - self.rewrites
        # the same number in every row: parts of a batch then weigh the same
        self.questions = max(1, round(config.query_share * free))
        self.sizes = {
            "row_shift": 1,
            "filler": context,
            "place": self.places,
            "shift": self.rewrites + self.questions,
            "asked": self.questions,
            "key": config.keys,
            "value": config.pairs,
            "rewritten_key": self.rewrites,
            "rewritten_value": self.rewrites,
        }

    def draw(self, rows: Sequence[int]) -> RecallBatch:
        drawn = self._numbers(np.asarray(rows, dtype=np.int64))
        tokens = 1 + (drawn["filler"] % self.config.fillers)
        targets = np.full_like(tokens, UNSCORED_TARGET)
        distance = np.zeros_like(tokens)
        places = self._places(drawn["place"])
        # (R, places taken): where each place begins
        begins = self.body + drawn["row_shift"] % self.width + (drawn["shift"] & 1) + places * self.width
        batch = RecallBatch(tokens, targets, distance)
        if self.config.variant == "copy":
            self._fill_copy(batch, drawn, begins)
        else:
            self._fill_pairs(batch, drawn, begins[:, : self.rewrites], begins[:, self.rewrites :])
        return batch

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        """Places of the rewrites in the order of the row, then those of the questions. (R, places) -> (R, taken)"""
        uniform = numbers / float(1 << 63)
        # smallest u / weight first: a place is then taken with a probability proportional to its weight
        ranks = uniform * np.arange(1, self.places + 1) if self.config.spread == "log" else uniform
        # rewrites are spread evenly, whatever the questions are
        written = smallest(uniform, self.rewrites)
        np.put_along_axis(ranks, written, np.inf, axis=1)
        return np.concatenate((written, smallest(ranks, self.questions)), axis=1)

    def _fill_pairs(
        self, batch: RecallBatch, drawn: dict[str, np.ndarray], writes: np.ndarray, asks: np.ndarray
    ) -> None:
        config = self.config
        row = np.arange(len(asks))[:, None]
        key = np.argsort(drawn["key"], axis=1, kind="stable")[:, : config.pairs]  # (R, pairs), each once
        value = drawn["value"] % config.values  # (R, pairs)
        batch.tokens[:, 0 : self.body : 2] = config.first_key + key
        batch.tokens[:, 1 : self.body : 2] = config.first_value + value
        pair = drawn["asked"] % config.pairs  # (R, questions)
        answer = np.take_along_axis(value, pair, axis=1)
        given = 2 * pair + 1
        for event in range(self.rewrites):
            which = drawn["rewritten_key"][:, event : event + 1] % config.pairs
            other = 1 + drawn["rewritten_value"][:, event : event + 1] % (config.values - 1)
            now = (np.take_along_axis(value, which, axis=1) + other) % config.values
            np.put_along_axis(value, which, now, axis=1)
            at = writes[:, event : event + 1]
            batch.tokens[row, at] = config.first_key + np.take_along_axis(key, which, axis=1)
            batch.tokens[row, at + 1] = config.first_value + now
            newest = (pair == which) & (asks > at)
            answer = np.where(newest, now, answer)
            given = np.where(newest, at + 1, given)
        batch.tokens[row, asks] = MARKER
        batch.tokens[row, asks + 1] = config.first_key + np.take_along_axis(key, pair, axis=1)
        batch.targets[row, asks + 1] = config.first_value + answer
        batch.distance[row, asks + 1] = asks + 1 - given

    def _fill_copy(self, batch: RecallBatch, drawn: dict[str, np.ndarray], asks: np.ndarray) -> None:
        config = self.config
        row = np.arange(len(asks))[:, None]
        span = config.first_value + drawn["value"] % config.values  # (R, pairs)
        batch.tokens[:, : self.body] = span
        batch.tokens[row, asks] = MARKER
        for index in range(config.pairs):
            batch.targets[row, asks + index] = span[:, index : index + 1]
            batch.distance[row, asks + index] = asks


def smallest(ranks: np.ndarray, count: int) -> np.ndarray:
    """The columns of the `count` smallest, in order. (R, N) -> (R, count)"""
    return np.sort(np.argpartition(ranks, max(count, 1) - 1, axis=1)[:, :count], axis=1)
