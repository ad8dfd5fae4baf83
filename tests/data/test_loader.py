import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maglev.data.loader import Batch, Loader
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError

CONTEXT = 8
LENGTHS = st.one_of(st.sampled_from([1, CONTEXT - 1, CONTEXT, CONTEXT + 1]), st.integers(1, 3 * CONTEXT))


def distinct_documents(lengths: list[int], tokenizer: Tokenizer) -> list[list[int]]:
    """Documents (with BOS) in which a token tells its document and its place, as far as they go."""
    ordinary = [id for id in range(tokenizer.vocab_size) if id != tokenizer.bos_id]
    numbers = iter(range(10**6))
    return [
        [tokenizer.bos_id, *(ordinary[next(numbers) % len(ordinary)] for _ in range(length - 1))] for length in lengths
    ]


def expected_pairs(documents: list[list[int]], bos: int) -> list[tuple[int, int]]:
    return sorted((a, b) for document in documents for a, b in zip(document, [*document[1:], bos]))


def found_pairs(batch: Batch) -> list[tuple[int, int]]:
    real = batch.targets >= 0
    return sorted(zip(batch.tokens[real].tolist(), batch.targets[real].tolist()))


@given(
    st.lists(LENGTHS, min_size=1, max_size=25),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([20, 60, 10**8]),
)
@settings(deadline=None, max_examples=100)
def test_every_token_once_per_epoch_with_its_target(
    write_data: Any, tokenizer: Tokenizer, lengths: list[int], epoch: int, shuffle: bool, shard_tokens: int
) -> None:
    documents = distinct_documents(lengths, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder), [document[1:] for document in documents], shard_tokens)
        loader = Loader(data, "train", CONTEXT, seed=1, shuffle=shuffle, group_tokens=50)
        first = epoch * loader.rows_per_epoch
        batch = loader.batch(range(first, first + loader.rows_per_epoch))
    assert found_pairs(batch) == expected_pairs(documents, tokenizer.bos_id)
    assert loader.tokens_per_epoch == sum(lengths)
    padding = batch.targets < 0
    assert (batch.tokens[padding] == tokenizer.bos_id).all()
    assert padding.sum() == loader.rows_per_epoch * CONTEXT - sum(lengths)
    check_starts(loader, batch, first)


def check_starts(loader: Loader, batch: Batch, first: int) -> None:
    for row in range(loader.rows_per_epoch):
        expected: list[int] = []
        for piece in loader.plan.pieces(first + row):
            expected += [len(expected)] * piece.length
        expected += [len(expected)] * (CONTEXT - len(expected))
        assert batch.starts[row].tolist() == expected


@pytest.fixture(scope="module")
def data(write_data: Any, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    lengths = np.random.default_rng(0).integers(1, 40, 80).tolist()
    documents = distinct_documents(lengths, tokenizer)
    return write_data(tmp_path_factory.mktemp("data"), [document[1:] for document in documents], 600)


def test_batch_by_hand(write_data: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    bos = tokenizer.bos_id
    data = write_data(tmp_path, [[11, 12, 13], [21], [31, 32, 33, 34]])
    batch = Loader(data, "train", 4, seed=0, shuffle=False).batch([0, 1, 2])
    assert batch.tokens.tolist() == [[bos, 11, 12, 13], [bos, 31, 32, 33], [bos, 21, 34, bos]]
    assert batch.targets.tolist() == [[11, 12, 13, bos], [31, 32, 33, 34], [21, bos, bos, -1]]
    assert batch.starts.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 3]]
    assert all(array.dtype == np.int64 for array in batch)


def test_ranks_only_select_rows(data: Any) -> None:
    rows_per_step, steps = 8, 16
    whole = Loader(data, "train", 16, seed=5, group_tokens=300)
    assert steps * rows_per_step > whole.rows_per_epoch
    for ranks in (1, 2, 4):
        loaders = [Loader(data, "train", 16, seed=5, group_tokens=300) for _ in range(ranks)]
        for step in range(steps):
            rows = range(step * rows_per_step, (step + 1) * rows_per_step)
            parts = [loader.batch(rows[rank::ranks]) for rank, loader in enumerate(loaders)]
            expected = whole.batch(rows)
            for field in Batch._fields:
                gathered = np.empty_like(expected.tokens)
                for rank, part in enumerate(parts):
                    gathered[rank::ranks] = getattr(part, field)
                assert np.array_equal(gathered, getattr(expected, field))


def test_the_order_differs_by_seed_and_epoch(data: Any) -> None:
    loader, other = (Loader(data, "train", 16, seed) for seed in (0, 1))
    rows = range(loader.rows_per_epoch)
    next_rows = range(loader.rows_per_epoch, 2 * loader.rows_per_epoch)
    first, second, third = loader.batch(rows), loader.batch(next_rows), other.batch(rows)
    assert found_pairs(first) == found_pairs(second) == found_pairs(third)
    assert not np.array_equal(first.tokens, second.tokens)
    assert not np.array_equal(first.tokens, third.tokens)


def test_fingerprint_tells_loaders_apart(data: Any) -> None:
    def fingerprint(split: str = "train", context: int = 16, seed: int = 0, **options: Any) -> str:
        return Loader(data, split, context, seed, **options).fingerprint

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(split="validation"),
        fingerprint(context=17),
        fingerprint(seed=1),
        fingerprint(shuffle=False),
        fingerprint(group_tokens=9),
    ]
    assert len({fingerprint(), *others}) == 6


def test_bad_requests(data: Any) -> None:
    with pytest.raises(RequestError, match=r"no split 'test'.*'train', 'validation'"):
        Loader(data, "test", 16, 0)
    with pytest.raises(RequestError, match="context of 0"):
        Loader(data, "train", 0, 0)
