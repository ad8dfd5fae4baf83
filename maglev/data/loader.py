"""Rows of tokens, targets and piece starts, as numpy arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maglev.data.packing import GROUP_TOKENS, RowPlan
from maglev.data.shards import TokenData, fingerprint_of
from maglev.errors import RequestError

# Nothing is predicted on padding, nor at a token that is read and not asked about; losses score no negative target.
IGNORED_TARGET, UNSCORED_TARGET = -1, -2


class Batch(NamedTuple):
    """starts[r, t] is the index in row r of the first token of the piece that position t belongs to."""

    tokens: np.ndarray  # (R, T) int64
    targets: np.ndarray  # (R, T) int64, IGNORED_TARGET on padding
    starts: np.ndarray  # (R, T) int64


class Loader:
    """Any row of a split by its global index; a rank only selects rows."""

    def __init__(
        self,
        data: TokenData,
        split_name: str,
        context: int,
        seed: int,
        shuffle: bool = True,
        group_tokens: int = GROUP_TOKENS,
    ) -> None:
        if split_name not in data.splits:
            raise RequestError(
                f"{data.folder}: no split {split_name!r} in it, only {', '.join(map(repr, data.splits))}; "
                f"name one of these"
            )
        self.split = data.splits[split_name]
        self.context = context
        self.bos_id = data.tokenizer.bos_id
        self.plan = RowPlan(self.split, context, seed, shuffle, group_tokens)
        self.rows_per_epoch = self.plan.rows_per_epoch
        self.tokens_per_epoch = self.split.tokens
        # Two loaders with the same fingerprint give the same rows.
        self.fingerprint = fingerprint_of(
            [data.fingerprint, split_name, context, seed if shuffle else None, group_tokens]
        )

    def batch(self, rows: Sequence[int]) -> Batch:
        tokens = np.full((len(rows), self.context), self.bos_id, dtype=np.int64)
        targets = np.full((len(rows), self.context), IGNORED_TARGET, dtype=np.int64)
        starts = np.zeros((len(rows), self.context), dtype=np.int64)
        for index, row in enumerate(rows):
            self._fill(row, tokens[index], targets[index], starts[index])
        return Batch(tokens, targets, starts)

    def _fill(self, row: int, tokens: np.ndarray, targets: np.ndarray, starts: np.ndarray) -> None:
        position = 0
        for shard, start, length in self.plan.pieces(row):
            stream = self.split.shards[shard].tokens
            end = position + length
            tokens[position:end] = stream[start : start + length]
            # The token after a document's last one is the next document's BOS, except at the shard's end.
            following = stream[start + 1 : start + length + 1]
            targets[position : position + len(following)] = following
            targets[position + len(following) : end] = self.bos_id
            starts[position:end] = position
            position = end
        starts[position:] = position
