"""Position is unbounded: only distances inside the window matter, at 10 as at 10^12."""

import pytest
import torch
from torch import Tensor

from maglev.model.decoder import Decoder, attend_in_parallel
from tests.helpers import random_tokens, small

FAR = [10**7, 10**12]


def at_offset(decoder: Decoder, tokens: Tensor, previous: Tensor, offset: int) -> Tensor:
    """The parallel pass with its first token at position `offset`."""
    config = decoder.config
    attends = attend_in_parallel(config, config.windows, tokens, None, dtype=torch.float32)
    return decoder.run(tokens, torch.arange(tokens.shape[1]) + offset, previous, attends)


def stepped_from(decoder: Decoder, tokens: Tensor, offset: int) -> Tensor:
    state = decoder.initial_state(tokens.shape[0])
    state.position = state.position + offset
    memories = []
    with torch.no_grad():
        for slot in range(tokens.shape[1]):
            memory, state = decoder.step(tokens[:, slot], state)
            memories.append(memory)
    return torch.stack(memories, dim=1)


@pytest.mark.parametrize("offset", FAR)
@pytest.mark.parametrize("recipe", ["swa-ssss", "transformer-slsl", "maglev-shared-0.1"])
def test_the_same_content_far_out_gives_the_same_outputs(recipe: str, offset: int) -> None:
    decoder = small(recipe, dtype=torch.float32, width=128, heads=1, window=16, context=64).decoder
    tokens, previous = random_tokens(2, 50), torch.randn(2, 50, 128)
    near, far = at_offset(decoder, tokens, previous, 0), at_offset(decoder, tokens, previous, offset)
    torch.testing.assert_close(near, decoder(tokens, previous), rtol=0, atol=0)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", FAR)
def test_stepping_far_out_gives_the_outputs_of_position_zero(offset: int) -> None:
    """Once the window holds tokens only, nothing tells where a sequence without memory began."""
    decoder = small("swa-ssss", dtype=torch.float32, width=128, heads=1, window=16, context=64).decoder
    tokens = random_tokens(2, 80)
    near, far = stepped_from(decoder, tokens, 0), stepped_from(decoder, tokens, offset)
    flushed = slice(decoder.config.plain_reach, None)
    torch.testing.assert_close(far[:, flushed], near[:, flushed], rtol=0, atol=1e-5)


@pytest.mark.parametrize("offset", FAR)
def test_stepping_with_memory_far_out_gives_the_same_outputs(offset: int) -> None:
    """Both begin with a full ring of the same content, one at W, one far out; the map contracts at this scale."""
    decoder = small("maglev-shared-0.1", scale=0.3, dtype=torch.float32, width=128, heads=2, window=16).decoder
    tokens = random_tokens(2, 60)
    near, far = stepped_from(decoder, tokens, 16), stepped_from(decoder, tokens, offset)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-5)


def test_order_inside_the_window_does_matter() -> None:
    """The counter-check: rotation is there, and a swap of two earlier tokens is seen."""
    decoder = small("swa-ssss", depth=1).decoder
    tokens = torch.tensor([[1, 2, 3, 4]])
    swapped = torch.tensor([[2, 1, 3, 4]])
    assert (decoder(tokens)[0, -1] - decoder(swapped)[0, -1]).abs().max() > 1e-3
