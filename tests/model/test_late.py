"""Matrices whose gradients come at the end: the same ones, and nothing of a pass stays behind."""

import copy
import weakref
from typing import Any, get_args

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from maglev.model.late import LateDecoder, late_of
from maglev.model_config import InjectionKind
from maglev.objectives import closed_loop
from maglev.objectives.closed_loop import ClosedLoopObjective
from maglev.train.setup import prepare_blocks
from tests.helpers import batch_of, gradients, small

SETTINGS: dict[str, Any] = {"depth": 2, "heads": 2, "window": 3, "context": 14, "objective_rollout": 4}


def closed(injection: str = "shared_kv", rollout: int = 4) -> ClosedLoopObjective:
    objective = small("maglev-closed", **SETTINGS | {"injection": injection, "objective_rollout": rollout})
    assert isinstance(objective, ClosedLoopObjective)
    return objective


@pytest.mark.parametrize("injection", get_args(InjectionKind))
@pytest.mark.parametrize("rollout", [2, 4])
def test_gradients_are_those_of_step_after_step(injection: str, rollout: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any injection, and whether or not texts go side by side."""
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(closed_loop, "late_of", lambda *_: None)
        objective = closed(injection, rollout)
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
    objective.late = (late,)
    for each in late.late:
        inner = each.note
        each.note = lambda each=each, inner=inner: (inner(), kept.append(weakref.ref(each.rows[-1])))[0]  # type: ignore[method-assign]
    loss = objective(*batch_of(2, 14)).total
    assert len(kept) == 4 * len(late.late) and all(row() is not None for row in kept)
    loss.backward()
    del loss
    assert all(row() is None for row in kept)


def test_what_failed_on_the_way_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory runs out; a copy of the objective is made of what is its own."""
    objective, batch, run = closed(), batch_of(2, 14), LateDecoder.run
    expected = objective(*batch).total.detach()
    late = objective.late[0]
    assert late is not None

    def fail(self: LateDecoder, *given: Any) -> torch.Tensor:
        if len(self.late[0].rows) == 2:
            raise torch.OutOfMemoryError("no room")
        return run(self, *given)

    monkeypatch.setattr(LateDecoder, "run", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        objective(*batch)
    for each in late.late:
        assert not each.rows and not each.taps
        assert each.tap.numel() == each.given.numel() == each.weight.numel() == 0
    monkeypatch.undo()
    again = copy.deepcopy(objective)(*batch).total
    torch.testing.assert_close(again.detach(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_not_where_parts_are_run_again(recompute: str) -> None:
    """Also where that is asked for after a pass without."""
    objective = closed()
    objective(*batch_of(2, 14))
    assert objective.late[0] is not None
    prepare_blocks(objective, False, recompute)
    objective(*batch_of(2, 14))
    assert objective.late[0] is None


def test_not_where_others_have_a_hand_in_the_blocks() -> None:
    wrapped, hooked = closed(), closed()
    for number, block in enumerate(wrapped.decoder.blocks):
        wrapped.decoder.blocks[number] = checkpoint_wrapper(block)
    hooked.decoder.blocks[1].mlp.up_proj.register_forward_pre_hook(lambda *_: None)
    found = [objective(*batch_of(2, 14)).total.detach() for objective in (closed(), wrapped, hooked)]
    assert wrapped.late[0] is None and hooked.late[0] is None
    torch.testing.assert_close(found[1:], [found[0]] * 2, rtol=0, atol=1e-12)


def test_made_anew_where_passes_change() -> None:
    objective, batch = closed(), batch_of(2, 14)
    objective(*batch)
    first = objective.late[0]
    objective(*batch)
    assert objective.late[0] is first
    prepare_blocks(objective, True, "none")
    assert late_of(objective.decoder, first) is not first


def test_in_autocast() -> None:
    objective = small("maglev-closed", dtype=torch.float32, **SETTINGS)
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(*batch_of(2, 14)).total
    loss.backward()
    gradient = objective.decoder.blocks[0].mlp.up_proj.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32 and bool(gradient.isfinite().all())


@pytest.mark.gpu
def test_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the precision of training: as near to float64 as gradients that are added up step after step."""
    settings = SETTINGS | {"width": 128, "window": 16, "context": 64, "objective_rollout": 16}
    batch = [each.cuda() for each in batch_of(4, 64)]
    found = []
    for dtype, plain in ((torch.float64, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        with monkeypatch.context() as patch:
            if plain:
                patch.setattr(closed_loop, "late_of", lambda *_: None)
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            objective = small("maglev-closed", dtype=wide, **settings).cuda()
            objective.decoder.embedding.compute_dtype = dtype
            prepare_blocks(objective, dtype == torch.bfloat16, "none")
            found.append(gradients(objective(*batch).total, objective))
    exact, step_after_step, late = found
    for name, expected in exact.items():
        size = float(expected.norm())
        far, near = (float((each[name].double() - expected).norm()) for each in (late, step_after_step))
        assert far <= 1.5 * near + 0.02 * size, name
