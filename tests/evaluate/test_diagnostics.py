"""What the loop's diagnostics say about decoders whose loops are known."""

import pytest
import torch

from maglev.evaluate.diagnostics import DISTURBANCE, loop_diagnostics
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
    assert found.memory_share == [0.0] * decoder.config.depth


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
    found = loop_diagnostics(decoder, random_tokens(1, 2))
    assert found.contraction_step > 0
    assert decoder.compute_dtype == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in decoder.state_dict().items())
    assert not any(module._forward_hooks for module in decoder.modules())
