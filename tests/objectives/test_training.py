"""Every recipe learns: a few steps on one fixed batch bring its loss down."""

from typing import get_args

import pytest
import torch

from maglev.model_config import InjectionKind
from maglev.objectives import build
from tests.helpers import ALL_RECIPES, MEMORY_RECIPES, batch_of, next_token_losses, small


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_few_adam_steps_reduce_the_total_loss(recipe: str) -> None:
    objective = build(recipe, depth=2, width=64, heads=2, vocab_size=32, context=32, window=8)
    tokens, targets = batch_of(4, 32, vocab=32)
    optimizer = torch.optim.Adam(objective.parameters(), lr=3e-3)
    history = []
    for _ in range(25):
        losses = objective(tokens, targets)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        history.append(losses.total.item())
    assert history[0] / next_token_losses(recipe) == pytest.approx(torch.tensor(32.0).log().item(), abs=0.05)
    assert history[-1] < 0.6 * history[0]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_step_down_the_gradient_reduces_the_loss_by_what_the_gradient_says(recipe: str) -> None:
    """Plain SGD, float64: the first-order prediction holds, so the gradient belongs to this loss."""
    objective = build(recipe, depth=2, width=64, heads=2, vocab_size=32, context=32, window=8).double()
    tokens, targets = batch_of(2, 24, vocab=32)
    warm_up = torch.optim.Adam(objective.parameters(), lr=3e-3)
    for _ in range(3):
        warm_up.zero_grad()
        objective(tokens, targets).total.backward()
        warm_up.step()
    objective.zero_grad()
    before = objective(tokens, targets).total
    before.backward()
    grads = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
    predicted = sum(grad.square().sum() for grad in grads.values())
    rate = 1e-6
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if name in grads:
                parameter -= rate * grads[name]
        drop = (before - objective(tokens, targets).total) / rate
    assert drop.item() == pytest.approx(predicted.item(), rel=1e-2)


@pytest.mark.parametrize("recipe", ["maglev-shared-1", "maglev-separate-1"])
def test_training_makes_the_decoder_reproduce_its_targets(recipe: str) -> None:
    """Consistency is 0 at the start, rises while the two passes learn apart, and the objective holds it down."""

    def trained(weight: float) -> float:
        objective = build(
            recipe, depth=2, width=64, heads=2, vocab_size=32, context=32, window=8, objective_consistency_weight=weight
        )
        tokens, targets = batch_of(4, 32, vocab=32)
        optimizer = torch.optim.Adam(objective.parameters(), lr=3e-3)
        for _ in range(40):
            losses = objective(tokens, targets)
            optimizer.zero_grad()
            losses.total.backward()
            optimizer.step()
        return losses.consistency.item()

    assert 0 < trained(1.0) < 0.7 * trained(0.0)


@pytest.mark.parametrize(
    ("recipe", "injection"),
    [(recipe, "shared_kv") for recipe in ALL_RECIPES]
    + [(recipe, other) for recipe in MEMORY_RECIPES for other in get_args(InjectionKind)[1:]],
)
@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_a_pass_reaches_every_parameter(recipe: str, injection: str, progress: float) -> None:
    """At the start of training and at its end: ranks wait for the gradient of each."""
    objective = small(recipe, injection=injection)
    objective.progress = progress
    objective(*batch_of(2, 20)).total.backward()
    assert [name for name, parameter in objective.named_parameters() if parameter.grad is None] == []
