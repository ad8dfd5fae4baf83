"""Attention of a parallel pass: keys and values enter the span of their sequence, then queries see their window."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import SMALLEST_DOT, early, next_kernel, power_of_two, previous_kernel
from maglev.ops.fused_ring import LOG2_E, halves, incoming, rotated, store_halves
from maglev.ops.inject import NORM_EPS

# Queries and keys at a time, and warps: in 16 bits and in 32.
NARROW, WIDE = (128, 64, 8), (32, 32, 4)


@triton.jit
def enter_kernel(  # type: ignore[no-untyped-def]
    projected_ptr, memory_ptr, cos_ptr, sin_ptr, query_ptr, key_ptr, value_ptr, width, memory_width, count, first, step,
    length, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, MEMORY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One position's key and value of one K/V head, into the span, and the queries that share them, made ready."""
    previous_kernel(EARLY)
    next_kernel(EARLY)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stride: tl.constexpr = KV_HEADS * 2 * HALF
    half = tl.arange(0, BLOCK)[None, :]
    is_half = half < HALF
    cos = tl.load(cos_ptr + row * HALF + half, mask=is_half, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + half, mask=is_half, other=0.0)
    projected_ptr += row * width
    memory_ptr += row * memory_width
    key_first, key_second, value_first, value_second = incoming(
        projected_ptr, memory_ptr, head, half, is_half, cos, sin, eps, HEADS, KV_HEADS, HALF, MEMORY
    )
    slot = row // count * length + first + row % count * step
    here = slot * stride + head * (2 * HALF) + half
    store_halves(key_ptr, here, key_first, key_second, is_half, HALF)
    store_halves(value_ptr, here, value_first, value_second, is_half, HALF)
    query = tl.arange(0, GROUP_BLOCK)[:, None]
    offset = (head * GROUP + query) * (2 * HALF) + half
    keep = (query < GROUP) & is_half
    query_first, query_second = halves(projected_ptr, offset, keep, HALF)
    query_first, query_second = rotated(query_first, query_second, cos, sin, eps, HALF)
    store_halves(query_ptr + row * (HEADS * 2 * HALF), offset, query_first, query_second, keep, HALF)


@triton.jit
def window_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, empty_ptr, out_ptr, count, first, step, length, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """QUERIES queries of one head over the keys that any of them sees."""
    previous_kernel(EARLY)
    next_kernel(EARLY)
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    number, dim = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK)
    at = first + number * step  # (QUERIES,), among the keys
    inside = (number < count)[:, None] & (dim < DIM)[None, :]
    offset = ((sequence * count + number) * HEADS + head)[:, None] * DIM + dim[None, :]
    query = tl.load(query_ptr + offset, mask=inside, other=0.0)
    begin = tl.load(empty_ptr + sequence).to(tl.int32)
    start = tl.maximum(begin, first + block * QUERIES * step - window + 1) // KEYS * KEYS
    end = first + (tl.minimum((block + 1) * QUERIES, count) - 1) * step + 1
    stride: tl.constexpr = KV_HEADS * DIM
    key_ptr += sequence * length * stride + head // GROUP * DIM
    value_ptr += sequence * length * stride + head // GROUP * DIM
    # a floor instead of -inf: the difference of two of them is 0, not NaN
    top = tl.full([QUERIES], -1e30, dtype=tl.float32)
    weight = tl.zeros([QUERIES], dtype=tl.float32)
    total = tl.zeros([QUERIES, BLOCK], dtype=tl.float32)
    for slot in range(start, end, KEYS):
        entry = slot + tl.arange(0, KEYS)
        # empty entries hold anything, and a chance of 0 times NaN is NaN: they are not read
        there = ((entry >= begin) & (entry < end))[:, None] & (dim < DIM)[None, :]
        place = entry.to(tl.int64)[:, None] * stride + dim[None, :]
        key = tl.load(key_ptr + place, mask=there, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        seen = (entry[None, :] <= at[:, None]) & (entry[None, :] > at[:, None] - window) & (entry >= begin)[None, :]
        score = tl.where(seen, score, -1e30)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        chance = tl.where(seen, tl.exp2(score - new_top[:, None]), 0.0)
        faded = tl.exp2(top - new_top)
        weight = weight * faded + tl.sum(chance, axis=1)
        value = tl.load(value_ptr + place, mask=there, other=0.0)
        total = tl.dot(chance.to(value.dtype), value, total * faded[:, None], input_precision="ieee")
        top = new_top
    tl.store(out_ptr + offset, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def chunk_attend(
    projected: Tensor,
    memory_projected: Tensor | None,
    key: Tensor,
    value: Tensor,
    empty: Tensor,
    queries: range,
    window: int,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> Tensor:
    assert projected.is_contiguous() and key.is_contiguous() and value.is_contiguous() and empty.is_contiguous()
    assert projected.dtype == key.dtype == value.dtype and cos.dtype == torch.float32
    batch, length, kv_heads, head_dim = key.shape
    group, count = heads // kv_heads, len(queries)
    query = projected.new_empty(projected.shape[0], heads * head_dim)
    assert projected.shape[0] == batch * count
    memory = projected if memory_projected is None else memory_projected
    assert memory.stride(1) == 1
    enter_kernel[(batch * count, kv_heads)](
        projected, memory, cos, sin, query, key, value, projected.shape[1], memory.stride(0), count,
        queries.start, queries.step, length, NORM_EPS,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, HALF=head_dim // 2, BLOCK=power_of_two(head_dim // 2),
        GROUP_BLOCK=power_of_two(group), MEMORY=memory_projected is not None, num_warps=1, **early(key.device),
    )  # fmt: skip
    most, keys, warps = WIDE if key.element_size() > 2 else NARROW
    tile = min(most, max(SMALLEST_DOT, power_of_two(count)))
    out = torch.empty_like(query)
    window_kernel[(-(-count // tile), heads, batch)](
        query, key, value, empty, out, count, queries.start, queries.step, length, window, LOG2_E / head_dim**0.5,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, DIM=head_dim, BLOCK=max(SMALLEST_DOT, power_of_two(head_dim)),
        QUERIES=tile, KEYS=keys, num_warps=warps if tile == most else 4, **early(key.device),
    )  # fmt: skip
    return out
