"""Rollouts: the same as one pass after another over every nth position, whatever is kept of keys and values."""

from functools import partial

import pytest
import torch
from torch import Tensor

from maglev.model.late import late_of
from maglev.objectives.losses import Documents
from maglev.objectives.sweeps import Sweeps, Trail, scatter
from tests.helpers import gradients, random_tokens, small

WINDOW, LENGTH = 3, 14


def one_by_one(sweeps: Sweeps, memory: Tensor, steps: int, embedded: Tensor) -> Tensor:
    for first in range(min(steps, LENGTH)):
        positions = range(first, LENGTH, steps)
        memory = scatter(memory, sweeps.run(memory, positions, embedded), positions)
    return memory


def starts_at(*first: int) -> Tensor:
    """Of two rows with a document from `first` on, where each position's document starts."""
    slots = torch.arange(LENGTH)
    return torch.stack([torch.where(slots >= begin, begin, 0) for begin in first])


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_a_rollout_is_one_pass_after_another(steps: int, kv_heads: int, reset: bool, apart: bool) -> None:
    objective = small("maglev-closed", depth=2, heads=2, kv_heads=kv_heads, window=WINDOW, context=LENGTH)
    tokens, starts = random_tokens(2, LENGTH), starts_at(5, 9)
    keep = starts != torch.arange(LENGTH)
    documents = Documents(starts if apart else None, keep if reset else None)
    results = []
    late = partial(Sweeps.rollout, late=late_of(objective.decoder))
    for way in (one_by_one, Sweeps.rollout, late):
        sweeps, embedded = Sweeps(objective.decoder, tokens, documents), objective.decoder.embedding(tokens)
        lifted = sweeps.run(
            torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=seeded()), range(LENGTH), embedded
        )
        memory = way(sweeps, lifted, steps, embedded)
        trails = [isinstance(each, Trail) for each in sweeps.before]
        assert all(trails) is (way is not one_by_one and steps >= WINDOW)
        pull = torch.randn(memory.shape, dtype=torch.float64, generator=seeded())
        results.append((memory, gradients((memory * pull).sum(), objective.decoder)))
    expected, theirs = results[0]
    for memory, mine in results[1:]:
        torch.testing.assert_close(memory, expected, rtol=0, atol=1e-12)
        for name, gradient in theirs.items():
            torch.testing.assert_close(
                mine[name], gradient, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
            )


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
