"""Needles in real text, in RULER's manner: sentences that give a word for a key, planted once each, asked for later.

The filler is the text of a data folder. Keys and values are words of its own vocabulary, which the text holds as well:
only the sentence around them makes a needle. A question is the sentence up to its value, which is the target and does
not follow; the text goes on instead. A value is drawn without regard to anything else in the row, so who has not kept
it is right once in `values` at best. Only answers are targets, as in the other variants: what text itself wants of a
memory is for runs on text, which can be asked the same questions, since the vocabulary is theirs.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from maglev.data.loader import UNSCORED_TARGET, Loader
from maglev.data.recall import DrawnRows, RecallBatch, RecallConfig, RecallRows
from maglev.data.shards import TokenData, fingerprint_of
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError

BEFORE_KEY, BEFORE_VALUE, AFTER_VALUE = "\nThe special word for", " is", ".\n"
WORD = re.compile(rb" [a-z]+")
# needles lie in the first of so many parts of a row's text, so that they can be asked for far away
NEEDLE_PART = 4


def words_of(tokenizer: Tokenizer, count: int) -> np.ndarray:
    """Tokens that are a word of small letters, the longest first: they are whole words and say little by themselves."""
    found = sorted((-len(piece), id) for id, piece in enumerate(tokenizer.token_bytes) if WORD.fullmatch(piece))
    if len(found) < count:
        raise RequestError(
            f"keys and values are {count} words of one token, and the tokenizer has {len(found)} such; "
            f"ask for fewer with --keys and --values, or prepare the data with a larger --vocab-size"
        )
    return np.array([id for _, id in found[:count]])


class NeedleRows(DrawnRows):
    """Rows of text with needles and questions between its tokens; after a pass over the text it comes with others."""

    def __init__(self, config: RecallConfig, data: TokenData, split: str, context: int, seed: int) -> None:
        super().__init__(config, split, context, seed)
        words = words_of(data.tokenizer, config.keys + config.values)
        self.keys, self.values = np.split(words, [config.keys])
        before, between, after = map(data.tokenizer.encode, (BEFORE_KEY, BEFORE_VALUE, AFTER_VALUE))
        # 0 where key and value go
        self.question = np.array([*before, 0, *between])
        self.needle = np.array([*self.question, 0, *after])
        self.key_at, self.value_at = len(before), len(self.question)
        # for questions: as many as leave at least half of the row to the text
        places = context // (2 * len(self.needle)) - config.pairs
        self.require_places(places, 1, 2 * len(self.needle) * (config.pairs + 1))
        # the same number in every row: parts of a batch then weigh the same
        self.questions = max(1, round(config.query_share * places))
        self.sizes = {
            "needle": config.pairs,
            "question": self.questions,
            "asked": self.questions,
            "key": config.keys,
            "value": config.pairs,
            "other": 1,
        }
        planted = config.pairs * len(self.needle) + self.questions * len(self.question)
        self.text = Loader(data, split, context - planted, seed)
        self.tokens_per_epoch = self.text.rows_per_epoch * context
        self.fingerprint = fingerprint_of([self.fingerprint, data.fingerprint])

    def draw(self, rows: Sequence[int]) -> RecallBatch:
        index = np.asarray(rows, dtype=np.int64)
        drawn = self._numbers(index)
        needles, asks, pair = self._layout(drawn)
        key, value = self._words(drawn)
        row = np.arange(len(index))[:, None]
        tokens = np.full((len(index), self.context), -1)
        for begins, sentence in ((needles, self.needle), (asks, self.question)):
            tokens[row[:, None], begins[:, :, None] + np.arange(len(sentence))] = sentence
        tokens[row, needles + self.key_at] = self.keys[key[:, :-1]]
        tokens[row, needles + self.value_at] = self.values[value]
        tokens[row, asks + self.key_at] = self.keys[np.take_along_axis(key, pair, axis=1)]
        tokens[tokens < 0] = self.text.batch(index.tolist()).tokens.ravel()
        targets, distance = np.full_like(tokens, UNSCORED_TARGET), np.zeros_like(tokens)
        last = asks + len(self.question) - 1
        targets[row, last] = self.values[np.take_along_axis(value, pair, axis=1)]
        distance[row, last] = last - np.take_along_axis(needles, pair, axis=1) - self.value_at
        return RecallBatch(tokens, targets, distance)

    def without(self, rows: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each needle in turn: the tokens with another in its place, of a key that nobody asks for and with another
        value, and where its own key is asked for. (R, T) both"""
        index = np.asarray(rows, dtype=np.int64)
        drawn = self._numbers(index)
        batch, (needles, _, _), (key, value) = self.draw(rows), self._layout(drawn), self._words(drawn)
        given = np.arange(self.context) - batch.distance
        row = np.arange(len(index))
        other = 1 + drawn["other"][:, 0] % (self.config.values - 1)
        for begins, own in zip(needles.T, value.T, strict=True):
            tokens = batch.tokens.copy()
            tokens[row, begins + self.key_at] = self.keys[key[:, -1]]
            tokens[row, begins + self.value_at] = self.values[(own + other) % self.config.values]
            yield tokens, (batch.targets >= 0) & (given == (begins + self.value_at)[:, None])

    def _layout(self, drawn: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where needles begin (R, pairs), where questions do and for which needle, one before it (R, questions)."""
        text = self.text.context
        # how much of the text comes before each; where it is as much, needles come first
        needle = np.sort(drawn["needle"] % (text // NEEDLE_PART + 1), axis=1)
        first = needle[:, :1]
        later = drawn["question"] % (text + 1 - first)
        if self.config.spread == "log":
            later >>= (drawn["question"] >> 40) % text.bit_length()
        question = np.sort(first + later, axis=1)
        follows = needle[:, None, :] <= question[:, :, None]  # (R, questions, pairs)
        given = follows.sum(2)
        needles = needle + len(self.needle) * np.arange(self.config.pairs) + len(self.question) * (~follows).sum(1)
        asks = question + len(self.question) * np.arange(self.questions) + len(self.needle) * given
        return needles, asks, drawn["asked"] % given

    def _words(self, drawn: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Keys, each once, the last one not planted (R, pairs + 1), and values (R, pairs)."""
        key = np.argsort(drawn["key"], axis=1, kind="stable")[:, : self.config.pairs + 1]
        return key, drawn["value"] % self.config.values


def recall_rows(
    config: RecallConfig, split: str, context: int, seed: int, data: TokenData | None = None
) -> RecallRows | NeedleRows:
    """`data` is the text of needles; the other variants have none."""
    assert (config.variant == "needles") == (data is not None), config.variant
    if data is None:
        return RecallRows(config, split, context, seed)
    return NeedleRows(config, data, split, context, seed)
