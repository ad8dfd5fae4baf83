"""Initial weights, by name, as facts.md states them."""

import pytest
import torch

from maglev.objectives import build
from maglev.objectives.losses import Objective
from tests.helpers import ALL_RECIPES, random_tokens

WIDTH = 128


def start(recipe: str, seed: int = 0, **settings: int) -> Objective:
    return build(recipe, depth=2, seed=seed, vocab_size=1000, context=32, **settings)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_every_parameter_starts_as_documented(recipe: str) -> None:
    kinds = set()
    for name, parameter in start(recipe).named_parameters():
        kind = name.split(".")[-1] if name.endswith("_scale") else name.split(".")[-2]
        kinds.add(kind)
        value = parameter.detach()
        if kind == "residual_scale":
            assert (value == 1).all(), name
        elif kind == "input_scale":
            assert (value == 0.1).all(), name
        elif kind in ("output_proj", "down_proj", "local_gate", "memory_gate", "residual_proj"):
            assert (value == 0).all(), name
        elif kind == "embedding":
            assert value.std().item() == pytest.approx(1, rel=0.02), name
            assert value.abs().max() > 3.5, name
        elif kind == "readout":
            assert value.std().item() == pytest.approx(0.001, rel=0.02), name
            assert value.abs().max() > 0.0035, name
        else:
            # uniform: standard deviation 1 / sqrt(width), nothing beyond sqrt(3) of them, flat up to there
            assert kind in (
                "query_proj",
                "key_proj",
                "value_proj",
                "up_proj",
                "memory_key_proj",
                "memory_value_proj",
            )
            std = WIDTH**-0.5
            assert value.std().item() == pytest.approx(std, rel=0.02), name
            assert value.abs().max() <= 3**0.5 * std and value.abs().max() > 0.99 * 3**0.5 * std, name
            assert value.mean().abs() < 0.1 * std, name
    expected = {
        "embedding",
        "readout",
        "residual_scale",
        "input_scale",
        "query_proj",
        "key_proj",
        "value_proj",
    }
    assert expected | {"output_proj", "up_proj", "down_proj"} <= kinds
    has_memory = recipe.startswith(("lrt", "maglev"))
    assert ({"memory_key_proj", "memory_value_proj", "local_gate", "memory_gate"} <= kinds) == has_memory
    assert ("residual_proj" in kinds) == (recipe == "maglev-closed")


def test_bridges_of_another_prefiller_width_keep_the_size_of_what_passes() -> None:
    objective = start("maglev-separate-1", objective_prefiller_width=64)
    entry, leave = objective.prefiller.entry_proj.weight, objective.prefiller.exit_proj.weight
    assert entry.shape == (64, 128) and leave.shape == (128, 64)
    assert entry.std().item() == pytest.approx(128**-0.5, rel=0.05)
    assert leave.std().item() == pytest.approx(64**-0.5, rel=0.05)


def test_tensors_that_two_recipes_share_start_from_the_same_numbers() -> None:
    plain = start("swa-ssss").state_dict()
    for recipe in ("transformer-slsl", "lrt-ssss", "maglev-shared-0.1", "maglev-separate-1"):
        other = start(recipe).state_dict()
        assert set(plain) <= set(other)
        assert all(torch.equal(plain[name], other[name]) for name in plain)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (
        start("maglev-separate-1"),
        start("maglev-separate-1"),
        start("maglev-separate-1", seed=1),
    )
    pairs = zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True)
    for (name, a), b, c in pairs:
        assert torch.equal(a, b), name
        if a.std() > 0:
            assert not torch.equal(a, c), name


def test_no_two_tensors_start_from_the_same_numbers() -> None:
    """Layers, and the blocks of P and of a separate Q, are drawn apart from each other."""
    drawn = [p.flatten()[:64] for p in start("maglev-separate-1").parameters() if p.numel() > 64 and p.std() > 0]
    for index, first in enumerate(drawn):
        for second in drawn[index + 1 :]:
            assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.6


def test_initialisation_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start("swa-ssss")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_first_loss_is_that_of_a_uniform_guess(recipe: str) -> None:
    tokens = random_tokens(2, 20, vocab=1000)
    loss = start(recipe)(tokens, tokens.roll(-1, 1)).next_token
    assert loss.item() == pytest.approx(torch.tensor(1000.0).log().item(), abs=0.01)
