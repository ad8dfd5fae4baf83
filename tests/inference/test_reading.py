"""All ways to compute a state end in the same one: passes, steps, chunks, going on from a saved state, ragged rows."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maglev.inference.fast_step import FastDecoder
from maglev.inference.reading import default_chunk, one_pass, read_
from maglev.inference.state import State, load_state
from maglev.model.chunk import ChunkPass
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.model.state import DecoderState
from tests.helpers import random_tokens, small, step_through

BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}


def contracting(recipe: str, dtype: torch.dtype, **shape: int) -> Decoder:
    """Weights small enough that a perturbation of the memories shrinks; `test_the_weights_contract` measures it."""
    return small(recipe, scale=0.3, dtype=dtype, **shape).decoder


def contraction(decoder: Decoder, tokens: torch.Tensor) -> float:
    """How much a small change of all memories shrinks in one pass."""
    memory = step_through(decoder, tokens)
    noise = 1e-4 * torch.randn(memory.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        moved = decoder(tokens, shift_right(memory + noise.to(memory.dtype))) - decoder(tokens, shift_right(memory))
    return float(moved.norm() / noise.norm())


def stepped(decoder: Decoder, tokens: torch.Tensor, state: DecoderState) -> DecoderState:
    state = state.clone()
    with torch.no_grad():
        for slot in range(tokens.shape[1]):
            decoder.step_(tokens[:, slot], state)
    return state


def assert_same_state(one: DecoderState, other: DecoderState, bound: float) -> None:
    assert torch.equal(one.position, other.position)
    torch.testing.assert_close(one.memory, other.memory, rtol=0, atol=bound)
    for mine, theirs in zip(one.caches, other.caches, strict=True):
        torch.testing.assert_close(mine.key, theirs.key, rtol=0, atol=bound)
        torch.testing.assert_close(mine.value, theirs.value, rtol=0, atol=bound)


CASES = st.fixed_dictionaries(
    {
        "recipe": st.sampled_from(["swa-ssss", "transformer-slsl", "lrt-slsl", "maglev-shared-0.1"]),
        "dtype": st.sampled_from([torch.float64, torch.float32]),
        "depth": st.integers(1, 3),
        "window": st.integers(1, 9),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "length": st.integers(1, 60),
        "before": st.tuples(st.integers(0, 20), st.integers(0, 20)),
        "chunk": st.sampled_from([None, 1, 5, 16, 100]),
        "stride": st.sampled_from([1, 2, 4, 7]),
    }
)


@settings(max_examples=40, deadline=None)
@given(case=CASES)
def test_every_way_to_compute_a_state_gives_the_same_one(case: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    bound = BOUNDS[case["dtype"]]
    shape = {key: case[key] for key in ("depth", "window", "kv_heads")}
    decoder = contracting(case["recipe"], case["dtype"], **shape)
    tokens = random_tokens(2, case["length"], seed=1)
    # rows of one batch at different positions
    alone = [stepped(decoder, random_tokens(1, n, seed=2), decoder.initial_state(1)) for n in case["before"]]
    ragged = DecoderState.join(alone)
    expected = stepped(decoder, tokens, ragged)
    read = ragged.clone()
    report = read_(decoder, tokens, read, chunk=case["chunk"], stride=case["stride"])
    assert_same_state(read, expected, bound)
    # the same on what the kernels compute
    twin = ragged.clone()
    read_(FastDecoder(decoder, "torch"), tokens, twin, chunk=case["chunk"], stride=case["stride"])
    assert_same_state(twin, expected, bound)
    assert report.tokens == case["length"] and len(report.passes) >= 1
    for row, state in enumerate(alone):
        assert_same_state(expected.row(row), stepped(decoder, tokens[row : row + 1], state), bound)
    # half of it, saved, loaded, and on
    half = case["length"] // 2
    first = ragged.row(0)
    read_(decoder, tokens[:1, :half], first) if half else None
    path = tmp_path_factory.mktemp("state") / "s.safetensors"
    State(first, "model").save(path)
    loaded = load_state(path, decoder, "model").inner
    read_(decoder, tokens[:1, half:], loaded)
    assert_same_state(loaded, expected.row(0), bound)
    # one parallel pass over the stepped memories gives them back
    memory = step_through(decoder, tokens)
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens, shift_right(memory)), memory, rtol=0, atol=bound)


@pytest.mark.parametrize("recipe", ["lrt-slsl", "maglev-shared-0.1"])
def test_the_weights_contract(recipe: str) -> None:
    assert contraction(contracting(recipe, torch.float64), random_tokens(2, 60)) < 1


def test_settles_in_few_passes_where_the_map_contracts() -> None:
    decoder = contracting("maglev-shared-0.1", torch.float32)
    report = read_(decoder, random_tokens(1, 200), decoder.initial_state(1))
    assert report.stepped == 0
    assert max(report.passes) < default_chunk(decoder.config)


def test_a_chunk_that_does_not_settle_is_finished_by_stepping() -> None:
    """On weights that expand, no two orders of arithmetic agree on a trajectory; the residual is at rounding."""
    decoder = small("maglev-shared-0.1", scale=4.0).decoder
    tokens = random_tokens(1, 60)
    assert contraction(decoder, tokens) > 1
    state = decoder.initial_state(1)
    report = read_(decoder, tokens, state, budget=6, chunk=30)
    assert report.passes == [6, 6] and report.stepped == 2 * 24
    before = decoder.initial_state(1)
    read_(decoder, tokens[:, :-1], before, budget=6, chunk=30)
    memory, _ = decoder.step(tokens[:, -1], before)
    torch.testing.assert_close(memory, state.memory, rtol=0, atol=1e-9)


@pytest.mark.parametrize("stride", [1, 2, 4, 50])
def test_positions_up_to_the_number_of_passes_are_exact_whatever_the_weights(stride: int) -> None:
    decoder = small("maglev-shared-0.1", scale=4.0).decoder
    tokens = random_tokens(2, 40)
    expected = step_through(decoder, tokens)
    chunk, memory = ChunkPass(decoder, tokens, decoder.initial_state(2)), torch.zeros_like(expected)
    for passes in range(1, 6):
        with torch.no_grad():
            memory = one_pass(chunk, memory, 1 if passes == 1 else stride)
        torch.testing.assert_close(memory[:, :passes], expected[:, :passes], rtol=0, atol=1e-11)


def test_taking_the_newest_memories_settles_in_fewer_passes() -> None:
    """After as many passes, every `stride`-th position at a time is nearer to the stepped memories than all at once."""
    decoder = small("maglev-shared-0.1", scale=0.8).decoder
    tokens = random_tokens(1, 120)
    expected = step_through(decoder, tokens)
    errors = []
    for stride in (1, 4):
        chunk, memory = ChunkPass(decoder, tokens, decoder.initial_state(1)), torch.zeros_like(expected)
        with torch.no_grad():
            for number in range(8):
                memory = one_pass(chunk, memory, stride if number else 1)
        errors.append(float((memory - expected).norm()))
    assert errors[1] < errors[0] / 2


def test_fixed_passes_are_taken_and_their_changes_told() -> None:
    decoder = contracting("maglev-shared-0.1", torch.float64)
    tokens, state = random_tokens(1, 60), decoder.initial_state(1)
    report = read_(decoder, tokens, state, passes=30, chunk=22)
    assert report.passes == [30, 30, 30] and report.stepped == 0 and [len(each) for each in report.changes] == [30] * 3
    assert all(each[-1] < 1e-12 < each[2] for each in report.changes)
    assert_same_state(state, stepped(decoder, tokens, decoder.initial_state(1)), 1e-8)


def test_default_chunk_is_as_far_as_one_pass_carries() -> None:
    decoder = small("maglev-shared-0.1").decoder
    assert default_chunk(decoder.config) == 3 * 7 + 1


def test_reading_leaves_no_trace_of_the_prompt_in_the_state_size(tmp_path: Path) -> None:
    decoder = contracting("maglev-shared-0.1", torch.float32)
    sizes = set()
    for length in (8, 400):
        state = decoder.initial_state(1)
        read_(decoder, random_tokens(1, length), state)
        State(state, "model").save(tmp_path / "s.safetensors")
        sizes.add((state.nbytes, (tmp_path / "s.safetensors").stat().st_size))
    assert len(sizes) == 1
