"""All ways to compute a state end in the same one: passes, steps, chunks, going on from a saved state, ragged rows."""

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maglev.inference import reading
from maglev.inference.fast_step import FastDecoder
from maglev.inference.reading import (
    TOLERANCE,
    block_changes,
    default_block,
    default_chunk,
    have_settled,
    read_,
    relative_changes,
)
from maglev.inference.state import State, load_state
from maglev.model.chunk import ChunkPass
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.model.state import DecoderState
from maglev.recipes import run_config
from tests.helpers import random_tokens, small, step_through

BOUNDS = {torch.float64: 1e-8, torch.float32: 1e-4}


def contracting(recipe: str, dtype: torch.dtype, scale: float = 0.3, **shape: int) -> Decoder:
    """Weights small enough that a perturbation of the memories shrinks; `contraction` measures it."""
    return small(recipe, scale=scale, dtype=dtype, **shape).decoder


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
        "scale": st.sampled_from([0.3, 0.6, 0.8]),
        "depth": st.integers(1, 3),
        "window": st.integers(1, 9),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "length": st.integers(1, 60),
        "before": st.tuples(st.integers(0, 20), st.integers(0, 20)),
        "block": st.sampled_from([None, 1, 5, 16, 100]),
        "blocks": st.sampled_from([1, 2, 4]),
        "stride": st.sampled_from([1, 2, 3]),
    }
)


@settings(max_examples=20, deadline=None)
@given(case=CASES)
def test_every_way_to_compute_a_state_gives_the_same_one(case: dict, tmp_path_factory: pytest.TempPathFactory) -> None:
    bound = BOUNDS[case["dtype"]]
    shape = {key: case[key] for key in ("depth", "window", "kv_heads")}
    decoder = contracting(case["recipe"], case["dtype"], case["scale"], **shape)
    tokens = random_tokens(2, case["length"], seed=1)
    assume(decoder.injection is None or contraction(decoder, tokens) < 0.85)
    # rows of one batch at different positions
    alone = [stepped(decoder, random_tokens(1, n, seed=2), decoder.initial_state(1)) for n in case["before"]]
    ragged = DecoderState.join(alone)
    expected = stepped(decoder, tokens, ragged)
    read = ragged.clone()
    how = {key: case[key] for key in ("block", "blocks", "stride")}
    report = read_(decoder, tokens, read, **how)
    assert_same_state(read, expected, bound)
    # the same on what the kernels compute
    twin = ragged.clone()
    read_(FastDecoder(decoder, "torch"), tokens, twin, **how)
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


def test_the_weights_contract_and_not_all_alike() -> None:
    found = [
        contraction(contracting("maglev-shared-0.1", torch.float64, scale), random_tokens(2, 60))
        for scale in (0.3, 0.6, 0.8)
    ]
    assert found[0] < 0.2 < found[2] < 0.85 and found == sorted(found)


@pytest.mark.parametrize(("scale", "depth"), [(0.3, 3), (0.7, 8), (0.9, 8)])
def test_bfloat16_is_read_as_well_as_it_is_stepped(scale: float, depth: int) -> None:
    """Against the same weights in float64; what was left to settle is under a hundredth, or rounding."""
    shape = {"depth": depth, "width": 64, "heads": 4, "window": 8, "context": 64}
    low = small("maglev-shared-0.1", scale=scale, dtype=torch.bfloat16, **shape).decoder
    exact = small("maglev-shared-0.1", scale=scale, dtype=torch.bfloat16, **shape).decoder.double()
    tokens = random_tokens(2, 100)
    expected = stepped(exact, tokens, exact.initial_state(2)).memory
    errors = []
    for state in (stepped(low, tokens, low.initial_state(2)), low.initial_state(2)):
        if not state.position.any():
            report = read_(low, tokens, state)
        errors.append(float((state.memory.double() - expected).norm() / expected.norm()))
    assert report.stepped == 0 and max(report.passes) < 24
    assert errors[1] <= 2 * errors[0] + 0.01


