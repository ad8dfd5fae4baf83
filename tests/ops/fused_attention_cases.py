"""The kernels of windowed attention against their definition; `test_fused_attention.py` runs this file."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from maglev.ops import fused_attention, reference
from tests.kernel_cases import DEVICE, INTERPRETED, poisoned_memory, round_like_the_gpu

__all__ = ["poisoned_memory"]

if INTERPRETED:
    round_like_the_gpu()


class Case(NamedTuple):
    batch: int = 1
    length: int = 96
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 16
    window: int = 40


CASES = {
    "window": Case(),
    "rows and heads": Case(batch=2, length=64, kv_heads=2),
    "grouped": Case(length=80, kv_heads=2, group=2),
    "odd length": Case(length=77, window=33),
    "odd head": Case(head_dim=12, length=50),
    "itself alone": Case(window=1, length=40),
    "narrower than a block": Case(window=5),
    "whole": Case(window=10_000, length=70),
    "just whole": Case(window=96),
    "one position": Case(length=1),
    "a block and one": Case(length=33, window=32),
}
# small ones, so that a band has all its parts
TILES = [
    {"forward": (32, 16), "queries": (32, 16), "keys": (16, 32)},
    {"forward": (16, 32), "queries": (16, 32), "keys": (32, 16)},
]


@pytest.fixture(params=TILES, ids=["long", "wide"], autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (queries, keys) in request.param.items():
        monkeypatch.setitem(fused_attention.TILES, name, fused_attention.Tile(queries, keys, 4, 2))


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """What bfloat16 holds, in whatever precision."""
    generator = torch.Generator().manual_seed(case.length)
    heads = (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
    shapes = [(case.batch, case.length, count, case.head_dim) for count in heads]
    drawn = [torch.randn(*shape, generator=generator).bfloat16().to(DEVICE, dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def results(op: object, case: Case, dtype: torch.dtype) -> list[Tensor]:
    given = inputs(case, dtype)
    out = op(*given, case.window)  # type: ignore[operator]
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    return [out.detach(), *torch.autograd.grad(out, given, pull)]


@pytest.mark.parametrize("name", CASES)
def test_result_and_every_gradient(name: str) -> None:
    found, expected = (
        results(op, CASES[name], torch.float32) for op in (fused_attention.attention, reference.windowed_attention)
    )
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["window", "grouped", "odd length"])
def test_at_most_twice_the_error_of_plain_bfloat16(name: str) -> None:
    exact = results(reference.windowed_attention, CASES[name], torch.float32)
    plain, fast = (
        results(op, CASES[name], torch.bfloat16) for op in (reference.windowed_attention, fused_attention.attention)
    )
    for got, naive, wanted in zip(fast, plain, exact, strict=True):
        assert got.dtype == torch.bfloat16
        error, allowed = (got.float() - wanted).norm(), (naive.float() - wanted).norm()
        assert error <= 2 * allowed + 2**-9 * wanted.norm(), f"{error:.2e} against {allowed:.2e} of plain bfloat16"


def test_a_key_reaches_the_queries_of_its_window_and_no_other() -> None:
    case = Case(length=90, window=20)
    query, key, value = (tensor.detach() for tensor in inputs(case, torch.float32))
    out = fused_attention.attention(query, key, value, case.window)
    key[:, 30], value[:, 30] = 5.0, -7.0
    changed = (fused_attention.attention(query, key, value, case.window) != out).any(-1).squeeze()
    assert changed.nonzero().squeeze().tolist() == list(range(30, 50))


def test_scores_of_any_size() -> None:
    case = CASES["window"]
    query, key, value = (tensor.detach() for tensor in inputs(case, torch.float32))
    found = fused_attention.attention(100 * query, 100 * key, value, case.window)
    expected = reference.windowed_attention(100 * query, 100 * key, value, case.window)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_pytorch_finds_nothing_wrong_with_the_op() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(fused_attention.attend_op, (*inputs(CASES["grouped"], torch.float32), 40), test_utils=tests)
