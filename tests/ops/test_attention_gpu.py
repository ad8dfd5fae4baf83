"""Every kernel of attention on CUDA, by flash-attention's rule: its error against float32 is at most twice that of
plain bfloat16 PyTorch, forward and every gradient."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from maglev.ops import reference
from maglev.ops.attention import check, describe, plan_attention, windowed_attention
from maglev.ops.decode import decode_attention
from maglev.ops.kernels import BLOCKWISE, FLEX, FUSED, KERNELS, SDPA, VARLEN, plan_for
from maglev.ops.kernels import Case as Asked

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each test begins with no shapes compiled, so that none of them runs on a fallback that another one caused."""
    torch._dynamo.reset()


class Case(NamedTuple):
    batch: int = 2
    length: int = 256
    window: int = 100
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    first: int = 0
    step: int = 1
    documents: bool = False

    @property
    def queries(self) -> range:
        return range(self.first, self.length, self.step)


CASES = {
    "plain": Case(),
    "odd length": Case(length=333, window=77),
    "window of one": Case(length=200, window=1),
    "window beyond the length": Case(length=150, window=1000),
    "heads of 128": Case(head_dim=128),
    "grouped": Case(kv_heads=2, group=3),
    "one kv head": Case(kv_heads=1, group=4),
    "strided": Case(first=1, step=2),
    "strided, grouped, odd": Case(length=301, window=33, first=2, step=3, group=2),
    "documents": Case(documents=True),
    "documents, strided, grouped": Case(length=301, group=2, first=1, step=2, documents=True),
    "longer than a block": Case(batch=1, length=1500, window=512),
    "a training shape": Case(batch=2, length=2048, window=512, kv_heads=3, head_dim=128),
    "whole context": Case(length=1024, window=1024, kv_heads=3, head_dim=128),
    "whole context, grouped, odd": Case(length=333, window=333, group=2),
}


def serves(kernel: str, case: Case, dtype: torch.dtype = torch.bfloat16) -> bool:
    whole = case.queries == range(case.length) and not case.documents
    is_full = case.window >= case.length
    asked = Asked("cuda", dtype, case.head_dim, len(case.queries), is_full, whole, case.documents)
    return KERNELS[kernel].serves(asked)


def draw(case: Case) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(7)

    def numbers(count: int, heads: int) -> Tensor:
        drawn = torch.randn(case.batch, count, heads, case.head_dim, generator=generator)
        return drawn.to("cuda", torch.bfloat16).requires_grad_()

    heads = case.kv_heads * case.group
    inputs = [
        numbers(len(case.queries), heads),
        numbers(case.length, case.kv_heads),
        numbers(case.length, case.kv_heads),
    ]
    if not case.documents:
        return inputs, None
    begins = torch.rand(case.batch, case.length, generator=generator) < 0.05
    begins[:, 0] = True
    starts = torch.where(begins, torch.arange(case.length), 0).cummax(1).values
    return inputs, starts[:, case.first :: case.step].contiguous().cuda()


def plain_attention(case: Case, query: Tensor, key: Tensor, value: Tensor, starts: Tensor | None) -> Tensor:
    """The definition with every intermediate in the inputs' own precision."""
    k, v = (tensor.repeat_interleave(case.group, dim=2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, k) / case.head_dim**0.5
    seen = reference.visible(case.length, case.window, case.queries, starts, query.device)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def with_gradients(out: Tensor, inputs: list[Tensor], pull: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, pull.to(out.dtype))]


def run_kernel(kernel: str, case: Case, inputs: list[Tensor], starts: Tensor | None) -> Tensor:
    plan = plan_for(kernel, case.window, case.length, inputs[0].device, case.queries, starts)
    return windowed_attention(*inputs, plan)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_works_here(kernel: str, head_dim: int) -> None:
    works, reason = check(kernel, "cuda", head_dim)
    assert works, reason


