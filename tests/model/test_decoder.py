"""Precision, the readout, and what a decoder registers."""

import pytest
import torch

import maglev
from maglev.model.decoder import Decoder
from maglev.recipes import run_config
from tests.helpers import ALL_RECIPES, random_tokens, small


def test_the_interface_of_the_readme() -> None:
    objective = maglev.build("maglev-shared-0.1", depth=1, vocab_size=64, context=32, window=8)
    tokens = random_tokens(2, 10)
    losses = objective(tokens, tokens)
    assert losses.total.shape == losses.next_token.shape == losses.consistency.shape == ()
    decoder = objective.decoder
    memory = decoder(tokens, torch.zeros(2, 10, 64))
    assert memory.shape == (2, 10, 64) and decoder.readout(memory).shape == (2, 10, 64)
    state = decoder.initial_state(2)
    memory_t, state = decoder.step(tokens[:, 0], state)
    assert memory_t.shape == state.memory.shape == (2, 64)


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_a_float64_model_is_float64_to_the_logits(recipe: str) -> None:
    decoder = small(recipe).decoder
    tokens = random_tokens(1, 12)
    memory = decoder(tokens, torch.zeros(1, 12, 32, dtype=torch.float64))
    stepped, state = decoder.step(tokens[:, 0], decoder.initial_state(1))
    assert memory.dtype == stepped.dtype == state.memory.dtype == state.caches[0].key.dtype == torch.float64
    assert decoder.readout(memory).dtype == torch.float64


def test_float64_keeps_fifteen_digits() -> None:
    """A model and its rotated basis agree to 1e-13: any float32 on the way would leave 1e-8."""
    decoder = small("maglev-shared-0.1").decoder
    tokens = random_tokens(1, 20)
    previous = torch.randn(1, 20, 32, dtype=torch.float64)
    plain = decoder(tokens, previous)
    turn = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q
    with torch.no_grad():
        # rms_norm commutes with rotations of the residual stream, and so does everything that reads or writes it
        for name, parameter in decoder.named_parameters():
            if name.endswith(("output_proj.weight", "down_proj.weight")):
                parameter.copy_(turn @ parameter)
            elif not name.endswith("_scale"):
                parameter.copy_(parameter @ turn.T)
    turned = decoder(tokens, previous @ turn.T)
    torch.testing.assert_close(turned, plain @ turn.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        decoder.readout(turned), small("maglev-shared-0.1").decoder.readout(plain), rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_bfloat16_compute_gives_bfloat16_memory_and_float32_logits(recipe: str) -> None:
    decoder = small(recipe, dtype=torch.float32).decoder
    exact = decoder(random_tokens(1, 40), torch.zeros(1, 40, 32))
    decoder.embedding.compute_dtype = torch.bfloat16
    assert decoder.compute_dtype == torch.bfloat16
    memory = decoder(random_tokens(1, 40), torch.zeros(1, 40, 32))
    assert memory.dtype == torch.bfloat16 and decoder.readout(memory).dtype == torch.float32
    assert (memory.float() - exact).norm() / exact.norm() < 0.05
    stepped, state = decoder.step(torch.tensor([3]), decoder.initial_state(1))
    assert stepped.dtype == state.memory.dtype == state.caches[0].key.dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in decoder.parameters())


def test_logits_are_bounded_by_15_whatever_the_weights() -> None:
    decoder = small("swa-ssss").decoder
    with torch.no_grad():
        decoder.readout.weight.mul_(1e3)
    logits = decoder.readout(decoder(random_tokens(1, 8)))
    assert 14.9 < logits.abs().max() <= 15


def test_another_soft_cap_is_taken_from_the_configuration() -> None:
    decoder = small("swa-ssss", logit_softcap=2.5).decoder
    with torch.no_grad():
        decoder.readout.weight.mul_(1e3)
    assert decoder.readout(decoder(random_tokens(1, 8))).abs().max() <= 2.5


def test_the_memory_has_unit_root_mean_square() -> None:
    memory = small("maglev-shared-0.1").decoder(random_tokens(1, 9), torch.zeros(1, 9, 32, dtype=torch.float64))
    torch.testing.assert_close(memory.square().mean(-1), torch.ones(1, 9, dtype=torch.float64), rtol=0, atol=1e-4)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    decoder = small("maglev-shared-0.1").decoder
    tokens, previous = random_tokens(3, 50), torch.randn(3, 50, 32, dtype=torch.float64)
    together = decoder(tokens, previous)
    for row in range(3):
        alone = decoder(tokens[row : row + 1], previous[row : row + 1])
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_deployed_part_holds_weights_only_and_loads_into_a_bare_decoder(recipe: str) -> None:
    """No buffer in the file, nothing of the prefiller: the stored decoder alone rebuilds the same function."""
    objective = small(recipe)
    stored = objective.decoder.state_dict()
    assert set(stored) == {name for name, _ in objective.decoder.named_parameters()}
    assert not any("prefiller" in name for name in stored)
    settings = {
        "model.width": 32,
        "model.heads": 4,
        "model.context": 24,
        "model.window": 8,
        "model.vocab_size": 61,
    }
    bare = Decoder(run_config(recipe, 3, settings).model).double()
    bare.load_state_dict(stored)
    tokens = random_tokens(1, 20)
    previous = torch.randn(1, 20, 32, dtype=torch.float64)
    assert torch.equal(bare(tokens, previous), objective.decoder(tokens, previous))


def test_memory_projections_are_shared_by_all_layers_and_gates_are_not() -> None:
    names = [name for name, _ in small("maglev-shared-0.1").decoder.named_parameters()]
    assert sum("memory_key_proj" in name for name in names) == 1
    assert sum("memory_value_proj" in name for name in names) == 1
    assert sum("local_gate" in name for name in names) == sum("memory_gate" in name for name in names) == 3
    assert not any("gate" in name or "memory" in name for name, _ in small("swa-ssss").decoder.named_parameters())


def test_gates_read_all_channels_and_give_one_number_per_kv_head() -> None:
    decoder = small("maglev-shared-0.1", kv_heads=2).decoder
    for block in decoder.blocks:
        assert block.attention.gates.local_gate.weight.shape == (2, 32)
        assert block.attention.gates.memory_gate.weight.shape == (2, 32)
