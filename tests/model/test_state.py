"""The decoder's state: constant in size, never shared, rows independent of one another."""

import pytest
import torch
from torch import Tensor

from maglev.model.accounting import state_nbytes
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from tests.helpers import random_tokens, small, step_through


def tensors_of(state: DecoderState) -> list[Tensor]:
    rings = [tensor for cache in state.caches for tensor in (cache.key, cache.value)]
    return [state.memory, state.position, *rings]


def copies_of(state: DecoderState) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors_of(state)]


def same(state: DecoderState, tensors: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(state), tensors, strict=True))


def advance(decoder: Decoder, state: DecoderState, tokens: Tensor) -> DecoderState:
    with torch.no_grad():
        for slot in range(tokens.shape[1]):
            _, state = decoder.step(tokens[:, slot], state)
    return state


SHAPES = [
    {},
    {"kv_heads": 1},
    {"kv_heads": 2, "window": 5, "depth": 2},
    {"window_pattern": "SL", "context": 30},
    {"width": 48, "heads": 3, "window": 1},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "element_size"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 2)])
def test_bytes_equal_the_documented_formula_per_sequence(
    shape: dict[str, int | str], dtype: torch.dtype, element_size: int
) -> None:
    decoder = small("maglev-shared-0.1", dtype=dtype, **shape).decoder
    config = decoder.config
    kv = config.kv_heads * config.head_dim
    # K and V of every layer's window, the memory vector, the position
    formula = (2 * sum(config.windows) * kv + config.width) * element_size + 8
    assert state_nbytes(config, element_size) == formula
    for batch in (1, 3):
        assert decoder.initial_state(batch).nbytes == batch * formula


@pytest.mark.parametrize("recipe", ["swa-ssss", "transformer-slsl", "maglev-shared-0.1"])
def test_bytes_are_the_same_after_w_and_after_50_w_tokens(recipe: str) -> None:
    decoder = small(recipe, depth=2, window=4, context=16).decoder
    state = decoder.initial_state(1)
    tokens = random_tokens(1, 200)
    sizes = {state.nbytes}
    state = advance(decoder, state, tokens[:, :4])
    sizes.add(state.nbytes)
    state = advance(decoder, state, tokens[:, 4:])
    sizes.add(state.nbytes)
    assert state.position.tolist() == [200]
    assert sizes == {state_nbytes(decoder.config, 8)}


def test_the_bytes_that_are_held_are_the_bytes_that_are_told() -> None:
    """No tensor is a view of something larger."""
    decoder = small("maglev-shared-0.1").decoder
    state = advance(decoder, decoder.initial_state(2), random_tokens(2, 10))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_of(state)}
    assert sum(storages.values()) == state.nbytes


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_step_leaves_the_given_state_as_it_was(recipe: str) -> None:
    decoder = small(recipe).decoder
    state = advance(decoder, decoder.initial_state(2), random_tokens(2, 11))
    before = copies_of(state)
    token = random_tokens(2, 1)[:, 0]
    first, following = decoder.step(token, state)
    again, _ = decoder.step(token, state)
    assert same(state, before)
    assert torch.equal(first, again)
    assert not same(following, before) and following.position.tolist() == [12, 12]


def test_step_in_place_equals_step() -> None:
    decoder = small("maglev-shared-0.1").decoder
    pure, running = decoder.initial_state(2), decoder.initial_state(2)
    rings = [cache.key for cache in running.caches]
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        for slot in range(20):
            memory, pure = decoder.step(tokens[:, slot], pure)
            assert torch.equal(decoder.step_(tokens[:, slot], running), memory)
    assert same(running, tensors_of(pure))
    # it really is in place: the rings are the tensors of the start
    assert all(cache.key is ring for cache, ring in zip(running.caches, rings, strict=True))


def test_forks_are_independent_of_each_other_and_of_their_origin() -> None:
    decoder = small("maglev-shared-0.1").decoder
    state = advance(decoder, decoder.initial_state(1), random_tokens(1, 13))
    before = copies_of(state)
    forks = state.fork(3)
    assert len(forks) == 3
    with torch.no_grad():
        for number, fork in enumerate(forks[:2]):
            for token in range(10):
                decoder.step_(torch.tensor([number * 10 + token]), fork)
    assert same(state, before) and same(forks[2], before)
    assert not torch.equal(forks[0].memory, forks[1].memory)
    pointers = [tensor.data_ptr() for each in (state, *forks) for tensor in tensors_of(each)]
    assert len(set(pointers)) == len(pointers)


