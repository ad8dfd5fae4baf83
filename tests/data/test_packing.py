from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maglev.data.packing import RowPlan, divide_into_groups, pack
from maglev.errors import RequestError


def check_packed(lengths: list[int], context: int, order: list[int]) -> None:
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    packed = pack(offsets, context, order)
    total = sum(lengths)
    assert packed.rows == -(-total // context)
    filled = np.add.reduceat(packed.lengths, packed.row_starts[:-1])
    assert (filled[:-1] == context).all()
    assert filled[-1] == total - (packed.rows - 1) * context
    used = np.concatenate([np.arange(start, start + n) for start, n in zip(packed.starts, packed.lengths)])
    assert np.array_equal(np.sort(used), np.arange(total))
    # No piece crosses from one document into the next.
    document = np.searchsorted(offsets, packed.starts, side="right")
    assert np.array_equal(document, np.searchsorted(offsets, packed.starts + packed.lengths - 1, side="right"))


@given(
    st.integers(1, 12).flatmap(
        lambda context: st.tuples(st.just(context), st.lists(st.integers(1, 4 * context), min_size=1, max_size=40))
    ),
    st.randoms(),
)
@example((8, [7, 8, 9, 1]), None)
@example((8, [8, 16, 24]), None)
@example((8, [5, 5, 5, 5]), None)
@example((1, [3, 1, 2]), None)
@settings(deadline=None, max_examples=300)
def test_packing_uses_every_token_once_and_fills_every_row_but_the_last(
    case: tuple[int, list[int]], random: Any
) -> None:
    context, lengths = case
    order = list(range(len(lengths)))
    if random is not None:
        random.shuffle(order)
    check_packed(lengths, context, order)


def test_the_longest_piece_that_fits_is_taken() -> None:
    # Row 1: 7 + 3. Row 2: 6 + 2 + 2, after which nothing is left to cut.
    packed = pack(np.array([0, 6, 8, 15, 17, 20]), 10, range(5))
    assert packed.lengths.tolist() == [7, 3, 6, 2, 2]
    assert packed.starts.tolist() == [8, 17, 0, 6, 15]


def test_a_gap_that_nothing_fits_is_filled_with_the_head_of_the_longest() -> None:
    packed = pack(np.array([0, 7, 15, 22]), 10, range(3))
    assert list(zip(packed.starts.tolist(), packed.lengths.tolist())) == [
        (7, 8),
        (0, 2),
        (15, 7),
        (2, 3),
        (5, 2),
    ]


def test_equal_lengths_are_taken_in_the_given_order() -> None:
    offsets = np.arange(0, 50, 10)
    assert pack(offsets, 10, [2, 0, 3, 1]).starts.tolist() == [0, 10, 20, 30]
    assert pack(offsets, 20, [2, 0, 3, 1]).starts.tolist() == [20, 0, 30, 10]


@pytest.fixture(scope="module")
def split(write_data: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """60 documents over several shards, of lengths around the context of 16 that the tests use."""
    random = np.random.default_rng(0)
    lengths = [15, 16, 17, 1, *random.integers(1, 50, 56)]
    documents = [random.integers(1, 257, length - 1).tolist() for length in lengths]
    return write_data(tmp_path_factory.mktemp("split"), documents, shard_tokens=500).splits["train"]


def all_pieces(plan: RowPlan, epoch: int = 0) -> list[Any]:
    first = epoch * plan.rows_per_epoch
    return [plan.pieces(row) for row in range(first, first + plan.rows_per_epoch)]


def used_tokens(rows: list[Any]) -> Counter[tuple[int, int]]:
    return Counter((shard, start + i) for row in rows for shard, start, length in row for i in range(length))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_epoch_uses_every_token_once(split: Any, shuffle: bool, epoch: int) -> None:
    plan = RowPlan(split, 16, seed=3, shuffle=shuffle, group_tokens=200)
    every = {(number, i) for number, shard in enumerate(split.shards) for i in range(shard.token_count)}
    used = used_tokens(all_pieces(plan, epoch))
    assert set(used) == every and set(used.values()) == {1}


def test_rows_are_full_but_the_last_of_each_group(split: Any) -> None:
    for shuffle in (True, False):
        plan = RowPlan(split, 16, seed=3, shuffle=shuffle, group_tokens=200)
        assert len(plan.groups) > len(split.shards) > 1
        filled = [sum(piece.length for piece in row) for row in all_pieces(plan)]
        order, ends = plan._groups_of_epoch(0)
        last_rows = {int(end) - 1: plan.groups[group].tokens for group, end in zip(order, ends)}
        for row, count in enumerate(filled):
            assert count == ((last_rows[row] - 1) % 16 + 1 if row in last_rows else 16)
        assert plan.rows_per_epoch == sum(-(-group.tokens // 16) for group in plan.groups)


def test_seeds_and_epochs_differ_in_order_only(split: Any) -> None:
    plan, again, other = (RowPlan(split, 16, seed, group_tokens=200) for seed in (3, 3, 4))
    assert all_pieces(plan) == all_pieces(again)
    assert all_pieces(plan) != all_pieces(other)
    assert all_pieces(plan) != all_pieces(plan, epoch=1)
    assert used_tokens(all_pieces(plan)) == used_tokens(all_pieces(other, epoch=1))


def test_plan_does_not_depend_on_the_order_of_asking(split: Any) -> None:
    plan = RowPlan(split, 16, seed=3, group_tokens=100)
    rows = list(range(2 * plan.rows_per_epoch))
    forward = {row: plan.pieces(row) for row in rows}
    fresh = RowPlan(split, 16, seed=3, group_tokens=100)
    shuffled = np.random.default_rng(1).permutation(rows).tolist()
    assert {row: fresh.pieces(row) for row in shuffled} == forward


def test_plain_order_is_the_same_in_every_epoch_and_follows_the_documents(split: Any) -> None:
    plan = RowPlan(split, 16, seed=3, shuffle=False)
    assert all_pieces(plan) == all_pieces(plan, epoch=1)
    full = [row for row in all_pieces(plan) if sum(piece.length for piece in row) == 16]
    firsts = [min((piece.shard, piece.start) for piece in row) for row in full]
    assert firsts == sorted(firsts)


def test_the_orders_are_pinned(split: Any) -> None:
    """A change of these numbers breaks resuming older runs."""
    plan = RowPlan(split, 16, seed=3, group_tokens=200)
    assert plan._order(8, 2, 1, 5).tolist() == [1, 2, 0, 4, 7, 3, 5, 6]
    keys = [(epoch, purpose, group) for epoch in range(3) for purpose in range(3) for group in range(3)]
    assert len({tuple(plan._order(50, *key)) for key in keys}) == len(keys)


def test_groups_lie_between_documents_and_cover_the_shard(split: Any) -> None:
    for number, shard in enumerate(split.shards):
        for group_tokens in (1, 60, 200, 10**6):
            groups = divide_into_groups(shard, number, group_tokens)
            assert groups[0].first_document == 0 and groups[-1].last_document == shard.documents
            assert all(a.last_document == b.first_document for a, b in pairwise(groups))
            assert sum(group.tokens for group in groups) == shard.token_count
            longest = int(np.diff(shard.offsets).max())
            assert max(group.tokens for group in groups) <= group_tokens + longest


def test_few_groups_are_kept(split: Any) -> None:
    plan = RowPlan(split, 16, seed=3, group_tokens=100)
    assert len(plan.groups) > 3
    all_pieces(plan)
    assert len(plan._packed) == 2


def test_bad_requests(split: Any) -> None:
    with pytest.raises(RequestError, match="context of 0"):
        RowPlan(split, 0, seed=3)
    with pytest.raises(RequestError, match="seed -1"):
        RowPlan(split, 16, seed=-1)
    with pytest.raises(RequestError, match="'empty' has no tokens"):
        RowPlan(type(split)("empty", ()), 16, seed=3)
