"""What attention takes of its projections, in one launch each way: queries and keys normalised and rotated, and where
there is memory, keys and values mixed with it.

The projections come as one product's rows: queries, keys, values, both gates' logits where there is memory, filler. A
program takes some rows of one head. Backward computes normalised keys and gates again from what the product gave,
and writes its gradient as it is needed, so nothing in between is ever written. Both are ops of PyTorch, which its
compiler takes as they are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import power_of_two
from maglev.ops.fused_ring import halves, rotated, store_halves
from maglev.ops.inject import NORM_EPS

# Numbers of a program's tile of one head, and its warps.
TILE, WARPS = 2048, 4
# the width of what the projections' rows are filled up with is below this
FILLER = tl.constexpr(64)


@triton.jit
def unrotated(first, second, d_first, d_second, cos, sin, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Backward of `rotated`. With n = x s: dx = s (dn - n mean(n dn)), dn being the gradient turned back."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    scale = (1.0 / tl.sqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps))[:, None]
    first, second = first * scale, second * scale
    back_first, back_second = d_first * cos - d_second * sin, d_first * sin + d_second * cos
    along = (tl.sum(first * back_first + second * back_second, axis=1) / (2 * HALF))[:, None]
    return scale * (back_first - first * along), scale * (back_second - second * along)


@triton.jit
def place(cos_ptr, sin_ptr, rows, period, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of this program, the numbers of a half, which of both exist, and the rows' angles."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    half = tl.arange(0, BLOCK)[None, :]
    keep = (row < rows)[:, None] & (half < HALF)
    angle = (row % period)[:, None] * HALF + half
    cos, sin = tl.load(cos_ptr + angle, mask=keep, other=0.0), tl.load(sin_ptr + angle, mask=keep, other=0.0)
    return row, half, keep, cos, sin


@triton.jit
def gates(start_ptr, at, exists, KV_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    local = 2.0 * tl.sigmoid(tl.load(start_ptr + at, mask=exists, other=0.0).to(tl.float32))
    return local, 2.0 * tl.sigmoid(tl.load(start_ptr + KV_HEADS + at, mask=exists, other=0.0).to(tl.float32))


@triton.jit
def inject_kernel(  # type: ignore[no-untyped-def]
    packed_ptr, cos_ptr, sin_ptr, memory_key_ptr, memory_value_ptr, query_ptr, key_ptr, value_ptr, rows, period, eps,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    row, half, keep, cos, sin = place(cos_ptr, sin_ptr, rows, period, HALF, BLOCK, ROWS)
    head, size, line = tl.program_id(1), 2 * HALF, row * WIDTH
    own = line[:, None] + head * size + half
    if head < HEADS:
        first, second = halves(packed_ptr, own, keep, HALF)
        first, second = rotated(first, second, cos, sin, eps, HALF)
        store_halves(query_ptr, (row * HEADS + head)[:, None] * size + half, first, second, keep, HALF)
    else:
        head -= HEADS
        at = (row * KV_HEADS + head)[:, None] * size + half
        first, second = halves(packed_ptr, own, keep, HALF)
        first, second = rotated(first, second, cos, sin, eps, HALF)
        value_first, value_second = halves(packed_ptr, own + KV_HEADS * size, keep, HALF)
        if MEMORY:
            logits = line + (HEADS + 2 * KV_HEADS) * size + head
            local, memory = gates(packed_ptr, logits, row < rows, KV_HEADS)
            other_first, other_second = halves(memory_key_ptr, at, keep, HALF)
            first = local[:, None] * first + memory[:, None] * other_first.to(tl.float32)
            second = local[:, None] * second + memory[:, None] * other_second.to(tl.float32)
            other_first, other_second = halves(memory_value_ptr, at, keep, HALF)
            value_first = local[:, None] * value_first.to(tl.float32) + memory[:, None] * other_first.to(tl.float32)
            value_second = local[:, None] * value_second.to(tl.float32) + memory[:, None] * other_second.to(tl.float32)
        store_halves(key_ptr, at, first, second, keep, HALF)
        store_halves(value_ptr, at, value_first, value_second, keep, HALF)


@triton.jit
def gate_share(d_first, d_second, first, second):  # type: ignore[no-untyped-def]
    """What a feature adds to the gradient of its gate. (rows,)"""
    return tl.sum(d_first * first.to(tl.float32) + d_second * second.to(tl.float32), axis=1)


@triton.jit
def wide_halves(start_ptr, offset, keep, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    first, second = halves(start_ptr, offset, keep, HALF)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def inject_backward_kernel(  # type: ignore[no-untyped-def]
    packed_ptr, cos_ptr, sin_ptr, memory_key_ptr, memory_value_ptr, d_query_ptr, d_key_ptr, d_value_ptr,
    d_packed_ptr, d_memory_key_ptr, d_memory_value_ptr, rows, period, eps,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, MEMORY: tl.constexpr,
):  # fmt: skip
    row, half, keep, cos, sin = place(cos_ptr, sin_ptr, rows, period, HALF, BLOCK, ROWS)
    head, size, line = tl.program_id(1), 2 * HALF, row * WIDTH
    own = line[:, None] + head * size + half
    first, second = halves(packed_ptr, own, keep, HALF)
    if head < HEADS:
        d_first, d_second = wide_halves(d_query_ptr, (row * HEADS + head)[:, None] * size + half, keep, HALF)
        d_first, d_second = unrotated(first, second, d_first, d_second, cos, sin, eps, HALF)
        store_halves(d_packed_ptr, own, d_first, d_second, keep, HALF)
    else:
        head -= HEADS
        at = (row * KV_HEADS + head)[:, None] * size + half
        below = own + KV_HEADS * size
        d_key_first, d_key_second = wide_halves(d_key_ptr, at, keep, HALF)
        d_first, d_second = wide_halves(d_value_ptr, at, keep, HALF)
        if MEMORY:
            logits, exists = line + (HEADS + 2 * KV_HEADS) * size + head, row < rows
            local, memory = gates(packed_ptr, logits, exists, KV_HEADS)
            other_first, other_second = halves(packed_ptr, below, keep, HALF)
            d_local = gate_share(d_first, d_second, other_first, other_second)
            other_first, other_second = halves(memory_value_ptr, at, keep, HALF)
            d_memory = gate_share(d_first, d_second, other_first, other_second)
            store_halves(d_memory_value_ptr, at, memory[:, None] * d_first, memory[:, None] * d_second, keep, HALF)
            d_first, d_second = local[:, None] * d_first, local[:, None] * d_second
            other_first, other_second = halves(memory_key_ptr, at, keep, HALF)
            d_memory += gate_share(d_key_first, d_key_second, other_first, other_second)
            other_first, other_second = memory[:, None] * d_key_first, memory[:, None] * d_key_second
            store_halves(d_memory_key_ptr, at, other_first, other_second, keep, HALF)
            other_first, other_second = rotated(first, second, cos, sin, eps, HALF)
            d_local += gate_share(d_key_first, d_key_second, other_first, other_second)
            d_key_first, d_key_second = local[:, None] * d_key_first, local[:, None] * d_key_second
            # of 2 sigmoid: g (1 - g / 2)
            kind = d_packed_ptr.dtype.element_ty
            tl.store(d_packed_ptr + logits, (d_local * local * (1.0 - 0.5 * local)).to(kind), mask=exists)
            d_memory = d_memory * memory * (1.0 - 0.5 * memory)
            tl.store(d_packed_ptr + logits + KV_HEADS, d_memory.to(kind), mask=exists)
        store_halves(d_packed_ptr, below, d_first, d_second, keep, HALF)
        d_key_first, d_key_second = unrotated(first, second, d_key_first, d_key_second, cos, sin, eps, HALF)
        store_halves(d_packed_ptr, own, d_key_first, d_key_second, keep, HALF)
        if head == 0:
            # filler is multiplied like anything else, so it has to be a number
            used: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF + 2 * KV_HEADS * MEMORY
            column = used + tl.arange(0, FILLER)[None, :]
            nothing = tl.zeros([ROWS, FILLER], d_packed_ptr.dtype.element_ty)
            tl.store(d_packed_ptr + line[:, None] + column, nothing, mask=(row < rows)[:, None] & (column < WIDTH))


def launch(
    kernel: Any, packed: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, memory: bool, *tensors: Tensor
) -> None:
    """All tensors are contiguous; `cos` (rows or a divisor of them, half) says after how many rows angles repeat."""
    assert all(tensor.is_contiguous() for tensor in (packed, cos, sin, *tensors))
    half, width = cos.shape[-1], packed.shape[-1]
    rows, block = packed.numel() // width, power_of_two(half)
    assert 0 <= width - (heads + 2 * kv_heads) * 2 * half - 2 * kv_heads * memory < FILLER
    per_program = max(1, TILE // (2 * block))
    kernel[(-(-rows // per_program), heads + kv_heads)](
        packed, cos, sin, *tensors, rows, cos.numel() // half, NORM_EPS,
        WIDTH=width, HEADS=heads, KV_HEADS=kv_heads, HALF=half, BLOCK=block, ROWS=per_program, MEMORY=memory,
        num_warps=WARPS,
    )  # fmt: skip


def empty_heads(packed: Tensor, cos: Tensor, heads: int) -> Tensor:
    return packed.new_empty(*packed.shape[:-1], heads, 2 * cos.shape[-1])


@torch.library.custom_op("maglev::inject", mutates_args=())
def inject_op(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory_key: Tensor | None,
    memory_value: Tensor | None,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (empty_heads(packed, cos, count) for count in (heads, kv_heads, kv_heads))
    has_memory = memory_key is not None
    # without memory the kernel reads nothing there
    memory = [packed if tensor is None else tensor for tensor in (memory_key, memory_value)]
    launch(inject_kernel, packed, cos, sin, heads, kv_heads, has_memory, *memory, query, key, value)
    return query, key, value


@inject_op.register_fake
def _(
    packed: Tensor, cos: Tensor, sin: Tensor, key: Tensor | None, value: Tensor | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (empty_heads(packed, cos, count) for count in (heads, kv_heads, kv_heads))
    return query, key, value


@torch.library.custom_op("maglev::inject_backward", mutates_args=())
def inject_backward_op(
    packed: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory_key: Tensor | None,
    memory_value: Tensor | None,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of what was packed and of memory, the latter empty where there is none."""
    has_memory = memory_key is not None
    memory = [packed if tensor is None else tensor for tensor in (memory_key, memory_value)]
    d_packed, d_memory_key, d_memory_value = gradients_of(packed, memory_key, memory_value)
    given = (*memory, d_query, d_key, d_value, d_packed, d_memory_key, d_memory_value)
    launch(inject_backward_kernel, packed, cos, sin, d_query.shape[-2], d_key.shape[-2], has_memory, *given)
    return d_packed, d_memory_key, d_memory_value


