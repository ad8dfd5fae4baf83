"""Which tokens make which row: a pure function of (seed, epoch, row), the same on every rank.

Documents longer than the context are cut into context-length pieces; what is left over is packed best-fit,
and a gap that nothing fits is filled with the head of a longer piece. So no token is dropped, and only the
last row of a group is padded.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from maglev.data.shards import Shard, Split
from maglev.errors import RequestError

GROUP_TOKENS = 32_000_000
CACHED_GROUPS = 2

# What a stream of random numbers is for, so that no two orders share one.
GROUP_ORDER, PIECE_ORDER, ROW_ORDER = range(3)


class Piece(NamedTuple):
    """Consecutive tokens of one document."""

    shard: int
    start: int
    length: int


class Group(NamedTuple):
    """Consecutive documents of one shard that are packed together."""

    shard: int
    first_document: int
    last_document: int
    tokens: int


@dataclass(frozen=True)
class PackedRows:
    """Row r holds the pieces row_starts[r] to row_starts[r + 1]."""

    starts: np.ndarray  # (pieces,)
    lengths: np.ndarray  # (pieces,)
    row_starts: np.ndarray  # (rows + 1,)

    @property
    def rows(self) -> int:
        return len(self.row_starts) - 1


class RowPlan:
    """The rows of a split. The global row index runs on over the epochs."""

    def __init__(
        self, split: Split, context: int, seed: int, shuffle: bool = True, group_tokens: int = GROUP_TOKENS
    ) -> None:
        if context < 1:
            raise RequestError(f"context of {context} tokens: a row needs at least 1; set model.context higher")
        if seed < 0:
            raise RequestError(f"seed {seed} is negative; give 0 or more")
        if split.tokens == 0:
            raise RequestError(f"split {split.name!r} has no tokens; run `maglev data prepare` on more text")
        self.split = split
        self.context = context
        self.seed = seed
        self.shuffle = shuffle
        self.groups = [
            group
            for number, shard in enumerate(split.shards)
            for group in divide_into_groups(shard, number, group_tokens)
        ]
        self._group_rows = np.array([-(-group.tokens // context) for group in self.groups])
        self.rows_per_epoch = int(self._group_rows.sum())
        self._epoch_cache: tuple[int, np.ndarray, np.ndarray] | None = None
        self._packed: OrderedDict[tuple[int, int], tuple[PackedRows, np.ndarray]] = OrderedDict()

    def pieces(self, global_row: int) -> list[Piece]:
        """The pieces of a row, in order; only a group's last row holds fewer than `context` tokens."""
        epoch, row = divmod(global_row, self.rows_per_epoch)
        order, ends = self._groups_of_epoch(epoch)
        place = int(np.searchsorted(ends, row, side="right"))
        group = int(order[place])
        packed, row_order = self._packed_group(epoch, group)
        inside = row_order[row - (int(ends[place]) - int(self._group_rows[group]))]
        first, last = packed.row_starts[inside : inside + 2]
        shard = self.groups[group].shard
        starts, lengths = packed.starts[first:last].tolist(), packed.lengths[first:last].tolist()
        return [Piece(shard, start, length) for start, length in zip(starts, lengths, strict=True)]

    def _groups_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the groups in this epoch, and the row at which each one ends."""
        if self._epoch_cache is None or self._epoch_cache[0] != epoch:
            count = len(self.groups)
            order = self._order(count, epoch, GROUP_ORDER) if self.shuffle else np.arange(count)
            self._epoch_cache = (epoch, order, np.cumsum(self._group_rows[order]))
        return self._epoch_cache[1:]

    def _packed_group(self, epoch: int, group: int) -> tuple[PackedRows, np.ndarray]:
        """The packed rows of a group and the order in which this epoch takes them."""
        key = (epoch if self.shuffle else 0, group)
        if key not in self._packed:
            self._packed[key] = self._pack(epoch, group)
            if len(self._packed) > CACHED_GROUPS:
                self._packed.popitem(last=False)
        self._packed.move_to_end(key)
        return self._packed[key]

    def _pack(self, epoch: int, group: int) -> tuple[PackedRows, np.ndarray]:
        shard, first, last, tokens = self.groups[group]
        offsets = np.asarray(self.split.shards[shard].offsets[first : last + 1])
        documents = len(offsets) - 1
        order = self._order(documents, epoch, PIECE_ORDER, group) if self.shuffle else np.arange(documents)
        packed = pack(offsets, self.context, order)
        assert packed.rows == self._group_rows[group]
        full_rows = tokens // self.context
        if self.shuffle:
            row_order = self._order(full_rows, epoch, ROW_ORDER, group)
        else:
            first_tokens = np.minimum.reduceat(packed.starts, packed.row_starts[:-1])
            row_order = np.argsort(first_tokens[:full_rows], kind="stable")
        # A padded row is packed last and stays last.
        return packed, np.concatenate((row_order, np.arange(full_rows, packed.rows)))

    def _order(self, count: int, *key: int) -> np.ndarray:
        """A permutation from raw Philox numbers, which, unlike numpy's shuffles, no version may change."""
        generator = np.random.Philox(np.random.SeedSequence((self.seed, *key)))
        return np.argsort(generator.random_raw(count), kind="stable")


