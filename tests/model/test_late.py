"""Matrices whose gradients come at the end: the same ones, and nothing of a pass stays behind."""

import weakref
from typing import get_args

import pytest
import torch

from maglev.config import InjectionKind
from maglev.model.late import late_of
from maglev.objectives.closed_loop import ClosedLoopObjective
from maglev.train.setup import prepare_blocks
from tests.helpers import batch_of, gradients, small


def closed(injection: str = "shared_kv", rollout: int = 4) -> ClosedLoopObjective:
    settings = {
        "depth": 2,
        "heads": 2,
        "window": 3,
        "context": 14,
        "injection": injection,
        "objective_rollout": rollout,
    }
    objective = small("maglev-closed", **settings)
    assert isinstance(objective, ClosedLoopObjective)
    return objective


@pytest.mark.parametrize("injection", get_args(InjectionKind))
@pytest.mark.parametrize("rollout", [2, 4])
def test_gradients_are_those_of_step_after_step(injection: str, rollout: int) -> None:
    """With any injection, and whether or not texts go side by side."""
    found = []
    for plain in (False, True):
        objective = closed(injection, rollout)
        objective.late = [None] if plain else []
        loss = objective(*batch_of(2, 14)).total
        assert (objective.late[0] is None) is plain
        found.append((loss.detach(), gradients(loss, objective)))
    (loss, mine), (expected, theirs) = found
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_it_follows_the_parameters() -> None:
    """It has copies in the precision of the pass, made for each."""
    objective, batch = closed(), batch_of(2, 14)
    first = objective(*batch).total
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.mul_(1.1)
    second, expected = objective(*batch).total, closed()
    expected.load_state_dict(objective.state_dict())
    torch.testing.assert_close(second, expected(*batch).total, rtol=0, atol=0)
    assert float((second - first).detach().abs()) > 1e-3


def test_it_is_no_part_of_the_model() -> None:
    objective = closed()
    names, count = [*objective.state_dict()], sum(1 for _ in objective.parameters())
    objective(*batch_of(2, 14))
    assert [*objective.state_dict()] == names and sum(1 for _ in objective.parameters()) == count


def test_what_a_pass_kept_goes_with_its_backward() -> None:
    objective = closed()
    kept: list[weakref.ref[torch.Tensor]] = []
    late = late_of(objective.decoder)
    assert late is not None
    objective.late = [late]
    for each in late.late:
        inner = each.note
        each.note = lambda each=each, inner=inner: (inner(), kept.append(weakref.ref(each.rows[-1])))[0]  # type: ignore[method-assign]
    loss = objective(*batch_of(2, 14)).total
    assert len(kept) == 4 * len(late.late) and all(row() is not None for row in kept)
    loss.backward()
    del loss
    assert all(row() is None for row in kept)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_not_where_parts_are_run_again(recompute: str) -> None:
    objective = closed()
    prepare_blocks(objective, False, recompute)
    assert late_of(objective.decoder) is None
