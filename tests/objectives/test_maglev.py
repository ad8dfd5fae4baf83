"""What reaches the prefiller, what is registered where, and the state of things before the first step."""

import pytest
import torch

from maglev.objectives import Objective, build
from tests.helpers import ALL_RECIPES, MAGLEV_RECIPES, batch_of, gradients, next_token_losses, random_tokens, small

SHARED = [name for name in MAGLEV_RECIPES if "shared" in name]
SEPARATE = [name for name in MAGLEV_RECIPES if "separate" in name]


def at_start(recipe: str, **settings: int) -> Objective:
    return build(recipe, depth=3, width=64, heads=2, vocab_size=61, context=24, window=8, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_at_the_start_consistency_is_exactly_zero_and_gradients_are_finite(recipe: str, dtype: torch.dtype) -> None:
    objective = at_start(recipe).to(dtype)
    losses = objective(*batch_of(2, 40))
    assert losses.consistency == 0
    torch.testing.assert_close(losses.total, next_token_losses(recipe) * losses.next_token)
    losses.total.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_at_the_start_in_bfloat16_consistency_is_exactly_zero_too() -> None:
    objective = at_start("maglev-shared-0.1")
    objective.decoder.embedding.compute_dtype = torch.bfloat16
    losses = objective(*batch_of(2, 40))
    assert losses.consistency == 0 and losses.total.dtype == torch.float32
    losses.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in objective.parameters())


@pytest.mark.parametrize("loss", ["next_token", "consistency"])
@pytest.mark.parametrize("recipe", SHARED)
def test_a_shared_prefiller_gets_gradient_from_each_loss_alone(recipe: str, loss: str) -> None:
    """Its scales are the only weights that are Q's alone, so what arrives there came through m'."""
    objective = small(recipe)
    found = gradients(getattr(objective(*batch_of(2, 30)), loss), objective)
    for name in ("prefiller.scales.residual_scale", "prefiller.scales.input_scale"):
        assert (found[name] != 0).all(), name


@pytest.mark.parametrize("loss", ["next_token", "consistency"])
@pytest.mark.parametrize("recipe", SEPARATE)
def test_every_weight_of_a_separate_prefiller_gets_gradient_from_each_loss_alone(recipe: str, loss: str) -> None:
    objective = small(recipe)
    found = gradients(getattr(objective(*batch_of(2, 30)), loss), objective)
    names = [name for name in found if name.startswith("prefiller.")]
    assert len(names) == 3 * 6 + 2
    for name in names:
        assert found[name].abs().max() > 0, name


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_the_target_itself_is_pulled_towards_the_decoder(recipe: str) -> None:
    """Rows of one token: m' feeds nothing, so what reaches Q comes from its own side of ||m - m'||."""
    objective = small(recipe)
    found = gradients(objective(*batch_of(4, 1)).consistency, objective)
    assert (found["prefiller.scales.input_scale"] != 0).all()
    assert gradients(objective(*batch_of(4, 1)).next_token, objective)["prefiller.scales.input_scale"].eq(0).all()


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_the_decoder_too_gets_gradient_from_each_loss_alone(recipe: str) -> None:
    objective = small(recipe)
    losses = objective(*batch_of(2, 30))
    for name, grad in gradients(losses.consistency, objective.decoder).items():
        # only the readout has no part in the memories
        assert (grad.abs().max() > 0) == (name != "readout.weight"), name
    for name, grad in gradients(losses.next_token, objective.decoder).items():
        assert grad.abs().max() > 0, name


@pytest.mark.parametrize(("recipe", "weight"), list(zip([*SHARED, *SEPARATE], [0.1, 1.0, 0.1, 1.0], strict=True)))
def test_the_total_weighs_consistency_as_the_recipe_says(recipe: str, weight: float) -> None:
    losses = small(recipe)(*batch_of(2, 20))
    assert losses.consistency > 0.1
    torch.testing.assert_close(losses.total, losses.next_token + weight * losses.consistency)


def test_a_weight_of_zero_leaves_next_token_prediction() -> None:
    losses = small("maglev-shared-0.1", objective_consistency_weight=0)(*batch_of(2, 20))
    assert losses.total == losses.next_token and losses.consistency > 0


