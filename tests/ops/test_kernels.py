"""Which kernel of attention is taken for what: by what it can do, by the order, by what is asked for, by its check."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from maglev.config import TrainConfig
from maglev.errors import WorkError
from maglev.ops import attention, kernels, reference
from maglev.ops.attention import check, choose, describe, plan_attention, windowed_attention
from maglev.ops.kernels import BLOCKWISE, FLEX, FUSED, KERNELS, SDPA, VARLEN, Case, plan_for
from maglev.ops.plan import AttentionPlan
from maglev.ops.recompute import COSTLY

CPU = torch.device("cpu")
TRAINING = Case("cuda", torch.bfloat16, 128, 2048, is_full=False, is_whole=True)


@pytest.fixture(autouse=True)
def forget_checks() -> Iterator[None]:
    check.cache_clear()
    yield
    check.cache_clear()


@pytest.fixture
def all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "error_of", lambda *case: 0.001)


def able(case: Case) -> set[str]:
    return {name for name, kernel in KERNELS.items() if kernel.serves(case)}


def test_what_each_kernel_can_do() -> None:
    pytest.importorskip("triton")
    everything = {BLOCKWISE, FLEX, FUSED, VARLEN}
    assert able(TRAINING) == everything
    assert able(TRAINING._replace(is_full=True)) == everything | {SDPA}
    # some positions, as LRT's later passes have them, and several documents in a row
    assert able(TRAINING._replace(is_whole=False, is_full=True)) == {BLOCKWISE, FLEX, FUSED}
    assert able(TRAINING._replace(is_whole=False, documents=True)) == {BLOCKWISE, FLEX}
    assert able(TRAINING._replace(dtype=torch.float32, is_full=True)) == {BLOCKWISE, FLEX}
    assert able(TRAINING._replace(dtype=torch.float64)) == {BLOCKWISE}
    assert able(TRAINING._replace(device_type="cpu", is_full=True)) == {BLOCKWISE}
    assert able(TRAINING._replace(queries=100)) == everything - {FLEX}
    assert able(TRAINING._replace(head_dim=256)) == everything - {FUSED}
    assert able(TRAINING._replace(head_dim=20)) == {BLOCKWISE, FLEX}
    assert able(TRAINING._replace(head_dim=8)) == {BLOCKWISE, VARLEN}


def test_the_setting_and_the_orders_name_the_kernels_there_are() -> None:
    assert {*get_args(get_type_hints(TrainConfig)["attention"])} == {"auto", *KERNELS}
    assert {*attention.ORDER["full"]} == {*KERNELS} and {*attention.ORDER["windowed"]} == {*KERNELS} - {SDPA}
    assert all(order[-1] == BLOCKWISE for order in attention.ORDER.values())


def test_the_first_of_the_order_that_serves_is_taken(all_work: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(attention.ORDER, "windowed", (FUSED, FLEX, BLOCKWISE))
    monkeypatch.setitem(attention.ORDER, "full", (SDPA, FUSED, FLEX, BLOCKWISE))
    assert choose(TRAINING)[0] == FUSED
    assert choose(TRAINING._replace(is_full=True))[0] == SDPA
    assert choose(TRAINING._replace(is_full=True, head_dim=20))[0] == FLEX
    assert choose(TRAINING._replace(dtype=torch.float64))[0] == BLOCKWISE
    told = describe("cuda")
    assert told == (
        "attention on cuda: windows: fused (within 0.0010 of the definition); "
        "whole context: sdpa (within 0.0010 of the definition)"
    )


def test_what_is_asked_for_comes_first_where_it_serves(all_work: None) -> None:
    assert choose(TRAINING, VARLEN)[0] == VARLEN
    assert choose(TRAINING, SDPA)[0] == attention.ORDER["windowed"][0]
    assert choose(TRAINING._replace(is_full=True), SDPA)[0] == SDPA
    assert choose(TRAINING, BLOCKWISE)[0] == BLOCKWISE


def broken(kernel: str) -> Callable[..., float]:
    def error_of(name: str, *case: Any) -> float:
        if name == kernel:
            raise NotImplementedError("no compiler here\nand a long story")
        return 0.001

    return error_of


@pytest.mark.parametrize("kernel", [FLEX, FUSED, VARLEN, SDPA])
def test_one_that_fails_is_passed_over_and_told(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = TRAINING._replace(is_full=True)
    if not KERNELS[kernel].serves(case):
        pytest.skip(f"{kernel} is not here")
    monkeypatch.setattr(attention, "error_of", broken(kernel))
    monkeypatch.setitem(attention.ORDER, "full", (kernel, BLOCKWISE))
    assert choose(case) == (BLOCKWISE, f"plain PyTorch; {kernel} failed: NotImplementedError: no compiler here")
    assert f"{kernel} failed" in describe("cuda", {"whole context": case})
    with pytest.raises(WorkError, match=f"train.attention is {kernel}, which failed: .*; set it to auto") as failed:
        choose(case, kernel)
    assert "\n" not in str(failed.value)


def test_ours_is_checked_as_training_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled for one number of heads and one step: a check with others would be compiled for itself alone."""
    pytest.importorskip("triton")
    checked = []

    def error_of(kernel: str, *case: Any) -> float:
        checked.append((kernel, *case[1:]))
        return 0.001

    monkeypatch.setattr(attention, "error_of", error_of)
    monkeypatch.setitem(attention.ORDER, "windowed", (FUSED, BLOCKWISE))
    for _ in range(2):
        choose(TRAINING._replace(heads=(6, 3)))
        choose(TRAINING._replace(heads=(6, 3), step=2, is_whole=False))
        choose(TRAINING._replace(is_full=True, heads=(6, 3)))
    assert checked == [(FUSED, 128, (6, 3), 1), (FUSED, 128, (6, 3), 2), (SDPA, 128, attention.USUAL_HEADS, 1)]