def test_a_forked_state_goes_on_exactly_like_its_origin() -> None:
    decoder = small("maglev-shared-0.1").decoder
    tokens = random_tokens(1, 30)
    state = advance(decoder, decoder.initial_state(1), tokens[:, :17])
    whole = step_through(decoder, tokens)
    resumed = advance(decoder, state.fork(1)[0], tokens[:, 17:])
    assert torch.equal(resumed.memory, whole[:, -1])


def stack_states(states: list[DecoderState]) -> DecoderState:
    first = states[0].clone()
    for layer, cache in enumerate(first.caches):
        cache.key = torch.cat([state.caches[layer].key for state in states])
        cache.value = torch.cat([state.caches[layer].value for state in states])
    first.memory = torch.cat([state.memory for state in states])
    first.position = torch.cat([state.position for state in states])
    return first


@pytest.mark.parametrize("recipe", ["swa-ssss", "transformer-slsl", "maglev-shared-0.1"])
def test_rows_at_different_positions_equal_separate_runs(recipe: str) -> None:
    decoder = small(recipe, kv_heads=2).decoder
    prompts = [random_tokens(1, length, seed=length) for length in (0, 1, 5, 8, 31)]
    tails = random_tokens(len(prompts), 12, seed=99)
    states = [advance(decoder, decoder.initial_state(1), prompt) for prompt in prompts]
    together = advance(decoder, stack_states(states), tails)
    assert together.position.tolist() == [12, 13, 17, 20, 43]
    for row, state in enumerate(states):
        alone = advance(decoder, state, tails[row : row + 1])
        torch.testing.assert_close(together.memory[row], alone.memory[0], rtol=0, atol=1e-10)


def test_a_restarted_row_is_a_new_sequence_and_the_others_go_on() -> None:
    decoder = small("maglev-shared-0.1").decoder
    tokens, tail = random_tokens(3, 19), random_tokens(3, 15, seed=1)
    state = advance(decoder, decoder.initial_state(3), tokens)
    untouched = advance(decoder, state, tail)
    state.restart(torch.tensor([False, True, False]), cache=True, memory=True)
    assert state.position.tolist() == [19, 0, 19]
    state = advance(decoder, state, tail)
    fresh = step_through(decoder, tail)[:, -1]
    torch.testing.assert_close(state.memory[1], fresh[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(state.memory[[0, 2]], untouched.memory[[0, 2]], rtol=0, atol=1e-10)
    assert (state.memory[1] - untouched.memory[1]).abs().max() > 1e-3


def test_cache_and_memory_restart_separately() -> None:
    decoder = small("maglev-shared-0.1").decoder
    state = advance(decoder, decoder.initial_state(2), random_tokens(2, 5))
    rows = torch.tensor([True, False])
    only_memory, only_cache = state.fork(2)
    only_memory.restart(rows, cache=False, memory=True)
    assert (only_memory.memory[0] == 0).all() and only_memory.position.tolist() == [5, 5]
    assert torch.equal(only_memory.memory[1], state.memory[1])
    only_cache.restart(rows, cache=True, memory=False)
    assert torch.equal(only_cache.memory, state.memory) and only_cache.position.tolist() == [0, 5]


def test_a_restarted_row_forgets_numbers_that_went_wrong() -> None:
    """A row whose sequence ended in NaN or inf must be usable again, not poisoned for as long as the process runs."""
    decoder = small("maglev-shared-0.1").decoder
    state = advance(decoder, decoder.initial_state(2), random_tokens(2, 12))
    for tensor in tensors_of(state):
        if tensor.is_floating_point():
            tensor[0] = float("nan")
    state.restart(torch.tensor([True, False]), cache=True, memory=True)
    state = advance(decoder, state, random_tokens(2, 3))
    assert state.memory.isfinite().all()


def test_positions_are_integers_of_64_bits() -> None:
    assert small("swa-ssss").decoder.initial_state(2).position.dtype == torch.int64


def test_gradients_flow_through_steps() -> None:
    """`step` keeps its graph, so a researcher can train through a short unroll."""
    decoder = small("maglev-shared-0.1", scale=0.5).decoder
    state = decoder.initial_state(1)
    for token in (3, 1, 4):
        memory, state = decoder.step(torch.tensor([token]), state)
    (pull,) = torch.autograd.grad(memory.sum(), decoder.embedding.weight)
    assert pull.isfinite().all()
    assert (pull.abs().sum(1) > 0).nonzero()[:, 0].tolist() == [1, 3, 4]
