"""Windowed attention by FlexAttention, for training on CUDA."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
# below one block of queries FlexAttention takes its decoding path, which lacks grouped heads and backward
FEWEST_QUERIES = BLOCK
SMALLEST_HEAD = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# one graph per window, subset of positions and precision; past dynamo's limit it would run as a dense T x T product
SHAPES_PER_PROCESS = 256

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@functools.lru_cache(maxsize=64)
def shared_mask(window: int, keys: int, start: int, count: int, step: int, device: str) -> BlockMask:
    first: int | Tensor = start
    if step > 1:
        # a number would be part of the kernel, which is compiled anew for every other one
        with torch.inference_mode(False):
            first = torch.tensor(start, device=device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query * step + first
        return (key <= at) & (key > at - window)

    return mask_of_blocks(window, keys, range(start, start + count * step, step), torch.device(device), seen, True)


def block_mask(window: int, keys: int, queries: range, starts: Tensor | None, device: torch.device) -> BlockMask:
    if starts is None:
        return shared_mask(window, keys, queries.start, len(queries), queries.step, str(device))
    start, step = queries.start, queries.step

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = query * step + start
        return (key <= at) & (key > at - window) & (key >= starts[batch, query])

    return mask_of_blocks(window, keys, queries, device, seen, False)


def mask_of_blocks(
    window: int, keys: int, queries: range, device: torch.device, seen: MaskMod, plain: bool
) -> BlockMask:
    """Which blocks of keys each block of queries meets, worked out per block: never a T x T matrix.

    `plain` says that inside a block the window alone decides, so blocks wholly inside it need no mask.
    """
    # masks are kept and shared; made of inference tensors they could not be trained with later
    with torch.inference_mode(False), torch.no_grad():
        count = len(queries)
        block = torch.arange(-(-count // BLOCK), device=device)[:, None]  # (nq, 1)
        first = queries.start + block * BLOCK * queries.step
        last = queries.start + ((block + 1) * BLOCK - 1).clamp_max(count - 1) * queries.step
        key_first = torch.arange(-(-keys // BLOCK), device=device)[None] * BLOCK  # (1, nk)
        key_last = (key_first + BLOCK - 1).clamp_max(keys - 1)
        met = (key_first <= last) & (key_last > first - window)
        full = (key_last <= first) & (key_first > last - window) & (key_first + BLOCK <= keys)
        full = full & plain & ((block + 1) * BLOCK <= count)
        return BlockMask.from_kv_blocks(
            *numbered(met & ~full), *numbered(full), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(count, keys)
        )


def numbered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(nq, nk) of booleans to how many there are per row and which, the ones that count first."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None].contiguous(), order[None, None].contiguous()


@functools.cache
def compiled() -> Any:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, SHAPES_PER_PROCESS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * SHAPES_PER_PROCESS)
    return torch.compile(flex_attention, dynamic=False)


def serves(queries: int, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlexAttention takes such inputs, forward and backward."""
    return queries >= FEWEST_QUERIES and dtype in DTYPES and head_dim >= SMALLEST_HEAD


def attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """query (B, Q, H, Dh), key and value (B, T, G, Dh) -> (B, Q, H, Dh)."""
    # inside a compiled block it is fused there; called plainly it has to bring its own compilation
    run = flex_attention if torch.compiler.is_compiling() else compiled()
    out = run(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        block_mask=mask,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)
