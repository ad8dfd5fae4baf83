"""Bits per byte against a plain count: a token at a time, bytes from the tokenizer's raw bytes."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maglev import checkpoint
from maglev.config import DataConfig
from maglev.data.loader import Batch, Loader
from maglev.data.shards import TokenData, open_data
from maglev.errors import RequestError
from maglev.evaluate.bpb import bits_per_byte, documents_of
from maglev.evaluate.memories import SOURCES, Source
from maglev.evaluate.runs import load_objective, open_matching_data
from maglev.objectives import Objective
from tests.helpers import ALL_RECIPES, MAGLEV_RECIPES, MEMORY_RECIPES, small
from tests.small_runs import Train

CONTEXT = 24


@pytest.fixture
def tokens(data: Path) -> TokenData:
    return open_data(data)


def model(recipe: str, **settings: int) -> Objective:
    return small(recipe, scale=0.5, vocab_size=300, depth=2, context=CONTEXT, window=6, **settings).eval()


def last_rows(loader: Loader, count: int) -> range:
    return range(loader.rows_per_epoch - count, loader.rows_per_epoch)


def naive(objective: Objective, data: TokenData, rows: list[int], loader: Loader) -> tuple[float, int, int]:
    """(bits per byte, tokens, bytes) of the decoder stepped through each row by itself."""
    nats = size = count = 0.0
    batch = loader.batch(rows)
    for row in range(len(rows)):
        state = objective.decoder.initial_state(1)
        for slot in range(CONTEXT):
            with torch.no_grad():
                memory, state = objective.decoder.step(torch.tensor([batch.tokens[row, slot]]), state)
                scores = F.log_softmax(objective.decoder.readout(memory)[0].double(), dim=0)
            target = int(batch.targets[row, slot])
            raw = data.tokenizer.token_bytes[target] if target >= 0 else b""
            if raw:
                nats, size, count = nats - float(scores[target]), size + len(raw), count + 1
    return nats / math.log(2) / size, int(count), int(size)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recurrent_is_what_stepping_gives(recipe: str, tokens: TokenData) -> None:
    """Over the last rows of the split, of which one is padded and some hold BOS as a target."""
    objective = model(recipe)
    loader = Loader(tokens, "validation", CONTEXT, seed=0, shuffle=False)
    rows = loader.rows_per_epoch
    batch = loader.batch(range(rows))
    assert (batch.targets == tokens.tokenizer.bos_id).any() and (batch.targets < 0).any()
    few = OnlyRows(loader, [*range(4), *last_rows(loader, 2)])
    found = bits_per_byte(objective, few, "recurrent", tokens.tokenizer.token_byte_counts(), rows_per_pass=4)
    expected, count, size = naive(objective, tokens, few.chosen, loader)
    assert found.value == pytest.approx(expected, abs=1e-9)
    assert (found.tokens, found.bytes) == (count, size)
    assert found.passes is None and next(iter(found.to_dict())) == "bpb_recurrent"


class OnlyRows(Loader):
    """Some rows of another loader, as if there were no more."""

    def __init__(self, inner: Loader, chosen: list[int]) -> None:
        self.inner, self.chosen = inner, chosen
        self.context, self.rows_per_epoch = inner.context, len(chosen)

    def batch(self, rows: range) -> Batch:  # type: ignore[override]
        return self.inner.batch([self.chosen[row] for row in rows])


def test_the_whole_split_has_the_bytes_of_its_text(tokens: TokenData) -> None:
    """Every byte of it is predicted once: a document's first token from its BOS, a piece's from the piece before."""
    objective = model("swa-ssss")
    loader = Loader(tokens, "validation", CONTEXT, seed=0, shuffle=False)
    found = bits_per_byte(objective, loader, "recurrent", tokens.tokenizer.token_byte_counts(), rows_per_pass=64)
    split = tokens.splits["validation"]
    assert found.bytes == split.bytes
    assert found.tokens == split.tokens - split.documents


@pytest.mark.parametrize(
    ("recipe", "source"),
    [
        ("swa-ssss", "recurrent"),
        ("maglev-shared-0.1", "recurrent"),
        ("maglev-separate-1", "lifted"),
        ("lrt-ssss", "refined"),
    ],
)
def test_neither_the_rows_per_pass_nor_the_neighbours_matter(recipe: str, source: Source, tokens: TokenData) -> None:
    objective = model(recipe)
    loader = Loader(tokens, "validation", CONTEXT, seed=0, shuffle=False)
    counts = tokens.tokenizer.token_byte_counts()
    found = [
        bits_per_byte(objective, loader, source, counts, passes=2, rows=7, rows_per_pass=size) for size in (1, 3, 7, 64)
    ]
    for other in found[1:]:
        assert other.value == pytest.approx(found[0].value, abs=1e-10)
        assert (other.tokens, other.bytes) == (found[0].tokens, found[0].bytes)
        assert other.by_position == [pytest.approx(bucket, abs=1e-10) for bucket in found[0].by_position]


def test_positions_recombine_to_the_whole(tokens: TokenData) -> None:
    objective = small("maglev-shared-0.1", scale=0.5, vocab_size=300, context=100, window=6).eval()
    loader = Loader(tokens, "validation", 100, seed=0, shuffle=False)
    found = bits_per_byte(objective, loader, "lifted", tokens.tokenizer.token_byte_counts(), rows=9)
    value = found.to_dict()
    buckets = value["by_position"]
    assert [bucket["first"] for bucket in buckets] == [0, *(bucket["last"] + 1 for bucket in buckets[:-1])]
    assert (buckets[-1]["last"], len(buckets)) == (99, 32)
    assert sum(bucket["bytes"] for bucket in buckets) == value["bytes"]
    weighted = sum(bucket["bpb_lifted"] * bucket["bytes"] for bucket in buckets) / value["bytes"]
    assert weighted == pytest.approx(value["bpb_lifted"], rel=1e-12)
    assert not any("bpb" in bucket and "bpb_lifted" not in bucket for bucket in buckets)


@pytest.mark.parametrize("recipe", MEMORY_RECIPES)
def test_refined_to_the_end_is_recurrent(recipe: str, tokens: TokenData) -> None:
    objective = model(recipe)
    loader = Loader(tokens, "validation", CONTEXT, seed=0, shuffle=False)
    counts = tokens.tokenizer.token_byte_counts()

    def value(source: Source, passes: int) -> float:
        return bits_per_byte(objective, loader, source, counts, passes=passes, rows=4).value

    assert value("refined", CONTEXT) == pytest.approx(value("recurrent", 1), abs=1e-8)
    assert abs(value("refined", 1) - value("recurrent", 1)) > 1e-4


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_lifted_is_the_loss_that_is_trained(recipe: str, tokens: TokenData) -> None:
    """Its nats per target are the objective's next-token loss where every target has bytes."""
    objective = model(recipe)
    loader = Loader(tokens, "validation", CONTEXT, seed=0, shuffle=False)
    batch = loader.batch(range(loader.rows_per_epoch))
    rows = [row for row in range(len(batch.targets)) if (batch.targets[row] > 0).all()][:5]
    assert tokens.tokenizer.bos_id == 0 and len(rows) == 5
    few = OnlyRows(loader, rows)
    found = bits_per_byte(objective, few, "lifted", tokens.tokenizer.token_byte_counts())
    inputs, targets = (torch.from_numpy(array[rows]) for array in batch[:2])
    with torch.no_grad():
        nats = float(objective(inputs, targets).next_token) * targets.numel()
    assert found.value * found.bytes * math.log(2) == pytest.approx(nats, rel=1e-9)


