"""The paper as a test: its equations, written out in equations.py and below, against the library.

m'_{1:T} = Q(x_{1:T}),   m_{1:T} = P(x_{1:T}, m'_{0:T-1}),   m'_0 = 0
L = 1/|I| sum_{t in I} [ CE(softmax(15 tanh(U m_t / 15)), x_{t+1}) + lambda ||m_t - m'_t||_2 / sqrt(d) ]
"""

import pytest
import torch
from torch import Tensor

from maglev.objectives import Objective
from tests.helpers import batch_of, gradients, random_tokens, small, step_through
from tests.objectives.equations import Network, Weights, cross_entropy, embed, run_stack

DEPTH, WIDTH, HEADS, CONTEXT, WINDOW = 3, 32, 4, 24, 4
P_WINDOWS = (WINDOW, WINDOW, WINDOW)
Q_WINDOWS = (WINDOW, CONTEXT, WINDOW)


def networks(recipe: str, kv_heads: int) -> tuple[Network, Network]:
    """P, SSSS; and Q, SLSL: over P's blocks with scales of its own, or over its own."""
    shape = {"heads": HEADS, "kv_heads": kv_heads, "head_dim": WIDTH // HEADS}
    decoder = Network(P_WINDOWS, blocks="decoder.blocks", scales="decoder.scales", **shape)
    blocks = "decoder.blocks" if "shared" in recipe else "prefiller.blocks"
    return decoder, Network(Q_WINDOWS, blocks=blocks, scales="prefiller.scales", **shape)


def lifted_passes(weights: Weights, recipe: str, kv_heads: int, tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Equation 1. Q is a plain Transformer: no injection and no gates."""
    decoder, prefiller = networks(recipe, kv_heads)
    target_memory = run_stack(weights, prefiller, embed(weights, tokens), previous=None)
    previous = {t: target_memory[t - 1] if t > 0 else torch.zeros(WIDTH, dtype=torch.float64) for t in target_memory}
    memory = run_stack(weights, decoder, embed(weights, tokens), previous)
    return list(memory.values()), list(target_memory.values())


def paper_loss(
    weights: Weights, recipe: str, kv_heads: int, tokens: Tensor, targets: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Equation 3 over the valid targets I of a batch."""
    nats, apart = [], []
    for row, row_targets in zip(tokens.tolist(), targets.tolist(), strict=True):
        memories, target_memories = lifted_passes(weights, recipe, kv_heads, row)
        for m, m_prime, y in zip(memories, target_memories, row_targets, strict=True):
            if y >= 0:
                nats.append(cross_entropy(weights, m, y))
                apart.append(torch.sqrt(((m - m_prime) ** 2).sum()) / WIDTH**0.5)
    next_token, consistency = torch.stack(nats).mean(), torch.stack(apart).mean()
    return next_token + weight * consistency, next_token, consistency


def paper_model(recipe: str, kv_heads: int) -> tuple[Objective, Weights]:
    shape = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "context": CONTEXT, "window": WINDOW}
    objective = small(recipe, kv_heads=kv_heads, **shape)
    return objective, dict(objective.named_parameters())


RECIPES = {"maglev-shared-0.1": 0.1, "maglev-shared-1": 1.0, "maglev-separate-0.1": 0.1, "maglev-separate-1": 1.0}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_memories_of_both_passes(recipe: str, kv_heads: int) -> None:
    objective, weights = paper_model(recipe, kv_heads)
    tokens = random_tokens(1, 13)
    with torch.no_grad():
        memory, target_memory = objective.lifted(tokens)
        expected, expected_target = lifted_passes(weights, recipe, kv_heads, tokens[0].tolist())
    torch.testing.assert_close(target_memory[0], torch.stack(expected_target), rtol=0, atol=1e-11)
    torch.testing.assert_close(memory[0], torch.stack(expected), rtol=0, atol=1e-11)
    # the two passes are far apart with these weights, so neither comparison can stand in for the other
    assert (memory - target_memory).abs().max() > 0.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_objective_and_the_gradient_of_every_parameter(recipe: str) -> None:
    kv_heads = 2
    objective, weights = paper_model(recipe, kv_heads)
    tokens, targets = batch_of(2, 9)
    targets[0, 3] = targets[1, 0] = targets[1, 8] = -1
    losses = objective(tokens, targets)
    expected = paper_loss(weights, recipe, kv_heads, tokens, targets, RECIPES[recipe])
    for mine, theirs in zip((losses.total, losses.next_token, losses.consistency), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
    mine, theirs = gradients(losses.total, objective), gradients(expected[0], objective)
    for name in mine:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}"
        )
        assert theirs[name].abs().max() > 0, f"{name} gets no gradient, so nothing was compared"


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "swa-ssss"])
def test_recurrent_inference(recipe: str) -> None:
    """Equation 6: Q is gone, and P reads its own last memory through the same channel, one token at a time."""
    objective = small(recipe, depth=DEPTH, width=WIDTH, heads=HEADS, kv_heads=2, window=WINDOW)
    weights = dict(objective.named_parameters())
    decoder, _ = networks(recipe, kv_heads=2)
    tokens = random_tokens(1, 11)
    stepped = step_through(objective.decoder, tokens)[0]
    with torch.no_grad():
        x = embed(weights, tokens[0].tolist())
        memories = [torch.zeros(WIDTH, dtype=torch.float64), *stepped[:-1]]
        previous = None if recipe == "swa-ssss" else dict(enumerate(memories))
        expected = run_stack(weights, decoder, x, previous)
    torch.testing.assert_close(stepped, torch.stack(list(expected.values())), rtol=0, atol=1e-11)


def test_the_plain_transformer_is_q_alone() -> None:
    """The baseline rows: the same network without memory, SLSL or SSSS, next-token loss only."""
    tokens, targets = batch_of(1, 10)
    for recipe, windows in (("transformer-slsl", Q_WINDOWS), ("swa-ssss", P_WINDOWS)):
        objective = small(recipe, depth=DEPTH, width=WIDTH, heads=HEADS, kv_heads=2, window=WINDOW, context=CONTEXT)
        weights = dict(objective.named_parameters())
        network = Network(windows, HEADS, 2, WIDTH // HEADS, "decoder.blocks", "decoder.scales")
        memory = run_stack(weights, network, embed(weights, tokens[0].tolist()), previous=None)
        expected = torch.stack([cross_entropy(weights, memory[t], int(y)) for t, y in enumerate(targets[0])]).mean()
        losses = objective(tokens, targets)
        torch.testing.assert_close(losses.total, expected, rtol=0, atol=1e-11)
        assert losses.consistency == 0
