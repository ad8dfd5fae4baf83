"""Rows of different lengths read at once end where each of them ends alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from maglev.inference import fast_read
from maglev.inference.fast_read import RecordedPasses, Recording, positions_at_once, recorded_shape
from maglev.inference.fast_step import FastDecoder
from maglev.inference.ragged import Effort, read_rows_
from maglev.inference.reading import BLOCKS, read_
from maglev.model.chunk import Chunk
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from tests.helpers import assert_same_state, random_tokens, small, step_through

RECIPES = ("swa-ssss", "transformer-slsl", "lrt-slsl", "maglev-shared-0.1")
LENGTHS = (37, 1, 8, 0, 23, 16)


def alone(decoder: Decoder, tokens: Tensor) -> DecoderState:
    state = decoder.initial_state(1)
    with torch.no_grad():
        for token in tokens:
            decoder.step_(token[None], state)
    return state


@pytest.mark.parametrize(
    ("recipe", "delay"), [*((recipe, 1) for recipe in RECIPES), ("maglev-shared-0.1", 8), ("maglev-closed", 5)]
)
@pytest.mark.parametrize(("budget", "chunk"), [(24, None), (24, 11), (3, None), (0, 11)])
def test_every_row_ends_as_if_it_were_alone(recipe: str, delay: int, budget: int, chunk: int | None) -> None:
    """Settled, out of budget and stepped; in one chunk and in several; with rows that read nothing."""
    decoder = small(recipe, scale=0.3, delay=delay).decoder
    tokens, lengths = random_tokens(len(LENGTHS), max(LENGTHS)), torch.tensor(LENGTHS)
    state = decoder.initial_state(len(LENGTHS))
    memory = read_rows_(decoder, tokens, lengths, state, budget=budget, chunk=chunk)
    for row, length in enumerate(LENGTHS):
        expected = alone(decoder, tokens[row, :length])
        assert_same_state(state.row(row), expected, 1e-9)
        if length:
            stepped = step_through(decoder, tokens[row : row + 1, :length])
            assert (memory[row : row + 1, :length] - stepped).abs().max() < 1e-9


def test_over_a_delay_that_nothing_shortens_one_pass_will_do() -> None:
    decoder = small("maglev-shared-0.1", delay=8).decoder
    tokens, effort = random_tokens(len(LENGTHS), max(LENGTHS)), Effort()
    state = decoder.initial_state(len(LENGTHS))
    read_rows_(decoder, tokens, torch.tensor(LENGTHS), state, effort=effort)
    assert effort.passes == 1 and effort.stepped == 0
    # whatever the weights: of ordinary size, where the loop need not contract
    for row, length in enumerate(LENGTHS):
        assert_same_state(state.row(row), alone(decoder, tokens[row, :length]), 1e-9)


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_what_reading_took_is_counted(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small(recipe, scale=0.3).decoder
    tokens, lengths = random_tokens(len(LENGTHS), max(LENGTHS)), torch.tensor(LENGTHS)
    passes, inner = [], Chunk.run
    monkeypatch.setattr(Chunk, "run", lambda chunk, memory: passes.append(chunk.length) or inner(chunk, memory))
    effort = Effort()
    assert effort.passes == 0
    for _ in range(2):
        read_rows_(decoder, tokens, lengths, decoder.initial_state(len(LENGTHS)), chunk=11, effort=effort)
    assert effort.tokens == 2 * tokens.numel() and effort.passed == len(LENGTHS) * sum(passes)
    assert effort.passes == 1 if recipe == "swa-ssss" else effort.passes > 3
    # out of budget: what is not exact by then is stepped
    some = Effort()
    read_rows_(decoder, tokens, lengths, decoder.initial_state(len(LENGTHS)), budget=3, chunk=37, effort=some)
    assert some.passes == (1 if recipe == "swa-ssss" else 3)
    assert some.stepped == (0 if recipe == "swa-ssss" else sum(length - 3 for length in LENGTHS if length > 3))
    steps = Effort()
    read_rows_(decoder, tokens, lengths, decoder.initial_state(len(LENGTHS)), budget=0, effort=steps)
    assert (steps.tokens, steps.passes, steps.stepped) == (0, 0, sum(LENGTHS))


@pytest.mark.parametrize("recipe", RECIPES)
def test_reading_goes_on_from_forks(recipe: str) -> None:
    """From rows at different positions, some of them twice, to lengths of their own."""
    decoder = small(recipe, scale=0.3).decoder
    first, more = random_tokens(3, 19), random_tokens(4, 9, seed=1)
    state = decoder.initial_state(3)
    read_rows_(decoder, first, torch.tensor([19, 5, 12]), state)
    parents, lengths = torch.tensor([0, 0, 1, 2]), torch.tensor([9, 4, 7, 1])
    forked = state.rows(parents)
    read_rows_(decoder, more, lengths, forked)
    for row, (parent, length) in enumerate(zip((0, 0, 1, 2), (9, 4, 7, 1), strict=True)):
        before = first[parent, : (19, 5, 12)[parent]]
        assert_same_state(forked.row(row), alone(decoder, torch.cat((before, more[row, :length]))), 1e-9)
    assert state.position.tolist() == [19, 5, 12]


def test_padding_is_never_looked_at() -> None:
    decoder = small("maglev-shared-0.1", scale=0.3).decoder
    tokens = random_tokens(2, 12)
    other = tokens.clone()
    other[0, 5:] = 0
    found = []
    for given in (tokens, other):
        state = decoder.initial_state(2)
        read_rows_(decoder, given, torch.tensor([5, 12]), state)
        found.append(state)
    assert_same_state(found[0], found[1], 0)


@pytest.mark.parametrize("backend", ["plain", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_neighbours_that_take_longer_change_no_bit(backend: str, dtype: torch.dtype) -> None:
    """A row settles, another goes on: beside one that is padding alone the first ends where it ends here."""
    decoder = small("maglev-shared-0.1", scale=0.9, dtype=dtype).decoder.requires_grad_(False)
    reader = decoder if backend == "plain" else FastDecoder(decoder, "torch")
    tokens, found = random_tokens(2, 40), []
    for length in (40, 0):
        state = reader.initial_state(2)
        memory = read_rows_(reader, tokens, torch.tensor([20, length]), state, chunk=40)
        found.append((state.row(0), memory[0, :20]))
    assert_same_state(found[0][0], found[1][0], 0)
    assert torch.equal(found[0][1], found[1][1])


def test_the_kernels_order_of_work_reads_the_same() -> None:
    """As on a GPU, by the reference of its kernels."""
    decoder = small("maglev-shared-0.1", scale=0.3).decoder
    fast = FastDecoder(decoder, backend="torch")
    tokens, lengths = random_tokens(3, 20), torch.tensor([20, 3, 11])
    ours, theirs = fast.initial_state(3), decoder.initial_state(3)
    read_rows_(fast, tokens, lengths, ours)
    read_rows_(decoder, tokens, lengths, theirs)
    assert_same_state(ours, theirs, 1e-8)


def test_rounding_that_is_left_is_no_reason_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep decoder in bfloat16 whose passes never come under the tolerance: it settles where the change stalls."""
    shape = {"depth": 20, "width": 64, "heads": 4, "window": 8, "context": 64}
    decoder = small("maglev-shared-0.1", scale=0.9, dtype=torch.bfloat16, **shape).decoder
    monkeypatch.setattr(Decoder, "step_", lambda *_: pytest.fail("a token was stepped"))
    state, lengths = decoder.initial_state(2), torch.tensor([90, 60])
    read_rows_(decoder, random_tokens(2, 90), lengths, state)
    assert state.position.tolist() == [90, 60]