@pytest.mark.parametrize(
    ("recipe", "source"),
    [
        (recipe, source)
        for recipe in ALL_RECIPES
        for source in SOURCES
        if {"lifted": recipe in MAGLEV_RECIPES, "refined": recipe in MEMORY_RECIPES}.get(source, True)
    ],
)
def test_with_mask_and_reset_a_packed_row_is_its_documents_one_by_one(
    recipe: str, source: Source, tokens: TokenData
) -> None:
    objective = model(recipe)
    loader = Loader(tokens, "validation", CONTEXT, seed=0, shuffle=False)
    batch = loader.batch(range(loader.rows_per_epoch))
    packed = [row for row in range(len(batch.starts)) if len(np.unique(batch.starts[row])) > 1]
    assert packed
    counts = tokens.tokenizer.token_byte_counts()
    few, alone = OnlyRows(loader, packed), OneByOne(loader, packed)
    apart = DataConfig(document_mask=True, memory_reset=True)
    together = bits_per_byte(objective, few, source, counts, passes=3, data=apart)
    one_by_one = bits_per_byte(objective, alone, source, counts, passes=3)
    assert together.value == pytest.approx(one_by_one.value, abs=1e-8)
    assert (together.tokens, together.bytes) == (one_by_one.tokens, one_by_one.bytes)
    joined = bits_per_byte(objective, few, source, counts, passes=3)
    assert abs(joined.value - together.value) > 1e-6


