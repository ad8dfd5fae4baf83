"""The kernels of memory injection against their definition; `test_fused_inject.py` runs this file."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from maglev.ops import fused_inject, inject, reference
from tests.helpers import batch_of, gradients, small
from tests.kernel_cases import DEVICE, INTERPRETED, poisoned_memory, round_like_the_gpu

__all__ = ["poisoned_memory"]

if INTERPRETED:
    round_like_the_gpu()


class Case(NamedTuple):
    batch: int = 2
    length: int = 10
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    per_row: bool = False


CASES = {
    "plain": Case(),
    "grouped": Case(kv_heads=1, group=3),
    "odd head": Case(head_dim=12, length=7),
    "odd rows": Case(batch=1, length=67, kv_heads=1, head_dim=64),
    "one position": Case(length=1, kv_heads=3),
    "angles of each row": Case(batch=3, length=5, per_row=True),
}


def amid_nans(*shape: int, seed: int) -> Tensor:
    """Numbers whose neighbours in memory are NaN: what is read beyond an edge shows."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    room = torch.full((drawn.numel() + 128,), float("nan"))
    room[64:-64] = drawn.flatten()
    return room.to(DEVICE)[64:-64].view(shape)


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """What bfloat16 holds, in whatever precision; the angles stay float32."""
    heads, local = case.kv_heads * case.group, (case.batch, case.length, case.kv_heads)
    features = (*local, case.head_dim)
    shapes = [(case.batch, case.length, heads, case.head_dim), features, features, features, features, local, local]
    made = [amid_nans(*shape, seed=number) for number, shape in enumerate(shapes)]
    made = [tensor.copy_(tensor.to(torch.bfloat16)) for tensor in made]
    made = [(tensor if dtype == torch.float32 else tensor.to(dtype)).requires_grad_() for tensor in made]
    positions = (case.batch, case.length) if case.per_row else (case.length,)
    angle = amid_nans(*positions, 1, case.head_dim // 2, seed=9)
    return [*made[:3], angle.cos(), angle.sin(), *made[3:]]


def results(op: object, case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The three outputs and the gradients of all seven that have one."""
    given = inputs(case, dtype)
    outs = op(*given)  # type: ignore[operator]
    weights = [amid_nans(*out.shape, seed=20 + number).to(dtype) for number, out in enumerate(outs)]
    loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    return [*outs, *torch.autograd.grad(loss, [tensor for tensor in given if tensor.requires_grad])]


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient(name: str) -> None:
    found, expected = (results(op, CASES[name], torch.float32) for op in (fused_inject.inject, reference.inject))
    assert len(found) == 10
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_at_most_twice_the_error_of_plain_bfloat16(name: str) -> None:
    case = CASES[name]
    exact = results(reference.inject, case, torch.float32)
    plain, fused = (results(op, case, torch.bfloat16) for op in (reference.inject, fused_inject.inject))
    for got, naive, wanted in zip(fused, plain, exact, strict=True):
        assert got.dtype == naive.dtype == torch.bfloat16
        error, allowed = (got.float() - wanted).abs().max(), (naive.float() - wanted).abs().max()
        assert error <= 2 * allowed + 1e-6, f"{error:.2e} against {allowed:.2e} of plain bfloat16"


def test_strided_inputs_and_strided_gradients() -> None:
    """As they come from one stacked projection, and go to attention heads first."""
    case = CASES["plain"]
    given = inputs(case, torch.float32)
    stacked = torch.cat([tensor.detach() for tensor in given[:3]], dim=2).requires_grad_()
    found = []
    for op in (fused_inject.inject, reference.inject):
        parts = stacked.split([2, 2, 2], dim=2)
        outs = op(*parts, *given[3:])
        loss = sum(out.transpose(1, 2).flip(1).cumsum(2).square().sum() for out in outs)
        found.append(torch.autograd.grad(loss, stacked)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)


def test_the_compiler_takes_it_whole() -> None:
    case = CASES["plain"]

    def doubled(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * out for out in fused_inject.inject(*given))

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(results(compiled, case, torch.float32), results(doubled, case, torch.float32), strict=True):
        torch.testing.assert_close(got, wanted)


def test_training_goes_through_it_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole objective, its blocks compiled each as one graph."""
    objective = small("maglev-shared-0.1", dtype=torch.float32, kv_heads=2).to(DEVICE)
    tokens, targets = (each.to(DEVICE) for each in batch_of(2, 24))
    expected = gradients(objective(tokens, targets).total, objective)
    monkeypatch.setattr(inject, "takes_kernels", lambda query: True)
    calls, launch = [], fused_inject.launch
    monkeypatch.setattr(fused_inject, "launch", lambda *given: (calls.append(given[0]), launch(*given)))
    for block in objective.decoder.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    found = gradients(objective(tokens, targets).total, objective)
    assert calls == 3 * [fused_inject.inject_kernel] + 3 * [fused_inject.inject_backward_kernel]
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-4)


def test_pytorch_finds_nothing_wrong_with_the_op() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fused_inject.inject_op, tuple(inputs(CASES["plain"], torch.float32)), test_utils=tests)