@pytest.mark.parametrize("step", [1, 2, 3, 64, 1024])
def test_a_check_has_queries_whatever_the_step(step: int) -> None:
    assert attention.error_of(BLOCKWISE, CPU, 16, (4, 2), step) < attention.LARGEST_ERROR


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_one_that_is_wrong_is_passed_over_and_told(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "error_of", lambda *case: error)
    kernel, reason = choose(TRAINING)
    first = next(name for name in attention.ORDER["windowed"] if KERNELS[name].serves(TRAINING))
    assert kernel == BLOCKWISE and reason.startswith(f"plain PyTorch; {first} differs from the definition by")


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_check_runs_wherever_the_first_call_happens(
    mode: Callable[[], AbstractContextManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation or a prompt may come first: the check needs gradients even where its caller has none."""

    def by_definition(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        return factor * reference.windowed_attention(query, key, value, plan.window)

    kernel = KERNELS[FLEX]._replace(attend=by_definition)
    monkeypatch.setitem(kernels.KERNELS, FLEX, kernel)
    for factor in (1.0, 1.1):
        with mode():
            assert check(FLEX, "cpu", 64)[0] == (factor == 1.0)
        check.cache_clear()


def test_a_check_runs_the_heads_of_the_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may fail for one size of heads alone: then only those go without."""
    seen: list[int] = []

    def by_definition(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        seen.append(query.shape[-1])
        factor = 1.0 if query.shape[-1] < 128 else 1.1
        return factor * reference.windowed_attention(query, key, value, plan.window)

    fake = KERNELS[FLEX]._replace(serves=lambda case: True, attend=by_definition)
    monkeypatch.setitem(kernels.KERNELS, FLEX, fake)
    monkeypatch.setitem(attention.ORDER, "windowed", (FLEX, BLOCKWISE))
    for _ in range(2):
        for head_dim, expected in ((64, FLEX), (128, BLOCKWISE)):
            assert choose(TRAINING._replace(device_type="cpu", head_dim=head_dim))[0] == expected
    assert seen == [64, 128]


def test_a_gradient_that_is_not_a_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_definition(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        key.register_hook(lambda gradient: gradient * float("nan"))
        return reference.windowed_attention(query, key, value, plan.window)

    monkeypatch.setitem(kernels.KERNELS, FLEX, KERNELS[FLEX]._replace(attend=by_definition))
    works, reason = check(FLEX, "cpu", 64)
    check.cache_clear()
    assert not works and reason == "differs from the definition by nan"


def test_passes_without_gradients_compile_nothing(all_work: None) -> None:
    with torch.no_grad():
        assert plan_attention(8, 200, CPU, kernel=FLEX).kernel == BLOCKWISE


@pytest.mark.parametrize(("kernel", "window"), [(SDPA, 192), (VARLEN, 50), (VARLEN, 192)])
def test_other_peoples_kernels_are_called_as_they_want_it(
    kernel: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch has flash attention for CPUs too, though not with borders: those are filled in by the definition."""

    def with_borders(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: Tensor,
        same: Tensor,
        most: int,
        also: int,
        window_size: tuple,
    ) -> Tensor:
        assert borders is same and most == also and window_size[1] == 0
        rows = [range(first, end) for first, end in pairwise(borders.tolist())]
        reach = window_size[0] + 1 or most
        parts = (tuple(each[None, row.start : row.stop] for each in (query, key, value)) for row in rows)
        return torch.cat([reference.windowed_attention(*part, reach)[0] for part in parts])

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", with_borders)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 192, heads, 16, generator=generator) for heads in (4, 2, 2))
    out = windowed_attention(query, key, value, plan_for(kernel, window, 192, CPU))
    expected = reference.windowed_attention(query, key, value, window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_no_attention_is_run_again_where_only_what_is_cheap_is() -> None:
    """The names that recomputation knows are those of PyTorch's ops."""
    pytest.importorskip("torch.nn.attention.varlen")
    ops = [torch.ops.higher_order.flex_attention, torch.ops.torch_attn._varlen_attn.default]
    backends = ("cudnn_attention", "flash_attention", "efficient_attention", "flash_attention_for_cpu")
    ops += [getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in backends]
    assert {op.name() for op in ops} <= COSTLY
