"""A decoder that goes on and on: memory flat, positions exact, no drift."""

import resource

import pytest
import torch

from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.ops.reference import rotate
from maglev.ops.rotation import rotation
from tests.helpers import random_tokens, small


def resident_kilobytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@torch.inference_mode()
def walk(decoder: Decoder, state: DecoderState, count: int) -> None:
    """Greedy, so that what is written depends on all that was."""
    token = torch.tensor([1])
    for _ in range(count):
        memory = decoder.step_(token, state)
        token = decoder.readout(memory).argmax(-1)


def moved_to_the_start(decoder: Decoder, state: DecoderState, window: int) -> DecoderState:
    """The same window content at the smallest position that has a full ring and the same slots.

    A mixed key is a sum of keys rotated at its slot, so turning it back moves it as if it had been written there.
    """
    copy = state.clone()
    back = copy.position - (copy.position % window + window)
    copy.position = copy.position - back
    for cache in copy.caches:
        cache.key = rotate(cache.key, *rotation(-back[:, None], decoder.frequencies, cache.key.dtype))
    return copy


def check_long_run(tokens: int, warm: int) -> None:
    decoder = small("maglev-shared-0.1", scale=0.3, dtype=torch.float32, depth=2, window=8).decoder
    state = decoder.initial_state(1)
    walk(decoder, state, warm)
    before, size = resident_kilobytes(), state.nbytes
    walk(decoder, state, tokens - warm)
    assert state.position.tolist() == [tokens]
    assert state.nbytes == size
    assert resident_kilobytes() - before < 8 * 1024
    near = moved_to_the_start(decoder, state, 8)
    with torch.inference_mode():
        for token in random_tokens(1, 100)[0]:
            far_memory = decoder.step_(token[None], state)
            near_memory = decoder.step_(token[None], near)
            torch.testing.assert_close(far_memory, near_memory, rtol=0, atol=1e-5)


def test_some_thousand_tokens() -> None:
    check_long_run(tokens=4000, warm=500)


@pytest.mark.soak
def test_a_million_tokens() -> None:
    check_long_run(tokens=1_000_000, warm=1000)