class OneByOne(Loader):
    """Each piece of the rows given as a row of its own, from position 0 on."""

    def __init__(self, inner: Loader, rows: list[int]) -> None:
        batch = inner.batch(rows)
        pieces = []
        for row in range(len(rows)):
            starts = np.unique(batch.starts[row]).tolist()
            for first, last in zip(starts, [*starts[1:], inner.context], strict=True):
                tokens = np.full(inner.context, inner.bos_id)
                targets = np.full(inner.context, -1)
                tokens[: last - first] = batch.tokens[row, first:last]
                targets[: last - first] = batch.targets[row, first:last]
                pieces.append((tokens, targets, np.zeros(inner.context, dtype=np.int64)))
        self.pieces = pieces
        self.context, self.rows_per_epoch = inner.context, len(pieces)

    def batch(self, rows: range) -> Batch:  # type: ignore[override]
        return Batch(*(np.stack(arrays) for arrays in zip(*(self.pieces[row] for row in rows), strict=True)))


def test_settings_say_what_becomes_of_documents() -> None:
    starts = np.array([[0, 0, 2, 2], [0, 1, 1, 3]])
    batch = Batch(starts, starts, starts)
    cpu = torch.device("cpu")
    assert documents_of(batch, DataConfig(), cpu).attention_starts is None
    assert documents_of(batch, DataConfig(), cpu).memory_keep is None
    masked = documents_of(batch, DataConfig(document_mask=True), cpu)
    assert isinstance(masked.attention_starts, Tensor) and masked.attention_starts.tolist() == starts.tolist()
    assert masked.memory_keep is None
    reset = documents_of(batch, DataConfig(memory_reset=True), cpu)
    assert reset.attention_starts is None and isinstance(reset.memory_keep, Tensor)
    assert reset.memory_keep.tolist() == [[False, True, False, True], [False, False, True, False]]


def test_a_run_is_loaded_with_or_without_its_prefiller(trained: Train, tmp_path: Path) -> None:
    """What was exported has no prefiller, and the decoder's own memories need none."""
    run = tmp_path / "run"
    shutil.copytree(trained("maglev-separate-1"), run)
    cpu = torch.device("cpu")
    _, whole, step = load_objective(run, cpu, pytest.fail)
    assert step == 6 and any(name.startswith("prefiller.") for name, _ in whole.named_parameters())
    found = checkpoint.newest(run, pytest.fail)
    assert found is not None
    tensors = {"decoder": found.tensors("decoder")}
    shutil.rmtree(run / "checkpoints")
    checkpoint.save(run, 6, tensors, found.state, 1)
    _, alone, _ = load_objective(run, cpu, pytest.fail, with_prefiller=False)
    assert all(name.startswith("decoder.") for name, _ in alone.named_parameters())
    with pytest.raises(RequestError, match="has no prefiller any more"):
        load_objective(run, cpu, pytest.fail)


def test_data_of_another_tokenizer_is_refused(trained: Train, data: Path, other_data: Path) -> None:
    run = trained("swa-ssss")
    assert open_matching_data(run, data).folder == data
    with pytest.raises(RequestError, match=r"does not match the data in .*; prepare the data with --tokenizer"):
        open_matching_data(run, other_data)
