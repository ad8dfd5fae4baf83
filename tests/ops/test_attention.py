"""Windowed attention against the dense masked definition, and what it may and may not look at."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from maglev.ops import reference
from maglev.ops.attention import describe, plan_attention, windowed_attention
from maglev.ops.kernels import BLOCKWISE

CPU = torch.device("cpu")


class Case(NamedTuple):
    """One shape: `group` query heads to each K/V head; queries at first, first + step, ..."""

    batch: int
    length: int
    window: int
    kv_heads: int
    group: int
    head_dim: int
    first: int
    step: int
    documents: bool

    @property
    def queries(self) -> range:
        return range(self.first, self.length, self.step)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.integers(1, 150))
    return Case(
        batch=draw(st.integers(1, 3)),
        length=length,
        window=draw(st.one_of(st.integers(1, 12), st.integers(1, length + 20))),
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3])),
        head_dim=draw(st.sampled_from([2, 6])),
        first=draw(st.integers(0, min(length - 1, 5))),
        step=draw(st.sampled_from([1, 1, 2, 3, 7])),
        documents=draw(st.booleans()),
    )


def draw_inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(case.length * 1000 + case.window)

    def draw(count: int, heads: int) -> Tensor:
        numbers = torch.randn(case.batch, count, heads, case.head_dim, generator=generator, dtype=torch.float64)
        return numbers.to(dtype).requires_grad_()

    heads = case.kv_heads * case.group
    return draw(len(case.queries), heads), draw(case.length, case.kv_heads), draw(case.length, case.kv_heads)


def draw_starts(case: Case) -> Tensor | None:
    """The first position of the document that each query belongs to; other documents in every row."""
    if not case.documents:
        return None
    generator = torch.Generator().manual_seed(case.length)
    begins = torch.rand(case.batch, case.length, generator=generator) < 0.1
    begins[:, 0] = True
    slots = torch.arange(case.length)
    starts = torch.where(begins, slots, 0).cummax(1).values
    return starts[:, case.first :: case.step]


def attend(case: Case, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None = None) -> Tensor:
    plan = plan_attention(case.window, case.length, CPU, case.queries, starts, kernel=BLOCKWISE)
    return windowed_attention(query, key, value, plan)


@settings(deadline=None, max_examples=120)
@given(cases())
def test_equals_the_dense_definition_forward_and_all_gradients(case: Case) -> None:
    inputs, starts = draw_inputs(case), draw_starts(case)
    out = attend(case, *inputs, starts)
    expected = reference.windowed_attention(*inputs, case.window, case.queries, starts)
    assert out.shape == expected.shape == inputs[0].shape
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    pull = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs, pull), torch.autograd.grad(expected, inputs, pull), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("group", [1, 2])
def test_gradients_agree_with_finite_differences(step: int, group: int) -> None:
    case = Case(1, 9, 4, 1, group, 2, 0, step, False)
    assert torch.autograd.gradcheck(lambda *inputs: attend(case, *inputs), draw_inputs(case))


@pytest.mark.parametrize("length", [5, 31, 32, 33, 64, 100, 257])
@pytest.mark.parametrize("window", [1, 2, 7, 32, 33, 300])
def test_a_query_sees_exactly_its_window(length: int, window: int) -> None:
    """Read off the value gradient: which values reach which query, with no reference in between."""
    case = Case(1, length, window, 1, 1, 2, 0, 1, False)
    inputs = draw_inputs(case)
    out = attend(case, *inputs)
    for at in {0, length // 2, length - 1}:
        (pull,) = torch.autograd.grad(out[0, at].sum(), inputs[2], retain_graph=True)
        seen = pull[0].abs().sum((1, 2)).nonzero()[:, 0].tolist()
        assert seen == list(range(max(0, at - window + 1), at + 1))


def test_a_window_of_one_returns_the_own_value() -> None:
    case = Case(2, 50, 1, 2, 2, 4, 0, 1, False)
    query, key, value = draw_inputs(case)
    torch.testing.assert_close(attend(case, query, key, value), value.repeat_interleave(2, dim=2), rtol=0, atol=1e-14)


@pytest.mark.parametrize("window", [5, 40, 128])
def test_what_no_query_may_see_does_not_change_a_bit(window: int) -> None:
    """Large finite numbers outside every window: before the first, between strided ones, after the last."""
    case = Case(1, 128, window, 1, 2, 4, 70, 7, False)
    query, key, value = (tensor.detach() for tensor in draw_inputs(case))
    hidden = ~reference.visible(case.length, window, case.queries, None, CPU)[0].any(0)
    assert hidden.any()
    before = attend(case, query, key, value)
    key[:, hidden], value[:, hidden] = 1e30, -1e30
    assert torch.equal(attend(case, query, key, value), before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_before_every_window_are_not_even_read(poison: float) -> None:
    case = Case(2, 200, 16, 1, 1, 4, 100, 1, False)
    query, key, value = (tensor.detach() for tensor in draw_inputs(case))
    key[:, :85], value[:, :85] = poison, poison
    assert attend(case, query, key, value).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_error_is_at_most_twice_that_of_plain_pytorch(dtype: torch.dtype) -> None:
    case = Case(2, 130, 40, 2, 2, 16, 0, 1, False)
    exact = draw_inputs(case)
    rounded = [tensor.detach().to(dtype) for tensor in exact]
    expected = reference.windowed_attention(*(tensor.double() for tensor in rounded), case.window)
    k, v = (tensor.repeat_interleave(case.group, dim=2) for tensor in rounded[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", rounded[0], k) / case.head_dim**0.5
    seen = reference.visible(case.length, case.window, case.queries, None, CPU)
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    plain = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    out = attend(case, *rounded)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() <= 2 * (plain.double() - expected).abs().max()


def test_one_row_of_starts_serves_the_whole_batch() -> None:
    case = Case(3, 70, 16, 1, 2, 4, 0, 1, True)
    inputs = draw_inputs(case)
    starts = draw_starts(case)[:1]
    expected = reference.windowed_attention(*inputs, case.window, case.queries, starts.expand(3, -1))
    torch.testing.assert_close(attend(case, *inputs, starts), expected, rtol=0, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation hands back, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for part in torch.utils._pytree.tree_leaves(result):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return result


def largest_tensor(length: int, window: int, step: int = 1, documents: bool = False) -> int:
    case = Case(1, length, window, 1, 1, 2, 0, step, documents)
    inputs, starts = draw_inputs(case, torch.float32), draw_starts(case)
    with LargestTensor() as watch:
        out = attend(case, *inputs, starts)
        torch.autograd.grad(out.sum(), inputs)
    return watch.elements


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("documents", [False, True])
def test_no_intermediate_is_quadratic_in_the_length(step: int, documents: bool) -> None:
    window, lengths = 64, [1024, 2048, 4096]
    sizes = [largest_tensor(length, window, step, documents) for length in lengths]
    for length, size in zip(lengths, sizes, strict=True):
        assert size <= 8 * length * window
        assert size < length * length / 4
    assert sizes[2] / sizes[0] == pytest.approx(4, rel=0.05)


def test_intermediates_grow_at_most_linearly_with_the_window() -> None:
    sizes = [largest_tensor(4096, window) for window in (64, 128, 256)]
    assert sizes[1] <= 2.1 * sizes[0] and sizes[2] <= 2.1 * sizes[1]


def test_full_attention_over_all_positions_keeps_no_square_matrix() -> None:
    assert largest_tensor(2048, 2048) < 2048 * 64


def test_the_cpu_kernel_is_named() -> None:
    assert describe("cpu") == "attention on cpu: blockwise (plain PyTorch)"
