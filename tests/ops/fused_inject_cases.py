"""The kernels of memory injection against their definition; `test_fused_inject.py` runs this file."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.model import attention
from maglev.ops import fused_inject, reference
from maglev.ops.recompute import KEPT, LEAN_COMPILED
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


def packed(features: list[Tensor]) -> Tensor:
    """As one product gives them, with filler and with NaN around."""
    row = torch.cat(features, dim=-1)
    row = F.pad(row, (0, -row.shape[-1] % 64))
    return F.pad(row.flatten(), (64, 64), value=float("nan"))[64:-64].view(row.shape)


def fused(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, memory_key: Tensor, memory_value: Tensor,
    local_logits: Tensor, memory_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    heads = [each.flatten(-2) for each in (query, key, value)]
    memory = memory_key, memory_value
    given = packed([*heads, local_logits, memory_logits])
    return fused_inject.inject(given, cos, sin, memory, query.shape[-2], key.shape[-2])


def fused_alone(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    given = packed([each.flatten(-2) for each in (query, key, value)])
    return fused_inject.inject(given, cos, sin, None, query.shape[-2], key.shape[-2])


def defined_alone(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key = (reference.rms_norm(reference.rotate(each, cos, sin)) for each in (query, key))
    return query, key, value


PAIRS = {"memory": (fused, reference.inject, 9), "no memory": (fused_alone, defined_alone, 5)}


def results(op: object, case: Case, dtype: torch.dtype, count: int = 9) -> list[Tensor]:
    """The three outputs and the gradients of all inputs that have one."""
    given = inputs(case, dtype)[:count]
    outs = op(*given)  # type: ignore[operator]
    weights = [amid_nans(*out.shape, seed=20 + number).to(dtype) for number, out in enumerate(outs)]
    loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    return [*outs, *torch.autograd.grad(loss, [tensor for tensor in given if tensor.requires_grad])]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient(name: str, pair: str) -> None:
    *ops, count = PAIRS[pair]
    found, expected = (results(op, CASES[name], torch.float32, count) for op in ops)
    assert len(found) == 3 + count - 2
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["plain", "grouped"])
def test_at_most_twice_the_error_of_plain_bfloat16(name: str, pair: str) -> None:
    mine, defined, count = PAIRS[pair]
    exact = results(defined, CASES[name], torch.float32, count)
    plain, fast = (results(op, CASES[name], torch.bfloat16, count) for op in (defined, mine))
    for got, naive, wanted in zip(fast, plain, exact, strict=True):
        assert got.dtype == naive.dtype == torch.bfloat16
        error, allowed = (got.float() - wanted).abs().max(), (naive.float() - wanted).abs().max()
        assert error <= 2 * allowed + 1e-6, f"{error:.2e} against {allowed:.2e} of plain bfloat16"


def test_gradients_that_come_heads_first() -> None:
    """As attention gives them."""
    found = []
    for op in (fused, reference.inject):
        given = inputs(CASES["plain"], torch.float32)
        loss = sum(out.transpose(1, 2).flip(1).cumsum(2).square().sum() for out in op(*given))
        found.append(torch.autograd.grad(loss, given[:3]))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_filler_has_no_gradient_and_no_effect() -> None:
    given = inputs(CASES["plain"], torch.float32)
    row = packed([*(each.flatten(-2) for each in given[:3]), *given[7:]]).detach().requires_grad_()
    assert row.shape[-1] - sum(each.numel() for each in (*given[:3], *given[7:])) // 20 == 28
    outs = fused_inject.inject(row, *given[3:5], tuple(given[5:7]), 2, 2)
    slope = torch.autograd.grad(sum(out.sum() for out in outs), row)[0]
    assert (slope[..., -28:] == 0).all() and slope[..., :-28].ne(0).any(-1).all()


def test_the_compiler_takes_it_whole() -> None:
    case = CASES["plain"]

    def doubled(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * out for out in fused(*given))

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(results(compiled, case, torch.float32), results(doubled, case, torch.float32), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    # the interpreter takes its time: one of each
    [("maglev-shared-0.1", "selective"), ("swa-ssss", "none")]
    if INTERPRETED
    else [(recipe, way) for recipe in ("maglev-shared-0.1", "swa-ssss", "lrt-ssss") for way in ("none", "selective")],
)
def test_training_goes_through_it_where_it_is_chosen(
    recipe: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole objective, its blocks compiled each as one graph."""
    objective = small(recipe, dtype=torch.float32, kv_heads=2, depth=1).to(DEVICE)
    tokens, targets = (each.to(DEVICE) for each in batch_of(1, 12))
    expected = gradients(objective(tokens, targets).total, objective)
    monkeypatch.setattr(attention, "takes_kernels", lambda x: True)
    torch._dynamo.reset()
    calls, launch = [], fused_inject.launch
    monkeypatch.setattr(fused_inject, "launch", lambda *given: (calls.append(given[0]), launch(*given)))
    for block in objective.decoder.blocks:
        block.keeping = LEAN_COMPILED if recompute == "selective" else KEPT
        block.compile(fullgraph=True, backend="aot_eager")
    # the helper keeps the graph of its backward, which the compiler would else not allow
    with torch._functorch.config.patch(donated_buffer=False):
        found = gradients(objective(tokens, targets).total, objective)
    passes = {"swa-ssss": 1, "maglev-shared-0.1": 2, "lrt-ssss": 3}[recipe]
    again = passes if recompute == "selective" and recipe != "lrt-ssss" else 0
    assert calls.count(fused_inject.inject_kernel) == passes + again
    assert calls.count(fused_inject.inject_backward_kernel) == passes
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-4)


def test_pytorch_finds_nothing_wrong_with_the_op() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = inputs(CASES["plain"], torch.float32)
    row = packed([*(each.flatten(-2) for each in given[:3]), *given[7:]]).detach().requires_grad_()
    torch.library.opcheck(fused_inject.inject_op, (row, *given[3:7], 2, 2), test_utils=tests)
    alone = packed([each.flatten(-2) for each in given[:3]]).detach().requires_grad_()
    torch.library.opcheck(fused_inject.inject_op, (alone, *given[3:5], None, None, 2, 2), test_utils=tests)
