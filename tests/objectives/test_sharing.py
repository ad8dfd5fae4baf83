"""What a separate prefiller takes of the decoder, and how strong it is beside it."""

from typing import Any

import pytest
import torch

from maglev.config import Sharing, sharing_of
from maglev.errors import RequestError
from maglev.model.accounting import describe, objective_flops, stack_flops
from maglev.objectives import Objective, build_objective
from maglev.recipes import run_config
from tests.helpers import batch_of, gradients, random_weights, small

PATTERNS = ["none", "embedding", "attention", "mlp", "embedding,attention", "embedding,mlp", "embedding,0,2", "mlp,1-2"]


def sharing(words: str, **settings: Any) -> Objective:
    return small("maglev-separate-1", objective_sharing=words, **settings)


def read(words: str) -> Sharing:
    config = run_config("maglev-separate-1", 3, {"objective.sharing": words})
    return sharing_of(config.model, config.objective)


def names_of(objective: Objective) -> set[str]:
    return {name for name, _ in objective.prefiller.named_parameters()}


@pytest.mark.parametrize("words", PATTERNS)
def test_every_weight_is_registered_once_and_reached_by_each_loss(words: str) -> None:
    objective = sharing(words)
    losses = objective(*batch_of(2, 30))
    for loss in (losses.next_token, losses.consistency):
        for name, gradient in gradients(loss, objective).items():
            assert gradient.abs().max() > 0 or name == "decoder.readout.weight", name
    names = names_of(objective)
    assert ("embedding.weight" in names) == ("embedding" not in words)
    shared = read(words)
    for layer in range(3):
        assert any(f"blocks.{layer}.attention." in name for name in names) == (layer not in shared.attention)
        assert any(f"blocks.{layer}.mlp." in name for name in names) == (layer not in shared.mlp)


def test_layers_are_read_as_numbers_and_ranges() -> None:
    config = run_config("maglev-separate-1", 6, {"objective.sharing": "embedding, mlp, 0,2-4"})
    shared = sharing_of(config.model, config.objective)
    assert shared.embedding and shared.attention == {0, 2, 3, 4} and shared.mlp == set(range(6))


@pytest.mark.parametrize("words", ["embedding,attention,mlp", "embedding,0-2"])
def test_sharing_everything_is_the_shared_recipe(words: str) -> None:
    batch, weight = batch_of(2, 30), {"objective_consistency_weight": 0.3}
    all_shared, shared = sharing(words, **weight), small("maglev-shared-0.1", **weight)
    assert names_of(all_shared) == names_of(shared)
    found, expected = (gradients(objective(*batch).total, objective) for objective in (all_shared, shared))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("words", ["attention", "mlp", "embedding,1"])
def test_what_is_borrowed_moves_with_the_decoder(words: str) -> None:
    """And nothing else of the decoder's blocks matters to Q."""
    objective = sharing(words)
    tokens, _ = batch_of(1, 20)
    before = objective.prefiller(tokens, objective.decoder)
    shared = read(words)
    for layer, block in enumerate(objective.decoder.blocks):
        for part, layers in ((block.attention, shared.attention), (block.mlp, shared.mlp)):
            kept = {name: tensor.clone() for name, tensor in part.state_dict().items()}
            random_weights(part, seed=1)
            same = torch.equal(objective.prefiller(tokens, objective.decoder), before)
            assert same == (layer not in layers)
            part.load_state_dict(kept)


@pytest.mark.parametrize(
    "settings",
    [
        *({"objective.sharing": words} for words in PATTERNS),
        {"objective.sharing": "none", "objective.prefiller_width": 64, "objective.prefiller_depth": 1},
        {"objective.prefiller_width": 192, "objective.prefiller_depth": 5},
        {"objective.sharing": "embedding,attention", "objective.prefiller_depth": 2},
        {"objective.sharing": "embedding,0-2", "objective.prefiller_depth": 5},
    ],
)
def test_accounts_are_those_of_the_modules(settings: dict[str, Any]) -> None:
    shape = {"model.vocab_size": 50, "model.context": 16, "model.window": 5, "model.heads": 2, "model.kv_heads": 1}
    config = run_config("maglev-separate-1", 3, {"model.width": 128} | shape | settings)
    objective = build_objective(config)
    assert describe(config)["parameters"]["prefiller"] == sum(p.numel() for p in objective.prefiller.parameters())
    # a weight that is borrowed is multiplied with all the same
    whole = run_config("maglev-separate-1", 3, {"model.width": 128} | shape | settings | {"objective.sharing": "none"})
    bridge = 0 if config.objective.sharing == "none" or not config.objective.prefiller_width else 2 * 128 * 192
    assert objective_flops(config) == pytest.approx(objective_flops(whole) + bridge)
    assert objective_flops(whole) > stack_flops(config.model, config.model.windows)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"objective.sharing": "attention", "objective.prefiller_width": 64}, "decoder's width alone, 256"),
        ({"objective.sharing": "mlp", "objective.prefiller_depth": 5}, "takes in layer 4.* layers 0 to 3"),
        ({"objective.sharing": "2", "objective.prefiller_depth": 2}, "layers 0 to 1"),
    ],
)
def test_what_does_not_fit_is_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        run_config("maglev-separate-1", 4, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"objective_prefiller_pattern": "L"},
        {"objective_prefiller_pattern": "SSL", "objective_prefiller_depth": 1},
        {"objective_prefiller_depth": 6},
        {"objective_prefiller_width": 64},
        {"objective_prefiller_width": 128, "objective_prefiller_depth": 2, "objective_sharing": "none"},
    ],
)
def test_a_prefiller_of_any_strength_teaches(settings: dict[str, Any]) -> None:
    """Its targets are the decoder's memories in shape and size, causal, and move all its weights."""
    objective = small("maglev-separate-1", **settings)
    tokens, targets = batch_of(2, 30)
    target_memory = objective.prefiller(tokens, objective.decoder)
    assert target_memory.shape == (2, 30, 32)
    torch.testing.assert_close(target_memory.square().mean(-1), torch.ones(2, 30).double(), rtol=0, atol=1e-4)
    other = tokens.clone()
    other[:, 20] = (other[:, 20] + 1) % 61
    assert torch.equal(objective.prefiller(other, objective.decoder)[:, :20], target_memory[:, :20])
    for name, gradient in gradients(objective(tokens, targets).total, objective).items():
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("words", ["attention", "embedding,1"])
def test_borrowed_blocks_compile_and_are_recomputed(words: str) -> None:
    from maglev.train.setup import prepare_blocks

    batch = batch_of(2, 20)
    expected = sharing(words, dtype=torch.float32)
    losses = expected(*batch)
    for recompute in ("selective", "full"):
        objective = sharing(words, dtype=torch.float32)
        prepare_blocks(objective, False, recompute)
        found = gradients(objective(*batch).total, objective)
        for name, gradient in gradients(losses.total, expected).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    objective = sharing(words, dtype=torch.float32)
    for block in objective.decoder.blocks:
        block.compile(backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(objective(*batch).total, losses.total)
    torch._dynamo.reset()
