"""What of the CUDA path can be seen without a GPU: the masks it is given, and how the choice of kernel is made."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from maglev.ops import attention, flex, reference

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget_masks() -> Iterator[None]:
    flex.shared_mask.cache_clear()
    yield
    flex.shared_mask.cache_clear()


def dense(mask: BlockMask, batch: int, queries: int, keys: int) -> Tensor:
    return create_mask(mask.mask_mod, batch, 1, queries, keys, device="cpu")[:, 0]


def whole_blocks(mask: BlockMask) -> list[tuple[int, int]]:
    counts, indices = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
    return [(query, key) for query, count in enumerate(counts.tolist()) for key in indices[query, :count].tolist()]


def test_a_wide_window_has_blocks_that_need_no_mask() -> None:
    assert whole_blocks(attention.plan_attention(400, 1000, CPU, kernel=attention.FLEX).mask)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("window", "keys", "queries"),
    [
        (1, 20, range(20)),
        (7, 150, range(150)),
        (300, 150, range(150)),
        (33, 301, range(2, 301, 3)),
        (5, 140, range(139, 140)),
        (400, 1000, range(1000)),
        (300, 900, range(1, 900, 2)),
        (256, 700, range(255, 700)),
    ],
)
def test_the_mask_is_that_of_the_definition(window: int, keys: int, queries: range, documents: bool) -> None:
    begins = torch.rand(2, keys, generator=torch.Generator().manual_seed(keys)) < 0.1
    starts = torch.where(begins, torch.arange(keys), 0).cummax(1).values[:, queries.start :: queries.step]
    plan = attention.plan_attention(window, keys, CPU, queries, starts if documents else None, kernel=attention.FLEX)
    expected = reference.visible(keys, window, queries, starts if documents else None, CPU).expand(2, -1, -1)
    assert torch.equal(dense(plan.mask, 2, len(queries), keys), expected)
    # every visible pair lies in a block that is not skipped
    blocks = plan.mask.to_dense()[:, 0].bool().expand(2, -1, -1)
    for row, query, key in expected.nonzero().tolist():
        assert blocks[row, query // 128, key // 128]
    # and a block that is taken whole, without a mask, is wholly visible
    for query, key in whole_blocks(plan.mask):
        block = expected[:, query * 128 : (query + 1) * 128, key * 128 : (key + 1) * 128]
        assert block.shape[1:] == (128, 128) and block.all()


@pytest.fixture
def flex_by_definition(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """In place of the kernel, the definition times a factor: a kernel that works, or one that is wrong."""

    def install(factor: float) -> None:
        def run(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
            return factor * reference.windowed_attention(query, key, value, 50)

        monkeypatch.setattr(flex, "attention", run)

    return install


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_working_kernel_is_chosen_wherever_the_first_call_happens(
    flex_by_definition: Callable[[float], None], mode: Callable[[], AbstractContextManager]
) -> None:
    """An evaluation or a prompt may come first: the probe needs gradients even where its caller has none."""
    flex_by_definition(1.0)
    with mode():
        kernel, reason = attention.check_flex(CPU)
    assert kernel == attention.FLEX, reason


def test_a_kernel_that_is_wrong_is_not_chosen_and_the_reason_is_said(
    flex_by_definition: Callable[[float], None],
) -> None:
    flex_by_definition(1.1)
    kernel, reason = attention.check_flex(CPU)
    assert kernel == attention.BLOCKWISE and "differs" in reason


def test_a_kernel_that_fails_is_not_chosen_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> tuple[str, str]:
        raise NotImplementedError("no compiler here\nand a long story")

    monkeypatch.setattr(attention, "check_flex", broken)
    attention.probe.cache_clear()
    try:
        kernel, reason = attention.probe("cuda")
        assert kernel == attention.BLOCKWISE
        assert "no compiler here" in reason and "\n" not in reason
        assert reason in attention.describe("cuda")
    finally:
        attention.probe.cache_clear()


def test_a_mask_made_during_evaluation_can_be_trained_with() -> None:
    """Masks are kept; one made of inference tensors would stop the next backward pass that uses it."""
    with torch.inference_mode():
        attention.plan_attention(8, 200, CPU, kernel=attention.FLEX)
    mask = attention.plan_attention(8, 200, CPU, kernel=attention.FLEX).mask
    assert not mask.kv_num_blocks.is_inference() and not mask.kv_indices.is_inference()
