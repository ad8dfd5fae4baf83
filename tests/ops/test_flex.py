"""What of FlexAttention can be seen without a GPU: the masks that it is given."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from maglev.ops import flex, reference

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
    assert whole_blocks(flex.block_mask(400, 1000, range(1000), None, CPU))


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
    mask = flex.block_mask(window, keys, queries, starts if documents else None, CPU)
    expected = reference.visible(keys, window, queries, starts if documents else None, CPU).expand(2, -1, -1)
    assert torch.equal(dense(mask, 2, len(queries), keys), expected)
    # every visible pair lies in a block that is not skipped
    blocks = mask.to_dense()[:, 0].bool().expand(2, -1, -1)
    for row, query, key in expected.nonzero().tolist():
        assert blocks[row, query // 128, key // 128]
    # and a block that is taken whole, without a mask, is wholly visible
    for query, key in whole_blocks(mask):
        block = expected[:, query * 128 : (query + 1) * 128, key * 128 : (key + 1) * 128]
        assert block.shape[1:] == (128, 128) and block.all()


def test_a_mask_made_during_evaluation_can_be_trained_with() -> None:
    """Masks are kept; one made of inference tensors would stop the next backward pass that uses it."""
    with torch.inference_mode():
        flex.block_mask(8, 200, range(200), None, CPU)
    mask = flex.block_mask(8, 200, range(200), None, CPU)
    assert not mask.kv_num_blocks.is_inference() and not mask.kv_indices.is_inference()
