"""The ring's kernel: one token per row enters its ring, and its queries attend over the ring, in one launch.

A lane is one pair of a query and every LANES-th slot. Lanes keep softmax sums of their own and meet only at the end,
so that nothing in the loop over the window waits for another warp. Where rows and heads alone are too few programs,
the window is split over several, and the last to arrive adds up what all of them left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import early, next_kernel, power_of_two, previous_kernel
from maglev.ops.inject import NORM_EPS

# Programs that together keep an H200 busy; where rings are fewer, several share one.
PROGRAMS = 512
WARPS = 1
# Numbers of a block of keys: 64 in each thread.
TILE = 64 * 32 * WARPS
# What the last of several programs adds up must fit into its registers.
MOST_PARTS = 32
LOG2_E = 1.4426950408889634


@triton.jit
def halves(start_ptr, offset, keep, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two halves of some heads; keys and values go the same way, so that both lie in registers alike."""
    first = tl.load(start_ptr + offset, mask=keep, other=0.0)
    return first, tl.load(start_ptr + HALF + offset, mask=keep, other=0.0)


@triton.jit
def store_halves(start_ptr, offset, first, second, keep, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(start_ptr + offset, first.to(start_ptr.dtype.element_ty), mask=keep)
    tl.store(start_ptr + HALF + offset, second.to(start_ptr.dtype.element_ty), mask=keep)


@triton.jit
def rotated(first, second, cos, sin, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """The norm, then the rotation, of the two halves (rows, half) of some heads."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)
    first, second = first * scale[:, None], second * scale[:, None]
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def merged(first, second, weight, top, GROUP: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax sums of GROUP x PARTS lanes to those of GROUP queries: two halves (GROUP, half), weight, maximum."""
    tops = tl.reshape(top, (GROUP, PARTS))
    best = tl.max(tops, axis=1)  # (GROUP,)
    share = tl.exp2(tops - best[:, None])
    first = tl.sum(tl.reshape(first, (GROUP, PARTS, BLOCK)) * share[:, :, None], axis=1)
    second = tl.sum(tl.reshape(second, (GROUP, PARTS, BLOCK)) * share[:, :, None], axis=1)
    return first, second, tl.sum(tl.reshape(weight, (GROUP, PARTS)) * share, axis=1), best


@triton.jit
def incoming(  # type: ignore[no-untyped-def]
    projected_ptr, memory_ptr, head, half, is_half, cos, sin, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    """Key and value that this token puts into the ring, each as two halves (1, half)."""
    key_ptr = projected_ptr + (HEADS + head) * (2 * HALF)
    key_first, key_second = halves(key_ptr, half, is_half, HALF)
    key_first, key_second = rotated(key_first, key_second, cos, sin, eps, HALF)
    value_first, value_second = halves(key_ptr + KV_HEADS * (2 * HALF), half, is_half, HALF)
    value_first, value_second = value_first.to(tl.float32), value_second.to(tl.float32)
    if MEMORY:
        gate_ptr = projected_ptr + (HEADS + 2 * KV_HEADS) * (2 * HALF) + head
        local = 2.0 * tl.sigmoid(tl.load(gate_ptr).to(tl.float32))
        memory = 2.0 * tl.sigmoid(tl.load(gate_ptr + KV_HEADS).to(tl.float32))
        memory_ptr += head * (2 * HALF)
        first, second = halves(memory_ptr, half, is_half, HALF)
        first, second = rotated(first, second, cos, sin, eps, HALF)
        key_first, key_second = local * key_first + memory * first, local * key_second + memory * second
        first, second = halves(memory_ptr + KV_HEADS * (2 * HALF), half, is_half, HALF)
        value_first = local * value_first + memory * first.to(tl.float32)
        value_second = local * value_second + memory * second.to(tl.float32)
    # the ring's precision is what later tokens will see of this one, so this token sees the same
    kind = projected_ptr.dtype.element_ty
    return key_first.to(kind), key_second.to(kind), value_first.to(kind), value_second.to(kind)


@triton.jit
def queries(  # type: ignore[no-untyped-def]
    projected_ptr, head, query, half, is_half, cos, sin, scale, eps, GROUP: tl.constexpr, HALF: tl.constexpr
):
    """The queries that share this head's keys, ready for exp2: (GROUP x LANES, half) twice, or (1, half) where the
    head has one query."""
    offset = (head * GROUP + query)[:, None] * (2 * HALF) + half
    first, second = halves(projected_ptr, offset, (query < GROUP)[:, None] & is_half, HALF)
    first, second = rotated(first, second, cos, sin, eps, HALF)
    return first * scale, second * scale


@triton.jit
def block_of_slots(  # type: ignore[no-untyped-def]
    key_ptr, value_ptr, slot, end, current, half, is_half, STRIDE: tl.constexpr, HALF: tl.constexpr
):
    """Which slots count, their keys and their values. One that is not in use, or about to be written, is not read."""
    seen = (slot < end) & (slot != current)
    offset = slot.to(tl.int64)[:, None] * STRIDE + half
    keep = seen[:, None] & is_half
    key_first, key_second = halves(key_ptr, offset, keep, HALF)
    value_first, value_second = halves(value_ptr, offset, keep, HALF)
    return seen, key_first, key_second, value_first, value_second


@triton.jit
def add_up_splits(  # type: ignore[no-untyped-def]
    first, second, weight, top, partial_ptr, arrivals_ptr, out_ptr, split, half, out_offset, keep,
    HALF: tl.constexpr, BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Leave this program's sums in partial (GROUP_BLOCK, SPLITS, 2 BLOCK + 2), the last two being weight and top; the
    last program to do so writes the output, and sets the count back for the next layer."""
    size: tl.constexpr = 2 * BLOCK + 2
    mine = partial_ptr + (tl.arange(0, GROUP_BLOCK) * SPLITS + split) * size
    tl.store(mine[:, None] + half, first)
    tl.store(mine[:, None] + BLOCK + half, second)
    tl.store(mine + 2 * BLOCK, weight)
    tl.store(mine + 2 * BLOCK + 1, top)
    # all warps have stored before one thread releases the count
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.store(arrivals_ptr, 0)
        part = partial_ptr + tl.arange(0, GROUP_BLOCK * SPLITS) * size
        all_first = tl.load(part[:, None] + half, cache_modifier=".cg")
        all_second = tl.load(part[:, None] + BLOCK + half, cache_modifier=".cg")
        all_weight = tl.load(part + 2 * BLOCK, cache_modifier=".cg")
        all_top = tl.load(part + 2 * BLOCK + 1, cache_modifier=".cg")
        sum_first, sum_second, sum_weight, _ = merged(
            all_first, all_second, all_weight, all_top, GROUP_BLOCK, SPLITS, BLOCK
        )
        sum_first, sum_second = sum_first / sum_weight[:, None], sum_second / sum_weight[:, None]
        store_halves(out_ptr, out_offset, sum_first, sum_second, keep, HALF)


@triton.jit
def attended(  # type: ignore[no-untyped-def]
    first, second, total_first, total_second, weight, top, key_ptr, value_ptr, lane, begin, end, current, half, is_half,
    seen, key_first, key_second, value_first, value_second,
    STRIDE: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Softmax sums of every lane over slots begin to end; the first block is already here."""
    for start in range(begin, end, LANES):
        # the next block is on its way while this one is used
        next_seen, next_key_first, next_key_second, next_first, next_second = block_of_slots(
            key_ptr, value_ptr, start + LANES + lane % LANES, end, current, half, is_half, STRIDE, HALF
        )
        score = tl.sum(first * key_first.to(tl.float32) + second * key_second.to(tl.float32), axis=1)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, score)
        faded, chance = tl.exp2(top - new_top), tl.exp2(score - new_top)
        weight = weight * faded + chance
        total_first = total_first * faded[:, None] + chance[:, None] * value_first.to(tl.float32)
        total_second = total_second * faded[:, None] + chance[:, None] * value_second.to(tl.float32)
        top, seen = new_top, next_seen
        key_first, key_second = next_key_first, next_key_second
        value_first, value_second = next_first, next_second
    return total_first, total_second, weight, top


@triton.jit
def ring_kernel(  # type: ignore[no-untyped-def]
    projected_ptr, memory_ptr, key_ptr, value_ptr, position_ptr, cos_ptr, sin_ptr, partial_ptr, arrivals_ptr, out_ptr,
    width, memory_width, window, per_split, scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, LANES: tl.constexpr, SPLITS: tl.constexpr, MEMORY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    stride: tl.constexpr = KV_HEADS * 2 * HALF
    half, lane = tl.arange(0, BLOCK)[None, :], tl.arange(0, GROUP_BLOCK * LANES)
    is_half = half < HALF
    position = tl.load(position_ptr + row)
    current, begin = (position % window).to(tl.int32), split * per_split
    end = tl.minimum(tl.minimum(position + 1, window).to(tl.int32), begin + per_split)
    key_ptr += row * window * stride + head * (2 * HALF)
    value_ptr += row * window * stride + head * (2 * HALF)
    # On its way while the token is prepared: the ring and the position are those that the last step left.
    seen, key_first, key_second, value_first, value_second = block_of_slots(
        key_ptr, value_ptr, begin + lane % LANES, end, current, half, is_half, stride, HALF
    )
    previous_kernel(EARLY)
    next_kernel(EARLY)
    cos = tl.load(cos_ptr + row * HALF + half, mask=is_half, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + half, mask=is_half, other=0.0)
    projected_ptr += row * width
    memory_ptr += row * memory_width
    new_key_first, new_key_second, new_first, new_second = incoming(
        projected_ptr, memory_ptr, head, half, is_half, cos, sin, eps, HEADS, KV_HEADS, HALF, MEMORY
    )
    here = current.to(tl.int64) * stride + half
    # by the first split alone
    writes = half + split * HALF < HALF
    store_halves(key_ptr, here, new_key_first, new_key_second, writes, HALF)
    store_halves(value_ptr, here, new_first, new_second, writes, HALF)

    query = lane // LANES if GROUP_BLOCK > 1 else tl.arange(0, 1)
    first, second = queries(projected_ptr, head, query, half, is_half, cos, sin, scale, eps, GROUP, HALF)
    # This token is taken from registers, by one lane per query of the first split: what was stored is not read back.
    own = lane % LANES == split * LANES
    own_score = tl.sum(first * new_key_first.to(tl.float32) + second * new_key_second.to(tl.float32), axis=1)
    # a floor instead of -inf: the difference of two of them is 0, not NaN
    top = tl.where(own, own_score, -1e30)  # (GROUP x LANES,)
    weight = tl.where(own, 1.0, 0.0)
    total_first, total_second = weight[:, None] * new_first.to(tl.float32), weight[:, None] * new_second.to(tl.float32)
    total_first, total_second, weight, top = attended(
        first, second, total_first, total_second, weight, top, key_ptr, value_ptr, lane, begin, end, current, half,
        is_half, seen, key_first, key_second, value_first, value_second, stride, HALF, LANES,
    )  # fmt: skip
    total_first, total_second, weight, top = merged(total_first, total_second, weight, top, GROUP_BLOCK, LANES, BLOCK)
    member = tl.arange(0, GROUP_BLOCK)[:, None]
    keep = (member < GROUP) & is_half
    out_ptr += (row * HEADS + head * GROUP) * (2 * HALF)
    out_offset = member * (2 * HALF) + half
    if SPLITS == 1:
        store_halves(out_ptr, out_offset, total_first / weight[:, None], total_second / weight[:, None], keep, HALF)
    else:
        ring = row * KV_HEADS + head
        partial_ptr += ring * (GROUP_BLOCK * SPLITS * (2 * BLOCK + 2))
        add_up_splits(
            total_first, total_second, weight, top, partial_ptr, arrivals_ptr + ring, out_ptr, split, half, out_offset,
            keep, HALF, BLOCK, GROUP_BLOCK, SPLITS,
        )  # fmt: skip


def lanes_and_splits(batch: int, window: int, kv_heads: int, group: int, head_dim: int) -> tuple[int, int]:
    """Slots per block, and programs per ring: enough of them to fill the GPU, none without a block of its own."""
    queries = power_of_two(group)
    lanes = max(1, min(TILE // (queries * 2 * power_of_two(head_dim // 2)), 64))
    rings, blocks = batch * kv_heads, power_of_two(-(-window // lanes))
    wanted = power_of_two(-(-PROGRAMS // rings))
    return lanes, min(wanted, blocks, max(1, MOST_PARTS // queries))


def ring_attend(
    projected: Tensor,
    memory_projected: Tensor | None,
    ring_key: Tensor,
    ring_value: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    arrivals: Tensor,
    heads: int,
) -> Tensor:
    assert projected.is_contiguous() and ring_key.is_contiguous() and ring_value.is_contiguous()
    assert position.is_contiguous() and (memory_projected is None or memory_projected.stride(1) == 1)
    assert projected.dtype == ring_key.dtype == ring_value.dtype and cos.dtype == torch.float32
    batch, window, kv_heads, head_dim = ring_key.shape
    group = heads // kv_heads
    lanes, splits = lanes_and_splits(batch, window, kv_heads, group, head_dim)
    group_block, block = power_of_two(group), power_of_two(head_dim // 2)
    per_split = -(-window // (splits * lanes)) * lanes
    assert splits == 1 or arrivals.numel() >= batch * kv_heads
    partial_size = batch * kv_heads * group_block * splits * (2 * block + 2) if splits > 1 else 0
    partial = torch.empty(partial_size, dtype=torch.float32, device=projected.device)
    out = projected.new_empty(batch, heads * head_dim)
    memory = projected if memory_projected is None else memory_projected
    ring_kernel[(batch, kv_heads, splits)](
        projected, memory, ring_key, ring_value, position, cos, sin, partial, arrivals, out, projected.shape[1],
        memory.stride(0), window, per_split, LOG2_E / head_dim**0.5, NORM_EPS,
        HEADS=heads, KV_HEADS=kv_heads, GROUP=group, HALF=head_dim // 2, BLOCK=block, GROUP_BLOCK=group_block,
        LANES=lanes, SPLITS=splits, MEMORY=memory_projected is not None, num_warps=WARPS, **early(out.device),
    )  # fmt: skip
    return out