def divide_into_groups(shard: Shard, number: int, group_tokens: int = GROUP_TOKENS) -> list[Group]:
    """Cut a shard between documents into groups of about equal size, of about `group_tokens` at most."""
    offsets = shard.offsets
    count = -(-shard.token_count // group_tokens)
    targets = [shard.token_count * part // count for part in range(count + 1)]
    bounds = np.unique(np.searchsorted(offsets, targets)).tolist()
    return [Group(number, first, last, int(offsets[last] - offsets[first])) for first, last in pairwise(bounds)]


def pack(offsets: np.ndarray, context: int, order: Sequence[int] | np.ndarray) -> PackedRows:
    """Pack documents, given by where each starts and the last one ends, into rows of `context` tokens.

    `order` says which of several equally long remainders is taken first.
    """
    lengths = np.diff(offsets)
    whole, rest = np.divmod(lengths, context)
    # The index of each context-length piece inside its document: 0, 1, ..., whole - 1 for every document.
    index = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_starts = np.repeat(offsets[:-1], whole) + index * context

    order = np.asarray(order, dtype=np.int64)
    order = order[rest[order] > 0]
    starts, sizes, row_sizes = _best_fit(
        (offsets[:-1] + whole * context)[order].tolist(), rest[order].tolist(), context
    )
    pieces_per_row = np.concatenate((np.ones(len(whole_starts), np.int64), np.array(row_sizes, np.int64)))
    return PackedRows(
        starts=np.concatenate((whole_starts, np.array(starts, np.int64))),
        lengths=np.concatenate((np.full(len(whole_starts), context), np.array(sizes, np.int64))),
        row_starts=np.concatenate(([0], np.cumsum(pieces_per_row))),
    )


def _best_fit(starts: list[int], lengths: list[int], context: int) -> tuple[list[int], list[int], list[int]]:
    """Fill row after row with the longest piece that fits; answers piece starts, lengths, pieces per row."""
    buckets: dict[int, list[int]] = {}
    for start, length in zip(reversed(starts), reversed(lengths), strict=True):
        buckets.setdefault(length, []).append(start)
    # Bit n is set where pieces of length n are left, so that the best fit is the highest bit below the gap.
    left = sum(1 << length for length in buckets)

    piece_starts: list[int] = []
    piece_lengths: list[int] = []
    row_sizes: list[int] = []
    while left:
        gap = context
        before = len(piece_starts)
        while gap and left:
            fitting = left & ((2 << gap) - 1)
            # Where nothing fits, the longest piece gives its head: that leaves the longest rest.
            length = (fitting or left).bit_length() - 1
            bucket = buckets[length]
            start = bucket.pop()
            if not bucket:
                left ^= 1 << length
            if not fitting:
                rest = length - gap
                length = gap
                buckets.setdefault(rest, []).append(start + gap)
                left |= 1 << rest
            piece_starts.append(start)
            piece_lengths.append(length)
            gap -= length
        row_sizes.append(len(piece_starts) - before)
    return piece_starts, piece_lengths, row_sizes
