"""Causality, and how far a stack sees: with bits, not with tolerances."""

import pytest
import torch
from torch import Tensor

from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from tests.helpers import (
    MAGLEV_RECIPES,
    VOCAB,
    changed_positions,
    random_tokens,
    small,
    step_through,
)


def other_token_at(tokens: Tensor, slot: int) -> Tensor:
    changed = tokens.clone()
    changed[:, slot] = (tokens[:, slot] + 1) % VOCAB
    return changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("slot", [0, 7, 33, 69])
@pytest.mark.parametrize("recipe", ["transformer-slsl", "swa-ssss", "lrt-slsl", "maglev-shared-0.1"])
def test_the_decoder_is_causal_to_the_bit(recipe: str, slot: int, dtype: torch.dtype) -> None:
    decoder = small(recipe, dtype=dtype).decoder
    tokens = random_tokens(2, 70)
    previous = torch.randn(2, 70, 32, dtype=dtype)
    changed = changed_positions(decoder(tokens, previous), decoder(other_token_at(tokens, slot), previous))
    assert changed[0] == slot


@pytest.mark.parametrize("slot", [1, 33, 69])
def test_the_decoder_is_causal_in_its_memories_to_the_bit(slot: int) -> None:
    decoder = small("maglev-shared-0.1").decoder
    tokens = random_tokens(1, 70)
    previous = torch.randn(1, 70, 32, dtype=torch.float64)
    other = previous.clone()
    other[:, slot] += 1
    changed = changed_positions(decoder(tokens, previous), decoder(tokens, other))
    assert changed[0] == slot


@pytest.mark.parametrize("slot", [0, 7, 33, 69])
@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-separate-1"])
def test_the_prefiller_is_causal_to_the_bit(recipe: str, slot: int) -> None:
    objective = small(recipe, context=80)
    tokens = random_tokens(2, 70)
    changed = changed_positions(
        objective.prefiller(tokens, objective.decoder),
        objective.prefiller(other_token_at(tokens, slot), objective.decoder),
    )
    assert changed == list(range(slot, 70))


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_both_passes_together_are_causal_to_the_bit(recipe: str) -> None:
    """What P predicts at t with Q's memories knows nothing of later tokens."""
    objective = small(recipe, context=80)
    tokens = random_tokens(1, 70)
    for slot in (1, 40, 69):
        before, after = objective.lifted(tokens), objective.lifted(other_token_at(tokens, slot))
        for memory, other in zip(before, after, strict=True):
            assert changed_positions(memory, other)[0] == slot


def reach(decoder: Decoder, tokens: Tensor, slot: int) -> int:
    """How many positions after `slot` still change with its token; parallel, without memory."""
    return changed_positions(decoder(tokens), decoder(other_token_at(tokens, slot)))[-1] - slot


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 4, 9])
@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_reach_without_memory_is_exactly_layers_times_window_less_one(recipe: str, window: int, depth: int) -> None:
    decoder = small(recipe, depth=depth, window=window, context=200).decoder
    tokens = random_tokens(1, 50)
    assert decoder.config.plain_reach == depth * (window - 1)
    for slot in (0, 11):
        assert reach(decoder, tokens, slot) == depth * (window - 1)


@pytest.mark.parametrize("pattern", ["S", "SS", "SSSS", "SSSSSSS"])
def test_every_layer_of_an_all_sliding_pattern_is_bounded_the_last_one_too(pattern: str) -> None:
    decoder = small("swa-ssss", window_pattern=pattern, window=4, context=64).decoder
    assert decoder.config.windows == (4, 4, 4)
    assert reach(decoder, random_tokens(1, 60), 0) == 9


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [("L", (64, 64, 64)), ("LS", (64, 4, 64)), ("SL", (4, 64, 4)), ("SSL", (4, 4, 64)), ("SLSL", (4, 64, 4))],
)
def test_a_pattern_is_tiled_and_never_overridden(pattern: str, windows: tuple[int, ...]) -> None:
    decoder = small("swa-ssss", window_pattern=pattern, window=4, context=64).decoder
    assert decoder.config.windows == windows
    assert [cache.key.shape[1] for cache in decoder.initial_state(1).caches] == list(windows)
    # one full layer anywhere sees everything
    assert reach(decoder, random_tokens(1, 60), 0) == 59


def test_a_full_layer_sees_context_keys_and_no_more() -> None:
    decoder = small("swa-ssss", depth=1, window_pattern="L", window=4, context=20).decoder
    assert reach(decoder, random_tokens(1, 60), 3) == 19


def test_a_window_of_one_sees_the_own_token_only() -> None:
    decoder = small("swa-ssss", window=1).decoder
    alone = decoder(torch.arange(VOCAB)[:, None])[:, 0]
    tokens = random_tokens(2, 40)
    torch.testing.assert_close(decoder(tokens), alone[tokens], rtol=0, atol=1e-12)


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_stepped_with_memory_the_reach_has_no_end(recipe: str) -> None:
    decoder = small(recipe, depth=2, window=3).decoder
    tokens = random_tokens(1, 40)
    changed = changed_positions(step_through(decoder, tokens), step_through(decoder, other_token_at(tokens, 0)))
    assert decoder.config.plain_reach == 4
    assert changed == list(range(40))


def test_one_pass_on_given_memories_reaches_one_position_more_than_without() -> None:
    """The memory that enters at slot t comes from token t - 1."""
    decoder = small("maglev-shared-0.1", depth=2, window=3).decoder
    tokens = random_tokens(1, 30)
    first = decoder(tokens, shift_right(torch.zeros(1, 30, 32, dtype=torch.float64)))
    other = first.clone()
    other[:, 5] += 1
    changed = changed_positions(decoder(tokens, shift_right(first)), decoder(tokens, shift_right(other)))
    assert changed == [6, 7, 8, 9, 10]
