"""What the loop's diagnostics say about decoders whose loops are known."""

import math
from dataclasses import asdict

import pytest
import torch

from maglev.evaluate.diagnostics import DISTURBANCE, STEPS, loop_diagnostics, told_of
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from tests.helpers import random_tokens, small, step_through


def decoder_with(scale: float, dtype: torch.dtype = torch.float64) -> Decoder:
    return small("maglev-shared-0.1", scale=scale, dtype=dtype).decoder


def test_a_pass_is_what_its_definition_says() -> None:
    decoder, tokens = decoder_with(0.5), random_tokens(3, 40)
    before = tokens[:, :24]
    memory = step_through(decoder, before)
    noise = torch.randn(memory.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * DISTURBANCE
    with torch.no_grad():
        moved = decoder(before, shift_right(memory + noise)) - decoder(before, shift_right(memory))
    found = loop_diagnostics(decoder, tokens)
    assert found.contraction_pass == pytest.approx(float(moved.norm() / noise[:, :-1].norm()), rel=1e-9)


def test_small_weights_contract_and_large_ones_expand() -> None:
    tokens = random_tokens(3, 60)
    small_weights, large_weights = (loop_diagnostics(decoder_with(scale), tokens) for scale in (0.3, 4.0))
    assert small_weights.contraction_pass < 1 < large_weights.contraction_pass
    assert small_weights.contraction_step < 1
    assert small_weights.contraction_step < large_weights.contraction_step


def test_without_memory_projections_nothing_is_carried() -> None:
    decoder = decoder_with(0.5)
    assert decoder.injection is not None
    with torch.no_grad():
        for projection in (decoder.injection.memory_key_proj, decoder.injection.memory_value_proj):
            projection.weight.zero_()
    found = loop_diagnostics(decoder, random_tokens(2, 30))
    assert (found.contraction_pass, found.contraction_step) == (0.0, 0.0)
    assert found.disturbance_left == [0.0] * 4 + [0.0] and found.disturbance_steps == 15
    assert found.memory_share == [0.0] * decoder.config.depth


@pytest.mark.parametrize(("injection", "delay"), [("shared_kv", 8), ("shared_kv", 20), ("shared_kv+residual", 20)])
def test_with_a_delay_all_that_a_state_holds_is_disturbed(injection: str, delay: int) -> None:
    """And followed until it was read: nothing reads the last memory at once where keys and values take older ones."""
    shape = {"context": 80, "window": 24, "injection": injection, "delay": delay}
    decoder = small("maglev-shared-0.1", scale=0.5, **shape).decoder
    tokens = random_tokens(2, 80)
    found = loop_diagnostics(decoder, tokens)
    steps = max(STEPS, 2 * delay)
    assert found.disturbance_steps == steps and 0 < found.contraction_step < 1
    # the first step pushes one of them out of the state, and the last of them is still there after so many
    assert found.disturbance_left[0] > 0.5 and 0 < found.disturbance_left[-1] < found.disturbance_left[0]
    assert min(found.memory_share) > 0.1
    before = tokens[:, : 80 - steps]
    memory = step_through(decoder, before)
    noise = torch.randn(memory.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * DISTURBANCE
    with torch.no_grad():
        moved = decoder(before, shift_right(memory + noise)) - decoder(before, shift_right(memory))
    read = noise[:, :-1] if "residual" in injection else noise[:, :-delay]
    assert found.contraction_pass == pytest.approx(float(moved.norm() / read.norm()), rel=1e-9)
    # rows that end before anything was read tell nothing
    assert math.isnan(loop_diagnostics(decoder, tokens[:, :delay]).contraction_pass)


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.3, 0.5])
def test_fast_contraction_is_not_lost_in_rounding(scale: float) -> None:
    tokens, decoder = random_tokens(2, 40), decoder_with(scale)
    # the definition, which float64 has room for: sixteen steps of two states, and what is left of their difference
    state = decoder.initial_state(2)
    for token in tokens[:, :24].T:
        decoder.step_(token, state)
    disturbed = state.clone()
    noise = torch.randn((2, 24, decoder.config.width), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    disturbed.memory = disturbed.memory + 1e-5 * noise[:, -1]
    left = []
    with torch.no_grad():
        for token in tokens[:, 24:].T:
            decoder.step_(token, state)
            decoder.step_(token, disturbed)
            left.append(float((disturbed.memory - state.memory).norm() / (1e-5 * noise[:, -1]).norm()))
    found = loop_diagnostics(decoder, tokens)
    assert found.disturbance_left == pytest.approx([left[0], left[1], left[3], left[7], left[15]], rel=0.1)
    assert found.disturbance_steps == 16
    expected = left[-1] ** (1 / 16)
    assert loop_diagnostics(decoder, tokens).contraction_step == pytest.approx(expected, rel=0.02)
    assert loop_diagnostics(decoder_with(scale, torch.float32), tokens).contraction_step == pytest.approx(
        expected, rel=0.05
    )


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e25])
def test_diverged_weights_are_told_and_stop_nothing(value: float) -> None:
    decoder = decoder_with(0.5, torch.float32)
    with torch.no_grad():
        decoder.injection.memory_value_proj.weight.fill_(value)  # type: ignore[union-attr]
    found = loop_diagnostics(decoder, random_tokens(2, 40))
    assert not found.contraction_step < 1 and not found.disturbance_left[-1] < 1
    left = None if math.isnan(found.disturbance_left[-1]) else found.disturbance_left[-1]
    assert "after 16" in told_of(asdict(found) | {"disturbance_left": [left, left]})


def test_short_rows_say_what_they_can() -> None:
    decoder = decoder_with(0.5)
    whole = loop_diagnostics(decoder, random_tokens(2, 40)).memory_share
    for length in (3, 8, 17):
        found = loop_diagnostics(decoder, random_tokens(2, length))
        assert found.contraction_pass > 0 and found.contraction_step > 0
        assert found.memory_share == pytest.approx(whole, abs=0.15)
    for length in (1, 2):
        found = loop_diagnostics(decoder, random_tokens(2, length))
        assert math.isnan(found.contraction_pass) and math.isnan(found.contraction_step) and not found.memory_share
        assert found.disturbance_left == [] and "too short" in told_of(asdict(found))
    one = loop_diagnostics(decoder, random_tokens(2, 3))
    assert len(one.disturbance_left) == one.disturbance_steps == 1
    assert told_of(asdict(one)) == f"of a disturbance of the memory {one.disturbance_left[0]:.2g} is left after a step"


def test_shares_follow_the_gates() -> None:
    decoder = decoder_with(0.5)
    even = loop_diagnostics(decoder, random_tokens(2, 30)).memory_share
    assert len(even) == decoder.config.depth and all(0 < share < 1 for share in even)
    with torch.no_grad():
        for block in decoder.blocks:
            # saturated: the sign of a normalised input decides, so that gates are 0 or 2
            block.attention.gates.memory_gate.weight.mul_(1e6)  # type: ignore[union-attr]
            block.attention.gates.local_gate.weight.copy_(block.attention.gates.memory_gate.weight)  # type: ignore[union-attr]
    assert loop_diagnostics(decoder, random_tokens(2, 30)).memory_share != even


def test_the_decoder_is_left_as_it_was() -> None:
    decoder = decoder_with(0.5, torch.float32)
    decoder.embedding.compute_dtype = torch.bfloat16
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    found = loop_diagnostics(decoder, random_tokens(1, 3))
    assert found.contraction_step > 0
    assert decoder.compute_dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())
    assert not any(module._forward_hooks for module in decoder.modules())
