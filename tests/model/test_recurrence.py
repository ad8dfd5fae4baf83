"""Stepping on a bounded state and one parallel pass are the same function."""

import pytest
import torch

from maglev.model.memory import shift_right
from tests.helpers import (
    ALL_RECIPES,
    MEMORY_RECIPES,
    PLAIN_RECIPES,
    assert_parallel_is_stepped,
    random_tokens,
    small,
    step_through,
)

CONTEXT, WINDOW = 24, 8
LENGTHS = (1, WINDOW - 3, WINDOW, WINDOW + 1, CONTEXT, CONTEXT + 1, 90)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_parallel_pass_over_the_shifted_stepped_memories_gives_the_same_memories(recipe: str, kv_heads: int) -> None:
    """Below, at and far beyond W, and beyond the `context` keys that an L layer keeps."""
    decoder = small(recipe, kv_heads=kv_heads, context=CONTEXT, window=WINDOW).decoder
    assert_parallel_is_stepped(decoder, LENGTHS)


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_the_identity_holds_for_a_window_of_one(recipe: str) -> None:
    decoder = small(recipe, context=6, window=1).decoder
    tokens = random_tokens(2, 20)
    stepped = step_through(decoder, tokens)
    torch.testing.assert_close(decoder(tokens, shift_right(stepped)), stepped, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", PLAIN_RECIPES)
def test_without_memory_stepping_is_the_parallel_pass(recipe: str) -> None:
    decoder = small(recipe).decoder
    tokens = random_tokens(2, 60)
    torch.testing.assert_close(decoder(tokens), step_through(decoder, tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", PLAIN_RECIPES)
def test_a_decoder_without_memory_ignores_previous_memory(recipe: str) -> None:
    decoder = small(recipe).decoder
    tokens = random_tokens(2, 20)
    given = torch.randn(2, 20, 32, dtype=torch.float64)
    assert torch.equal(decoder(tokens, given), decoder(tokens))


@pytest.mark.parametrize("recipe", MEMORY_RECIPES)
def test_no_memory_is_another_function_than_zero_memory(recipe: str) -> None:
    """Zeros leave the local gate in place, None does not."""
    decoder = small(recipe).decoder
    tokens = random_tokens(1, 12)
    zeros = torch.zeros(1, 12, 32, dtype=torch.float64)
    assert (decoder(tokens, None) - decoder(tokens, zeros)).abs().max() > 1e-3
    # with neutral gates the two agree, which is how every run starts
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "local_gate" in name:
                parameter.zero_()
    torch.testing.assert_close(decoder(tokens, None), decoder(tokens, zeros), rtol=0, atol=1e-12)


def test_every_memory_in_the_window_matters_and_none_before_it() -> None:
    """One layer: the output at t reads m_{t-W}, ..., m_{t-1} and nothing older."""
    decoder = small("maglev-shared-0.1", depth=1, window=5).decoder
    tokens = random_tokens(1, 16)
    previous = torch.randn(1, 16, 32, dtype=torch.float64, requires_grad=True)
    out = decoder(tokens, previous)
    (pull,) = torch.autograd.grad(out[0, 12].sum(), previous)
    assert pull[0].abs().sum(-1).nonzero()[:, 0].tolist() == [8, 9, 10, 11, 12]


def test_shifting_puts_zeros_first_and_drops_the_last() -> None:
    memory = torch.randn(2, 4, 3)
    shifted = shift_right(memory)
    assert (shifted[:, 0] == 0).all() and torch.equal(shifted[:, 1:], memory[:, :-1])
    keep = torch.tensor([[True, True, False, True], [False, True, True, True]])
    kept = shift_right(memory, keep)
    assert (kept[0, 2] == 0).all() and torch.equal(kept[0, [1, 3]], memory[0, [0, 2]])
    assert torch.equal(kept[1], shifted[1])
    assert (shift_right(memory[:, :1]) == 0).all()