def test_a_stride_makes_more_of_a_pass_where_the_last_memory_carries_the_error() -> None:
    """With a window of 1 nothing else does. A pass makes one position exact, with a stride of 4 it makes four."""
    decoder = contracting("maglev-closed", torch.float64, scale=0.5, depth=2, window=1)
    tokens = random_tokens(1, 32)
    exact = step_through(decoder, tokens)

    def distances(stride: int) -> list[float]:
        found = []
        for passes in (1, 2, 3):
            memories: list[torch.Tensor] = []
            how = {"block": 32, "stride": stride, "passes": passes, "memories": memories}
            report = read_(decoder, tokens, decoder.initial_state(1), **how)
            assert report.computed == 32 * passes
            found.append(torch.linalg.vector_norm(torch.cat(memories, dim=1) - exact, dim=-1)[0])
        return found

    at_once, apart = distances(1), distances(4)
    assert torch.equal(at_once[0], apart[0])
    for passes in (2, 3):
        one, four = at_once[passes - 1], apart[passes - 1]
        assert one[:passes].max() < 1e-9 < one[passes]
        assert four[: 4 * (passes - 1)].max() < 1e-9 < four[4 * passes - 3 :].max()
        assert four.norm() < one.norm()
    assert apart[2].norm() < at_once[2].norm() / 2


def test_every_row_has_a_change_of_its_own() -> None:
    before = torch.ones(3, 4, 8)
    after = before * torch.tensor([1.0, 2.0, 1.0])[:, None, None]
    assert relative_changes(before, after).tolist() == [0.0, 0.5, 0.0]


def test_every_block_has_a_change_of_its_own() -> None:
    """The last one is shorter."""
    before, after = torch.ones(1, 5, 8), torch.ones(1, 5, 8)
    after[:, 2:4] = 2.0
    after[:, 4] = 4.0
    assert block_changes(before, after, 2).tolist() == [[0.0, 0.5, 0.75]]