def gradients_of(
    packed: Tensor, memory_key: Tensor | None, memory_value: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (
        packed.new_empty(0) if each is None else torch.empty_like(each) for each in (memory_key, memory_value)
    )
    return torch.empty_like(packed), key, value


@inject_backward_op.register_fake
def _(
    packed: Tensor, cos: Tensor, sin: Tensor, memory_key: Tensor | None, memory_value: Tensor | None, *rest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_of(packed, memory_key, memory_value)


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    packed, cos, sin, memory_key, memory_value, *_ = inputs
    ctx.save_for_backward(packed, cos, sin, memory_key, memory_value)


def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    found = inject_backward_op(*ctx.saved_tensors, *(gradient.contiguous() for gradient in gradients))
    d_packed, *d_memory = found
    d_key, d_value = (None, None) if ctx.saved_tensors[3] is None else d_memory
    return d_packed, None, None, d_key, d_value, None, None


inject_op.register_autograd(backward, setup_context=keep_inputs)


def inject(
    packed: Tensor, cos: Tensor, sin: Tensor, memory: tuple[Tensor, Tensor] | None, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """packed (B, T, columns) and memory features (B, T, G, Dh) to `reference.inject`'s queries, keys and values."""
    memory_key, memory_value = (None, None) if memory is None else (each.contiguous() for each in memory)
    angles = cos.contiguous(), sin.contiguous()
    mixed: tuple[Tensor, Tensor, Tensor] = inject_op(
        packed.contiguous(), *angles, memory_key, memory_value, heads, kv_heads
    )
    return mixed
