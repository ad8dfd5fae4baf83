"""The kernels of windowed attention against their definition; `test_fused_attention.py` runs this file."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from maglev.model import attention as model_attention
from maglev.ops import attention, fused_attention, reference
from maglev.ops.kernels import FUSED
from maglev.ops.recompute import LEAN_COMPILED
from tests.helpers import batch_of, gradients, small
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
    first: int = 0
    step: int = 1

    @property
    def queries(self) -> range:
        return range(self.first, self.length, self.step)


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
    "every other": Case(first=1, step=2),
    "every fifth": Case(batch=2, length=90, first=3, step=5, kv_heads=2, group=2),
    "few, far apart": Case(length=80, window=12, first=20, step=32),
    "the last": Case(length=70, window=100, first=69, step=64),
}
# small ones, so that a band has all its parts
TILES = {
    "long": {"forward": (32, 16), "queries": (32, 16), "keys": (16, 32)},
    "wide": {"forward": (16, 32), "queries": (16, 32), "keys": (32, 16)},
}


# the interpreter takes the second for a few cases alone, below
@pytest.fixture(params=["long"] if INTERPRETED else list(TILES), autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take_tiles(request.param, monkeypatch)


def take_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, (queries, keys) in TILES[name].items():
        monkeypatch.setitem(fused_attention.TILES, kernel, fused_attention.Tile(queries, keys, 4, 2))


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """What bfloat16 holds, in whatever precision."""
    generator = torch.Generator().manual_seed(case.length)
    heads = (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
    lengths = (len(case.queries), case.length, case.length)
    shapes = [(case.batch, length, count, case.head_dim) for length, count in zip(lengths, heads, strict=True)]
    drawn = [torch.randn(*shape, generator=generator).bfloat16().to(DEVICE, dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in drawn]


def results(op: object, case: Case, dtype: torch.dtype) -> list[Tensor]:
    given = inputs(case, dtype)
    out = op(*given, case.window, case.queries)  # type: ignore[operator]
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    return [out.detach(), *torch.autograd.grad(out, given, pull)]


@pytest.mark.parametrize("head_dim", [fused_attention.SMALLEST_HEAD, fused_attention.LARGEST_HEAD])
def test_a_masked_score_is_far_below_the_largest_of_a_row_without_keys(head_dim: int) -> None:
    """A GPU multiplies and subtracts in one, so that equal ones would leave a rounding error of 1e22 as an exponent."""
    scale = head_dim**-0.5
    assert fused_attention.NOTHING.value * scale < 1e6 * fused_attention.NONE_YET.value


@pytest.mark.parametrize("name", CASES)
def test_result_and_every_gradient(name: str) -> None:
    found, expected = (
        results(op, CASES[name], torch.float32) for op in (fused_attention.attention, reference.windowed_attention)
    )
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["grouped", "odd length", "every fifth", "just whole"])
def test_result_and_every_gradient_in_wide_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_tiles("wide", monkeypatch)
    test_result_and_every_gradient(name)


@pytest.mark.parametrize("name", ["window", "grouped", "odd length", "every fifth"])
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


@pytest.mark.parametrize("tiles", ["long"], indirect=True)
def test_inputs_and_gradients_of_any_strides() -> None:
    """Heads first, as others keep them; and a gradient that is one number for all."""
    case = CASES["grouped"]
    plain = inputs(case, torch.float32)
    turned = [each.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for each in plain]
    expected = torch.autograd.grad(fused_attention.attention(*plain, case.window).sum(), plain)
    found = torch.autograd.grad(fused_attention.attention(*turned, case.window).sum(), turned)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("tiles", ["long"], indirect=True)
def test_compiled_blocks_run_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole objective, its blocks compiled each as one graph, cheap parts computed again: attention is not."""
    objective = small("maglev-shared-0.1", dtype=torch.float32, depth=1, kv_heads=2).to(DEVICE)
    tokens, targets = (each.to(DEVICE) for each in batch_of(2, 24))
    expected = gradients(objective(tokens, targets).total, objective)
    monkeypatch.setattr(model_attention, "takes_kernels", lambda x: True)
    monkeypatch.setattr(attention, "choose", lambda case, wanted: (FUSED, ""))
    torch._dynamo.reset()
    calls, launch = [], fused_attention.launch
    monkeypatch.setattr(fused_attention, "launch", lambda *given: (calls.append(given[0]), launch(*given)))
    for block in objective.decoder.blocks:
        block.keeping = LEAN_COMPILED
        block.compile(fullgraph=True, backend="aot_eager")
    # the helper keeps the graph of its backward, which the compiler would else not allow
    with torch._functorch.config.patch(donated_buffer=False):
        found = gradients(objective(tokens, targets).total, objective)
    # prefiller and decoder
    passes = 2 * len(objective.decoder.blocks)
    assert calls == passes * [fused_attention.attend_kernel] + passes * [
        fused_attention.queries_kernel,
        fused_attention.keys_kernel,
    ]
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-4)


def test_pytorch_finds_nothing_wrong_with_the_op() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = (*inputs(CASES["every fifth"], torch.float32), 40, 3, 5)
    torch.library.opcheck(fused_attention.attend_op, given, test_utils=tests)