@pytest.mark.parametrize("recipe", SEPARATE)
def test_a_separate_prefiller_is_absent_from_the_deployed_decoder(recipe: str) -> None:
    objective = small(recipe)
    deployed = objective.decoder.state_dict()
    own = {tensor.data_ptr() for tensor in objective.prefiller.state_dict().values()}
    assert own and not own & {tensor.data_ptr() for tensor in deployed.values()}
    plain = set(small("lrt-ssss").decoder.state_dict())
    assert set(deployed) == plain


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_no_tensor_is_stored_twice(recipe: str) -> None:
    objective = small(recipe)
    stored = objective.state_dict()
    pointers = [tensor.untyped_storage().data_ptr() for tensor in stored.values()]
    assert len(set(pointers)) == len(pointers)
    with_duplicates = list(objective.named_parameters(remove_duplicate=False))
    assert len(with_duplicates) == len(list(objective.named_parameters()))


def test_a_shared_prefiller_holds_its_scales_and_nothing_else() -> None:
    objective = small("maglev-shared-0.1")
    names = set(objective.prefiller.state_dict())
    assert names == {"scales.residual_scale", "scales.input_scale"}
    assert {"scales.residual_scale", "scales.input_scale"} <= set(objective.decoder.state_dict())


def test_p_and_a_shared_q_scale_their_residual_streams_separately() -> None:
    objective = small("maglev-shared-0.1")
    tokens = random_tokens(1, 20)
    before, _ = objective.lifted(tokens)
    previous = torch.zeros(1, 20, 32, dtype=torch.float64)
    decoder_before = objective.decoder(tokens, previous)
    with torch.no_grad():
        objective.prefiller.scales.residual_scale.mul_(1.5)
    after, _ = objective.lifted(tokens)
    assert torch.equal(objective.decoder(tokens, previous), decoder_before)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("pattern", ["SLSL", "L", "SSSS"])
@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-separate-1"])
def test_the_prefillers_pattern_is_a_setting_of_its_own(recipe: str, pattern: str) -> None:
    objective = small(recipe, objective_prefiller_pattern=pattern, context=64)
    expected = tuple(8 if pattern[layer % len(pattern)] == "S" else 64 for layer in range(3))
    assert objective.prefiller.windows == expected
    assert objective.decoder.config.windows == (8, 8, 8)
    tokens = random_tokens(1, 50)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 61
    before = objective.prefiller(tokens, objective.decoder)
    after = objective.prefiller(changed, objective.decoder)
    assert torch.equal(before[:, -1], after[:, -1]) == (pattern == "SSSS")


@pytest.mark.parametrize(("depth", "width"), [(1, 0), (2, 0), (5, 0), (0, 64), (0, 128), (2, 192)])
def test_a_separate_prefiller_may_have_another_depth_and_width(depth: int, width: int) -> None:
    objective = small("maglev-separate-1", objective_prefiller_depth=depth, objective_prefiller_width=width)
    assert len(objective.prefiller.blocks) == (depth or 3)
    assert objective.prefiller.blocks[0].mlp.up_proj.weight.shape[1] == (width or 32)
    tokens, targets = batch_of(2, 30)
    memory, target_memory = objective.lifted(tokens)
    assert memory.shape == target_memory.shape == (2, 30, 32)
    torch.testing.assert_close(
        target_memory.square().mean(-1), torch.ones(2, 30, dtype=torch.float64), rtol=0, atol=1e-3
    )
    losses = objective(tokens, targets)
    for name, grad in gradients(losses.total, objective).items():
        assert grad.isfinite().all() and grad.abs().max() > 0, name


def test_targets_that_are_ignored_everywhere_give_zero_and_no_nan() -> None:
    objective = small("maglev-shared-0.1")
    losses = objective(random_tokens(1, 10), torch.full((1, 10), -1))
    assert losses.total == 0
    assert all(grad.isfinite().all() for grad in gradients(losses.total, objective).values())


def test_ignored_positions_count_in_neither_loss() -> None:
    """Position t is left out of the mean; what it writes is still read by others."""
    objective = small("maglev-shared-0.1")
    tokens, targets = batch_of(1, 12)
    masked = targets.clone()
    masked[:, 6:] = -1
    whole, short = objective(tokens, masked), objective(tokens[:, :6], targets[:, :6])
    torch.testing.assert_close(whole.next_token, short.next_token, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole.consistency, short.consistency, rtol=0, atol=1e-12)