def test_the_row_that_moves_longest_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row moves on for three more passes than the first."""
    left = iter([[1.0, 1.0], [0.0, 0.5], [0.0, 0.3], [0.0, 0.0]])
    monkeypatch.setattr(reading, "block_changes", lambda before, after, block: torch.tensor(next(left))[:, None])
    decoder = contracting("maglev-shared-0.1", torch.float64)
    assert read_(decoder, random_tokens(2, 20), decoder.initial_state(2), block=20).passes == [4]


def test_what_counts_as_settled() -> None:
    assert {dtype: TOLERANCE[dtype] for dtype in (torch.float32, torch.bfloat16)} == {
        torch.float32: 3e-7,
        torch.bfloat16: 1e-2,
    }

    def settled(*changes: float) -> bool:
        return bool(have_settled(torch.tensor([torch.nan, torch.nan, *changes])[-3:], 0.01))

    assert settled(1.0, 0.5, 0.01) and settled(0.005) and not settled(1.0, 0.5, 0.011)
    # what is still to come is under it, at the slower of the last two rates
    assert settled(1.0, 0.3, 0.09, 0.021) and not settled(1.0, 0.3, 0.09, 0.027) and not settled(1.0, 0.1, 0.06, 0.02)
    assert not settled(1.0, 0.2, 0.21, 0.22)
    # rounding is left: the change does not fall any more, at a level that is near
    assert settled(1.0, 0.03, 0.0205, 0.02, 0.0199)
    assert not settled(1.0, 0.2, 0.19, 0.185) and not settled(1.0, 0.04, 0.03, 0.02)


def test_settles_in_few_passes_where_the_map_contracts() -> None:
    decoder = contracting("maglev-shared-0.1", torch.float32)
    report = read_(decoder, random_tokens(1, 200), decoder.initial_state(1))
    assert report.stepped == 0
    assert max(report.passes) < 12


def test_a_block_that_does_not_settle_is_finished_by_stepping() -> None:
    """On weights that expand, no two orders of arithmetic agree on a trajectory; the residual is at rounding, of every
    position, and the rings are those of one pass over the memories."""
    decoder = small("maglev-shared-0.1", scale=4.0).decoder
    tokens = random_tokens(2, 60)
    assert contraction(decoder, tokens) > 1
    state, found = decoder.initial_state(2), []
    report = read_(decoder, tokens, state, budget=6, block=30, memories=found)
    # after stepping the next block begins anew
    assert report.passes == [6, 6] and report.stepped == 2 * (30 - 6) and report.computed == 6 * (60 + 30)
    memory = torch.cat(found, dim=1)
    chunk, again = ChunkPass(decoder, tokens, decoder.initial_state(2)), decoder.initial_state(2)
    with torch.no_grad():
        torch.testing.assert_close(chunk.run(memory), memory, rtol=0, atol=1e-11)
    chunk.commit_(again, 60)
    assert_same_state(state, again, 1e-10)


def test_the_budget_is_taken_where_none_is_given() -> None:
    decoder = small("maglev-shared-0.1", scale=4.0).decoder
    report = read_(decoder, random_tokens(1, 150), decoder.initial_state(1), block=150)
    assert report.passes == [24] and report.stepped == 150 - 24


def test_memory_is_bounded_by_the_chunk() -> None:
    config = run_config("maglev-shared-0.1", 20, {"model.context": 16384, "model.window": 8192}).model
    assert default_chunk(config) == 8192
    plain = run_config("swa-ssss", 20, {"model.context": 8192, "model.window": 4096}).model
    assert plain.plain_reach > 8192 and default_chunk(plain) == 8192


def test_positions_up_to_the_number_of_passes_are_exact_whatever_the_weights() -> None:
    decoder = small("maglev-shared-0.1", scale=4.0).decoder
    tokens = random_tokens(2, 40)
    expected = step_through(decoder, tokens)
    chunk, memory = ChunkPass(decoder, tokens, decoder.initial_state(2)), torch.zeros_like(expected)
    for passes in range(1, 6):
        with torch.no_grad():
            memory = chunk.run(memory)
        torch.testing.assert_close(memory[:, :passes], expected[:, :passes], rtol=0, atol=1e-10)


def read_memories(decoder: Decoder, tokens: torch.Tensor, **how: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    read_(decoder, tokens, decoder.initial_state(tokens.shape[0]), memories=found, **how)
    return torch.cat(found, dim=1)


def test_blocks_that_begin_one_after_another_settle_in_fewer_passes() -> None:
    """After as many passes over as many positions at a time, they are nearer to the stepped memories."""
    decoder = small("maglev-shared-0.1", scale=0.8).decoder
    tokens = random_tokens(1, 120)
    expected = step_through(decoder, tokens)
    together = read_memories(decoder, tokens, passes=4, block=16, blocks=1)
    in_turn = read_memories(decoder, tokens, passes=4, block=4, blocks=4)
    assert float((in_turn - expected).norm()) < float((together - expected).norm()) / 2


def test_what_moves_on_holds_the_keys_of_what_it_left_behind() -> None:
    """By single positions and by more than a window at a time, with rows that begin inside of one. The state is
    rewritten only when it is asked for."""
    decoder = contracting("maglev-shared-0.1", torch.float64)
    before = [stepped(decoder, random_tokens(1, n, seed=2), decoder.initial_state(1)) for n in (0, 3, 30)]
    state, tokens = DecoderState.join(before), random_tokens(3, 58, seed=4)
    given, expected = state.clone(), state.clone()
    with torch.no_grad():
        memory = torch.stack([decoder.step_(token, expected).clone() for token in tokens.T], dim=1)
        chunk, done = ChunkPass(decoder, tokens[:, :9], state, room=20), 0
        for count, more in ((1, 3), (0, 9), (11, 2), (4, 13), (20, 20), (2, 2)):
            last = done + chunk.length
            torch.testing.assert_close(chunk.run(memory[:, done:last]), memory[:, done:last], rtol=0, atol=1e-11)
            chunk.advance_(count, tokens[:, last : last + more])
            done += count
        assert done + chunk.length == 58
        chunk.run(memory[:, done:])
    assert_same_state(state, given, 0)
    chunk.commit_(state, chunk.length)
    assert_same_state(state, expected, 1e-11)


def test_fixed_passes_are_taken_and_their_changes_told() -> None:
    decoder = contracting("maglev-shared-0.1", torch.float64)
    tokens, state = random_tokens(1, 60), decoder.initial_state(1)
    report = read_(decoder, tokens, state, passes=30, block=22)
    assert report.passes == [30, 30, 30] and report.stepped == 0 and [len(each) for each in report.changes] == [30] * 3
    assert report.computed == 30 * 60 and report.passes_per_token == 30
    assert all(each[-1] < 1e-12 < each[2] for each in report.changes)
    assert_same_state(state, stepped(decoder, tokens, decoder.initial_state(1)), 1e-8)


def test_blocks_are_a_window_and_without_memory_as_far_as_one_pass_carries() -> None:
    with_memory, without = (small(recipe).decoder.config for recipe in ("maglev-shared-0.1", "swa-ssss"))
    assert (default_block(with_memory), default_chunk(with_memory)) == (8, 32)
    assert default_block(without) == default_chunk(without) == 3 * 7 + 1


def test_other_threads_have_their_turn_in_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in the same state, and the lock is free in between."""
    monkeypatch.setattr(reading, "TURN", 3)
    decoder = contracting("maglev-shared-0.1", torch.float64)
    turns = 0

    class Turns:
        def __enter__(self) -> None:
            nonlocal turns
            turns += 1

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(reading, "alone", lambda decoder: Turns())
    tokens, state = random_tokens(2, 50), decoder.initial_state(2)
    found: list[torch.Tensor] = []
    report = read_(decoder, tokens, state, block=5, memories=found)
    assert turns == 4 and report.tokens == 50 and len(report.passes) == 10
    assert_same_state(state, stepped(decoder, tokens, decoder.initial_state(2)), 1e-8)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in found)


