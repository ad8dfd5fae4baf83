"""Memory injection in one launch each way: queries and keys are normalised and rotated, keys and values mixed.

A program takes some rows of one head. Backward computes the normalised keys and the gates again from what the
projections gave, so nothing in between is ever written. Both are ops of PyTorch, which its compiler takes as they are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import power_of_two
from maglev.ops.fused_ring import halves, rotated, store_halves
from maglev.ops.inject import NORM_EPS

DTYPES = (torch.float32, torch.bfloat16)
# Numbers of a program's tile of one head, and its warps.
TILE, WARPS = 2048, 4


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
def gates(local_ptr, memory_ptr, at, exists):  # type: ignore[no-untyped-def]
    local = 2.0 * tl.sigmoid(tl.load(local_ptr + at, mask=exists, other=0.0).to(tl.float32))
    return local, 2.0 * tl.sigmoid(tl.load(memory_ptr + at, mask=exists, other=0.0).to(tl.float32))


@triton.jit
def inject_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, memory_key_ptr, memory_value_ptr, local_ptr, memory_ptr,
    out_query_ptr, out_key_ptr, out_value_ptr, rows, period, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, half, keep, cos, sin = place(cos_ptr, sin_ptr, rows, period, HALF, BLOCK, ROWS)
    head = tl.program_id(1)
    if head < HEADS:
        at = (row * HEADS + head)[:, None] * (2 * HALF) + half
        first, second = halves(query_ptr, at, keep, HALF)
        first, second = rotated(first, second, cos, sin, eps, HALF)
        store_halves(out_query_ptr, at, first, second, keep, HALF)
    else:
        pair = row * KV_HEADS + (head - HEADS)
        local, memory = gates(local_ptr, memory_ptr, pair, row < rows)
        at = pair[:, None] * (2 * HALF) + half
        first, second = halves(key_ptr, at, keep, HALF)
        first, second = rotated(first, second, cos, sin, eps, HALF)
        other_first, other_second = halves(memory_key_ptr, at, keep, HALF)
        first = local[:, None] * first + memory[:, None] * other_first.to(tl.float32)
        second = local[:, None] * second + memory[:, None] * other_second.to(tl.float32)
        store_halves(out_key_ptr, at, first, second, keep, HALF)
        first, second = halves(value_ptr, at, keep, HALF)
        other_first, other_second = halves(memory_value_ptr, at, keep, HALF)
        first = local[:, None] * first.to(tl.float32) + memory[:, None] * other_first.to(tl.float32)
        second = local[:, None] * second.to(tl.float32) + memory[:, None] * other_second.to(tl.float32)
        store_halves(out_value_ptr, at, first, second, keep, HALF)


@triton.jit
def gate_share(d_first, d_second, first, second):  # type: ignore[no-untyped-def]
    """What a feature adds to the gradient of its gate. (rows,)"""
    return tl.sum(d_first * first.to(tl.float32) + d_second * second.to(tl.float32), axis=1)


@triton.jit
def inject_backward_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, cos_ptr, sin_ptr, memory_key_ptr, memory_value_ptr, local_ptr, memory_ptr,
    d_out_query_ptr, d_out_key_ptr, d_out_value_ptr,
    d_query_ptr, d_key_ptr, d_value_ptr, d_memory_key_ptr, d_memory_value_ptr, d_local_ptr, d_memory_ptr,
    rows, period, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, half, keep, cos, sin = place(cos_ptr, sin_ptr, rows, period, HALF, BLOCK, ROWS)
    head = tl.program_id(1)
    if head < HEADS:
        at = (row * HEADS + head)[:, None] * (2 * HALF) + half
        d_first, d_second = halves(d_out_query_ptr, at, keep, HALF)
        first, second = halves(query_ptr, at, keep, HALF)
        d_first, d_second = unrotated(
            first, second, d_first.to(tl.float32), d_second.to(tl.float32), cos, sin, eps, HALF
        )
        store_halves(d_query_ptr, at, d_first, d_second, keep, HALF)
    else:
        pair = row * KV_HEADS + (head - HEADS)
        local, memory = gates(local_ptr, memory_ptr, pair, row < rows)
        at = pair[:, None] * (2 * HALF) + half
        d_first, d_second = halves(d_out_value_ptr, at, keep, HALF)
        d_first, d_second = d_first.to(tl.float32), d_second.to(tl.float32)
        first, second = halves(value_ptr, at, keep, HALF)
        d_local = gate_share(d_first, d_second, first, second)
        first, second = halves(memory_value_ptr, at, keep, HALF)
        d_memory = gate_share(d_first, d_second, first, second)
        store_halves(d_value_ptr, at, local[:, None] * d_first, local[:, None] * d_second, keep, HALF)
        store_halves(d_memory_value_ptr, at, memory[:, None] * d_first, memory[:, None] * d_second, keep, HALF)
        d_first, d_second = halves(d_out_key_ptr, at, keep, HALF)
        d_first, d_second = d_first.to(tl.float32), d_second.to(tl.float32)
        first, second = halves(memory_key_ptr, at, keep, HALF)
        d_memory += gate_share(d_first, d_second, first, second)
        store_halves(d_memory_key_ptr, at, memory[:, None] * d_first, memory[:, None] * d_second, keep, HALF)
        first, second = halves(key_ptr, at, keep, HALF)
        normed_first, normed_second = rotated(first, second, cos, sin, eps, HALF)
        d_local += gate_share(d_first, d_second, normed_first, normed_second)
        d_first, d_second = local[:, None] * d_first, local[:, None] * d_second
        d_first, d_second = unrotated(first, second, d_first, d_second, cos, sin, eps, HALF)
        store_halves(d_key_ptr, at, d_first, d_second, keep, HALF)
        # of 2 sigmoid: g (1 - g / 2)
        kind = d_local_ptr.dtype.element_ty
        tl.store(d_local_ptr + pair, (d_local * local * (1.0 - 0.5 * local)).to(kind), mask=row < rows)
        tl.store(d_memory_ptr + pair, (d_memory * memory * (1.0 - 0.5 * memory)).to(kind), mask=row < rows)


def launch(kernel: Any, query: Tensor, key: Tensor, cos: Tensor, *tensors: Tensor) -> None:
    """All tensors are contiguous; `cos` (rows or a divisor of them, half) says after how many rows angles repeat."""
    assert all(tensor.is_contiguous() for tensor in (query, key, cos, *tensors))
    heads, head_dim = query.shape[-2:]
    kv_heads, half = key.shape[-2], head_dim // 2
    rows, block = query.numel() // (heads * head_dim), power_of_two(half)
    per_program = max(1, TILE // (2 * block))
    value, sin, *rest = tensors
    kernel[(-(-rows // per_program), heads + kv_heads)](
        query, key, value, cos, sin, *rest, rows, cos.numel() // half, NORM_EPS,
        HEADS=heads, KV_HEADS=kv_heads, HALF=half, BLOCK=block, ROWS=per_program, num_warps=WARPS,
    )  # fmt: skip


@torch.library.custom_op("maglev::inject", mutates_args=())
def inject_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory_key: Tensor,
    memory_value: Tensor,
    local_logits: Tensor,
    memory_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    outs = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    launch(inject_kernel, query, key, cos, value, sin, memory_key, memory_value, local_logits, memory_logits, *outs)
    return outs


@inject_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@torch.library.custom_op("maglev::inject_backward", mutates_args=())
def inject_backward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory_key: Tensor,
    memory_value: Tensor,
    local_logits: Tensor,
    memory_logits: Tensor,
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = (query, key, value, memory_key, memory_value, local_logits, memory_logits)
    inputs = (value, sin, memory_key, memory_value, local_logits, memory_logits, d_query, d_key, d_value)
    a, b, c, d, e, f, g = (torch.empty_like(tensor) for tensor in wanted)
    launch(inject_backward_kernel, query, key, cos, *inputs, a, b, c, d, e, f, g)
    return a, b, c, d, e, f, g


@inject_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in (query, key, value, *rest[:4]))


def keep_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    found = inject_backward_op(*ctx.saved_tensors, *(gradient.contiguous() for gradient in gradients))
    d_query, d_key, d_value, *others = found
    return d_query, d_key, d_value, None, None, *others


inject_op.register_autograd(backward, setup_context=keep_inputs)


def inject(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory_key: Tensor,
    memory_value: Tensor,
    local_logits: Tensor,
    memory_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.inject`."""
    given = (query, key, value, cos, sin, memory_key, memory_value, local_logits, memory_logits)
    mixed: tuple[Tensor, Tensor, Tensor] = inject_op(*(tensor.contiguous() for tensor in given))
    return mixed


def serves(query: Tensor, cos: Tensor) -> bool:
    return query.dtype in DTYPES and cos.dtype == torch.float32