class Again:
    """What a CUDA graph does, on a CPU: the same launches on the same addresses."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.memory = work, work()

    def replay(self) -> None:
        self.memory.copy_(self.work())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Passes are recorded as on a GPU, and repeated by computing again. -> the shapes of those that were"""
    made: list[tuple[int, int]] = []

    def record(passes: RecordedPasses, some: range, previous_memory: Tensor | None) -> Recording:
        made.append(tuple(passes.tokens.shape))
        given = None if previous_memory is None else previous_memory.clone()
        work = partial(positions_at_once, passes.fast, passes.tokens, passes.positions, passes.spans, some, given)
        graph: Any = Again(work)
        return Recording(graph, given, graph.memory)

    monkeypatch.setattr(fast_read, "records", lambda device: True)
    monkeypatch.setattr(RecordedPasses, "record", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(fast_read, "SMALLEST_RECORDED", 4)
    return made


def test_recorded_passes_serve_fewer_and_shorter_rows_than_they_were_recorded_for(
    recorded: list[tuple[int, int]],
) -> None:
    decoder = small("maglev-shared-0.1", scale=0.3, dtype=torch.float64, context=64).decoder.requires_grad_(False)
    fast = FastDecoder(decoder, "torch")
    for seed, counts in enumerate([(5, 1, 6), (7,) * 10, tuple(range(1, 10)), (8, 0, 3, 2, 5, 1, 1, 1, 5)]):
        tokens, lengths = random_tokens(len(counts), max(counts), seed=seed), torch.tensor(counts)
        state, expected = fast.initial_state(len(counts)), decoder.initial_state(len(counts))
        memory = [
            read_rows_(each, tokens, lengths, own, chunk=16) for each, own in ((fast, state), (decoder, expected))
        ]
        for row, count in enumerate(counts):
            torch.testing.assert_close(memory[0][row, :count], memory[1][row, :count], rtol=1e-9, atol=1e-9)
        assert_same_state(state, expected, 1e-9)
    # nine rows of up to nine tokens take ten of sixteen, and of eight those that were there
    assert recorded == [(3, 8), (10, 8), (10, 16)]


def test_shapes_of_recordings_are_few_and_not_much_larger() -> None:
    shapes = {recorded_shape(rows, length) for rows in range(1, 129) for length in range(1, 1025)}
    assert len({rows for rows, _ in shapes}) == 24 and recorded_shape(1, 7) == (1, 256)
    assert all(recorded_shape(rows, 600)[0] <= 1.25 * rows for rows in range(1, 2000))


@pytest.mark.parametrize("stride", [1, 2])
def test_recorded_passes_move_on_through_a_prompt(recorded: list[tuple[int, int]], stride: int) -> None:
    """Two prompts of other lengths, from rows that have read before; what is left at the end fits what was made: one
    recording for all positions, or one for every part of a stride and every place where new blocks may begin."""
    decoder = small("maglev-shared-0.1", scale=0.3, dtype=torch.float64, context=64).decoder.requires_grad_(False)
    fast = FastDecoder(decoder, "torch")
    for length in (50, 37):
        state, expected = fast.initial_state(2), decoder.initial_state(2)
        for number in range(2):
            tokens = random_tokens(2, length, seed=length + number)
            both = ((fast, state), (decoder, expected))
            reports = [read_(each, tokens, own, block=5, stride=stride) for each, own in both]
            assert reports[0].passes == reports[1].passes and reports[0].computed == reports[1].computed
            assert_same_state(state, expected, 1e-9)
    assert set(recorded) == {(2, 32)} and len(recorded) <= {1: 1, 2: 2 + BLOCKS}[stride]