def test_blocks_longer_than_the_prompt_are_as_long_as_it() -> None:
    decoder = contracting("maglev-shared-0.1", torch.float64)
    tokens, state = random_tokens(1, 9), decoder.initial_state(1)
    report = read_(decoder, tokens, state, block=10**13)
    assert len(report.passes) == 1 and report.computed == 9 * report.passes[0]
    assert_same_state(state, stepped(decoder, tokens, decoder.initial_state(1)), 1e-8)


def test_an_empty_prompt_takes_no_passes() -> None:
    decoder = contracting("maglev-shared-0.1", torch.float64)
    report = read_(decoder, random_tokens(1, 0), decoder.initial_state(1))
    assert (report.passes, report.computed, report.passes_per_token) == ([], 0, 0.0)


def test_fewer_passes_than_blocks_need_room_for_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded on a GPU is what is counted."""
    rooms = []
    plain = reading.chunk_of
    monkeypatch.setattr(reading, "chunk_of", lambda *given: rooms.append(given[-1]) or plain(*given))
    decoder = contracting("maglev-shared-0.1", torch.float64)
    for passes in (1, 2, 4, 6):
        read_(decoder, random_tokens(1, 50), decoder.initial_state(1), block=5, blocks=4, passes=passes)
    assert rooms == [5, 10, 20, 20]


def test_reading_leaves_no_trace_of_the_prompt_in_the_state_size(tmp_path: Path) -> None:
    decoder = contracting("maglev-shared-0.1", torch.float32)
    sizes = set()
    for length in (8, 400):
        state = decoder.initial_state(1)
        read_(decoder, random_tokens(1, length), state)
        State(state, "model").save(tmp_path / "s.safetensors")
        sizes.add((state.nbytes, (tmp_path / "s.safetensors").stat().st_size))
    assert len(sizes) == 1