@pytest.mark.parametrize(("name", "kernel"), [(n, k) for n, case in CASES.items() for k in KERNELS if serves(k, case)])
def test_error_is_at_most_twice_that_of_plain_bfloat16(name: str, kernel: str) -> None:
    case = CASES[name]
    inputs, starts = draw(case)
    pull = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(8)).to("cuda", torch.bfloat16)
    exact_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    exact_out = reference.windowed_attention(*exact_inputs, case.window, case.queries, starts)
    exact = with_gradients(exact_out, exact_inputs, pull)
    plain = with_gradients(plain_attention(case, *inputs, starts), inputs, pull)
    mine = with_gradients(run_kernel(kernel, case, inputs, starts), inputs, pull)
    for part, expected, naive, got in zip(("output", "query", "key", "value"), exact, plain, mine, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == expected.shape
        error, allowed = (got.float() - expected).abs().max(), (naive.float() - expected).abs().max()
        assert error <= 2 * allowed + 1e-4, f"{part}: {error:.2e} against {allowed:.2e} of plain bfloat16"


@pytest.mark.parametrize("kernel", [FLEX, BLOCKWISE])
@pytest.mark.parametrize("name", ["plain", "strided", "strided, grouped, odd", "documents"])
def test_float32_agrees_with_the_definition(name: str, kernel: str) -> None:
    case = CASES[name]
    if not serves(kernel, case, torch.float32):
        pytest.skip(f"{kernel} takes no {len(case.queries)} queries")
    inputs, starts = draw(case)
    inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    pull = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(8)).cuda()
    expected = reference.windowed_attention(*inputs, case.window, case.queries, starts)
    for got, want in zip(
        with_gradients(run_kernel(kernel, case, inputs, starts), inputs, pull),
        with_gradients(expected, inputs, pull),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_causality_is_exact(kernel: str) -> None:
    case = Case(length=300, window=300 if kernel == SDPA else 64)
    inputs, _ = draw(case)
    inputs = [tensor.detach() for tensor in inputs]
    before = run_kernel(kernel, case, inputs, None)
    inputs[1][:, 200:], inputs[2][:, 200:] = 3.0, -3.0
    after = run_kernel(kernel, case, inputs, None)
    assert torch.equal(before[:, :200], after[:, :200]) and not torch.equal(before[:, 200], after[:, 200])


@pytest.mark.parametrize("kernel", [FLEX, FUSED, VARLEN])
def test_many_lengths_in_one_process_never_fall_back_to_a_square_matrix(kernel: str) -> None:
    """Prompts and last batches come in any length; a compiler that gives up after a few must not do so silently."""
    for length in range(4096, 4096 + 11 * 64, 64):
        query = torch.randn(1, length, 8, 64, device="cuda", dtype=torch.bfloat16)
        plan = plan_for(kernel, 256, length, query.device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = windowed_attention(query, query, query, plan)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < length * length
        expected = reference.windowed_attention(*(query[:, :300].float(),) * 3, 256)
        assert (out[:, :300].float() - expected).abs().max() < 0.05


def test_planning_does_not_build_a_square_matrix() -> None:
    length = 32_768
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan_attention(512, length, torch.device("cuda"))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < length * length / 8


@pytest.mark.parametrize(("group", "window"), [(1, 64), (4, 100)])
def test_decoding_error_is_at_most_twice_that_of_plain_bfloat16(group: int, window: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def numbers(count: int, heads: int) -> Tensor:
        return torch.randn(4, count, heads, 64, generator=generator).to("cuda", torch.bfloat16)

    query, key, value = numbers(1, 2 * group), numbers(window, 2), numbers(window, 2)
    filled = torch.tensor([1, 7, window - 1, window], device="cuda")
    exact = reference.decode_attention(query.float(), key.float(), value.float(), filled)
    k, v = (tensor.repeat_interleave(group, dim=2) for tensor in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, k) / 8
    unused = torch.arange(window, device="cuda")[None] >= filled[:, None]
    weights = scores.masked_fill(unused[:, None, None], float("-inf")).softmax(-1)
    plain = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    got = decode_attention(query, key, value, filled)
    assert (got.float() - exact).abs().max() <= 2 * (plain.float() - exact).abs().max() + 1e-4


def test_a_fast_kernel_is_chosen_and_named() -> None:
    assert BLOCKWISE not in describe("cuda")


@pytest.mark.parametrize("kernel", [FLEX, FUSED, VARLEN, SDPA])
def test_compiled_blocks_take_it_whole(kernel: str) -> None:
    """As training does: inside of a compiled block, with work around it."""
    case = Case(length=256, window=256 if kernel == SDPA else 100, head_dim=128)
    inputs, _ = draw(case)
    plan = plan_for(kernel, case.window, case.length, inputs[0].device)

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2 * windowed_attention(query + 1, key, value * 3, plan)

    pull = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(8)).to("cuda", torch.bfloat16)
    expected = with_gradients(block(*inputs), inputs, pull)
    found = with_gradients(torch.compile(block, fullgraph=True, dynamic=False)(*inputs), inputs, pull)
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).norm() <= 2e-2 * wanted.norm()
