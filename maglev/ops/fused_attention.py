"""Causal windowed attention of whole rows, forward and backward, for training on CUDA.

A program takes a block of queries (or, for the gradients of keys and values, of keys) and walks along the band that the
window leaves: a masked edge, blocks that are seen whole and need no mask, a masked edge. Nothing outside of the band is
touched, and nothing is written but the results and one number per query and head.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import power_of_two

# a score that no key has: what a row adds up before it sees its first key is scaled to 0 by that key
NOTHING = tl.constexpr(-1.0e30)
LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


TILES = {"forward": Tile(128, 64, 8, 3), "queries": Tile(128, 64, 8, 3), "keys": Tile(64, 128, 8, 2)}


@triton.jit
def block_of(start_ptr, first, stride, length, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows (ROWS, BLOCK) of one head from `first` on; zeros beyond the text and beyond the head."""
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(start_ptr + at, mask=(row < length)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_block(start_ptr, first, stride, length, values, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    keep = (row < length)[:, None] & (column < WIDTH)[None, :]
    tl.store(start_ptr + at, values.to(start_ptr.dtype.element_ty), mask=keep)


@triton.jit
def in_band(query, key, window):  # type: ignore[no-untyped-def]
    return (key <= query) & (key > query - window)


@triton.jit
def keys_of(first, window, QUERIES: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """For queries from `first` on: the first block of keys that any of them sees, the first that all of them see, and
    the one where some keys come after some queries."""
    low = tl.maximum(first - window + 1, 0) // KEYS * KEYS
    diagonal = first // KEYS * KEYS
    whole = tl.cdiv(tl.maximum(first + QUERIES - window, 0), KEYS) * KEYS
    return low, tl.minimum(tl.maximum(whole, low), diagonal), diagonal


@triton.jit
def walk_forward(  # type: ignore[no-untyped-def]
    sums, weight, top, query, key_ptr, value_ptr, first, low, high, stride, length, window, scale,
    MASKED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The softmax sums of a block of queries, with the keys from `low` to `high` added."""
    at = first + tl.arange(0, QUERIES)
    for begin in range(low, high, KEYS):
        key = block_of(key_ptr, begin, stride, length, KEYS, WIDTH, BLOCK)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
        if MASKED:
            scores = tl.where(in_band(at[:, None], begin + tl.arange(0, KEYS)[None, :], window), scores, NOTHING)
        best = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp2(scores - best[:, None])
        fade = tl.exp2(top - best)
        weight = weight * fade + tl.sum(shares, axis=1)
        value = block_of(value_ptr, begin, stride, length, KEYS, WIDTH, BLOCK)
        sums = tl.dot(shares.to(value.dtype), value, sums * fade[:, None], input_precision=EXACT)
        top = best
    return sums, weight, top


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, out_ptr, log_ptr, length, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`log_ptr` (B, H, T) takes the binary logarithm of every row's sum of exponentials."""
    first, row, head = tl.program_id(0) * QUERIES, tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    stride, shared = HEADS * WIDTH, HEADS // GROUP * WIDTH
    begin = row.to(tl.int64) * length
    query_ptr += begin * stride + head * WIDTH
    key_ptr += begin * shared + head // GROUP * WIDTH
    value_ptr += begin * shared + head // GROUP * WIDTH
    query = block_of(query_ptr, first, stride, length, QUERIES, WIDTH, BLOCK)
    low, whole, diagonal = keys_of(first, window, QUERIES, KEYS)
    sums = tl.zeros([QUERIES, BLOCK], tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    top = tl.zeros([QUERIES], tl.float32) + NOTHING
    sums, weight, top = walk_forward(
        sums, weight, top, query, key_ptr, value_ptr, first, low, whole, shared, length, window, scale,
        True, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
    )  # fmt: skip
    sums, weight, top = walk_forward(
        sums, weight, top, query, key_ptr, value_ptr, first, whole, diagonal, shared, length, window, scale,
        False, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
    )  # fmt: skip
    sums, weight, top = walk_forward(
        sums, weight, top, query, key_ptr, value_ptr, first, diagonal, tl.minimum(first + QUERIES, length), shared,
        length, window, scale, True, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
    )  # fmt: skip
    store_block(
        out_ptr + begin * stride + head * WIDTH, first, stride, length, sums / weight[:, None], QUERIES, WIDTH, BLOCK
    )
    at = first + tl.arange(0, QUERIES)
    tl.store(log_ptr + tl.program_id(1).to(tl.int64) * length + at, top + tl.log2(weight), mask=at < length)


@triton.jit
def walk_queries(  # type: ignore[no-untyped-def]
    d_query, query, d_out, log, delta, key_ptr, value_ptr, first, low, high, stride, length, window, scale,
    MASKED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    at = first + tl.arange(0, QUERIES)
    for begin in range(low, high, KEYS):
        key = block_of(key_ptr, begin, stride, length, KEYS, WIDTH, BLOCK)
        value = block_of(value_ptr, begin, stride, length, KEYS, WIDTH, BLOCK)
        shares = tl.exp2(tl.dot(query, tl.trans(key), input_precision=EXACT) * scale - log[:, None])
        if MASKED:
            shares = tl.where(in_band(at[:, None], begin + tl.arange(0, KEYS)[None, :], window), shares, 0.0)
        d_shares = tl.dot(d_out, tl.trans(value), input_precision=EXACT)
        d_scores = shares * (d_shares - delta[:, None])
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query, input_precision=EXACT)
    return d_query


@triton.jit
def queries_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, out_ptr, log_ptr, d_out_ptr, delta_ptr, d_query_ptr, length, window, scale, slope,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of queries; on the way what `keys_kernel` needs of every query: out . d_out."""
    first, row, head = tl.program_id(0) * QUERIES, tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    stride, shared = HEADS * WIDTH, HEADS // GROUP * WIDTH
    begin = row.to(tl.int64) * length
    own = begin * stride + head * WIDTH
    key_ptr += begin * shared + head // GROUP * WIDTH
    value_ptr += begin * shared + head // GROUP * WIDTH
    at = first + tl.arange(0, QUERIES)
    line = tl.program_id(1).to(tl.int64) * length + at
    query = block_of(query_ptr + own, first, stride, length, QUERIES, WIDTH, BLOCK)
    d_out = block_of(d_out_ptr + own, first, stride, length, QUERIES, WIDTH, BLOCK)
    out = block_of(out_ptr + own, first, stride, length, QUERIES, WIDTH, BLOCK)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), axis=1)
    tl.store(delta_ptr + line, delta, mask=at < length)
    # beyond the text shares are exp2(0 - a lot) = 0
    log = tl.load(log_ptr + line, mask=at < length, other=1.0e30)
    low, whole, diagonal = keys_of(first, window, QUERIES, KEYS)
    d_query = tl.zeros([QUERIES, BLOCK], tl.float32)
    d_query = walk_queries(
        d_query, query, d_out, log, delta, key_ptr, value_ptr, first, low, whole, shared, length, window, scale,
        True, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
    )  # fmt: skip
    d_query = walk_queries(
        d_query, query, d_out, log, delta, key_ptr, value_ptr, first, whole, diagonal, shared, length, window, scale,
        False, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
    )  # fmt: skip
    d_query = walk_queries(
        d_query, query, d_out, log, delta, key_ptr, value_ptr, first, diagonal, tl.minimum(first + QUERIES, length),
        shared, length, window, scale, True, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
    )  # fmt: skip
    store_block(d_query_ptr + own, first, stride, length, d_query * slope, QUERIES, WIDTH, BLOCK)


@triton.jit
def walk_keys(  # type: ignore[no-untyped-def]
    d_key, d_value, key, value, query_ptr, d_out_ptr, log_ptr, delta_ptr, first, low, high, stride, length, window,
    scale, MASKED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    for begin in range(low, high, QUERIES):
        at = begin + tl.arange(0, QUERIES)
        query = block_of(query_ptr, begin, stride, length, QUERIES, WIDTH, BLOCK)
        log = tl.load(log_ptr + at, mask=at < length, other=1.0e30)
        shares = tl.exp2(tl.dot(key, tl.trans(query), input_precision=EXACT) * scale - log[None, :])  # (KEYS, QUERIES)
        if MASKED:
            shares = tl.where(in_band(at[None, :], first + tl.arange(0, KEYS)[:, None], window), shares, 0.0)
        d_out = block_of(d_out_ptr, begin, stride, length, QUERIES, WIDTH, BLOCK)
        d_value = tl.dot(shares.to(d_out.dtype), d_out, d_value, input_precision=EXACT)
        delta = tl.load(delta_ptr + at, mask=at < length, other=0.0)
        d_shares = tl.dot(value, tl.trans(d_out), input_precision=EXACT)
        d_scores = shares * (d_shares - delta[None, :])
        d_key = tl.dot(d_scores.to(query.dtype), query, d_key, input_precision=EXACT)
    return d_key, d_value


@triton.jit
def keys_kernel(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, log_ptr, d_out_ptr, delta_ptr, d_key_ptr, d_value_ptr, length, window, scale, slope,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, from all heads of their group."""
    kv_heads: tl.constexpr = HEADS // GROUP
    first, row, head = tl.program_id(0) * KEYS, tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    stride, shared = HEADS * WIDTH, kv_heads * WIDTH
    begin = row.to(tl.int64) * length
    own = begin * shared + head * WIDTH
    key = block_of(key_ptr + own, first, shared, length, KEYS, WIDTH, BLOCK)
    value = block_of(value_ptr + own, first, shared, length, KEYS, WIDTH, BLOCK)
    # the first queries that see some of these keys, those that see them all, those that have left some behind, the end
    low = first // QUERIES * QUERIES
    whole = tl.cdiv(first + KEYS - 1, QUERIES) * QUERIES
    last = tl.minimum(first + KEYS - 1 + window, length)
    leaving = tl.maximum((first + window) // QUERIES * QUERIES, low)
    whole = tl.minimum(whole, last)
    leaving = tl.maximum(tl.minimum(leaving, last), whole)
    d_key, d_value = tl.zeros([KEYS, BLOCK], tl.float32), tl.zeros([KEYS, BLOCK], tl.float32)
    for member in range(GROUP):
        which = head * GROUP + member
        query_at, d_out_at = query_ptr + begin * stride + which * WIDTH, d_out_ptr + begin * stride + which * WIDTH
        line = (row.to(tl.int64) * HEADS + which) * length
        d_key, d_value = walk_keys(
            d_key, d_value, key, value, query_at, d_out_at, log_ptr + line, delta_ptr + line, first, low, whole, stride,
            length, window, scale, True, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
        )  # fmt: skip
        d_key, d_value = walk_keys(
            d_key, d_value, key, value, query_at, d_out_at, log_ptr + line, delta_ptr + line, first, whole, leaving,
            stride, length, window, scale, False, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
        )  # fmt: skip
        d_key, d_value = walk_keys(
            d_key, d_value, key, value, query_at, d_out_at, log_ptr + line, delta_ptr + line, first, leaving, last,
            stride, length, window, scale, True, QUERIES, KEYS, WIDTH, BLOCK, EXACT,
        )  # fmt: skip
    store_block(d_key_ptr + own, first, shared, length, d_key * slope, KEYS, WIDTH, BLOCK)
    store_block(d_value_ptr + own, first, shared, length, d_value, KEYS, WIDTH, BLOCK)


def launch(
    kernel: Any, tile: Tile, along_keys: bool, query: Tensor, key: Tensor, window: int, *tensors: Tensor
) -> None:
    """Scores are kept in powers of two: their scale holds 1 / sqrt(head size) and the logarithm's base."""
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    assert all(tensor.is_contiguous() for tensor in (query, key, *tensors))
    step, many = (tile.keys, kv_heads) if along_keys else (tile.queries, heads)
    slope = width**-0.5
    numbers = [length, min(window, length), slope * LOG2_E] + ([] if kernel is attend_kernel else [slope])
    kernel[(-(-length // step), batch * many)](
        query, key, *tensors, *numbers,
        HEADS=heads, GROUP=heads // kv_heads, WIDTH=width, BLOCK=max(16, power_of_two(width)), QUERIES=tile.queries,
        KEYS=tile.keys, EXACT="ieee" if query.dtype == torch.float32 else "tf32", num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


@torch.library.custom_op("maglev::attend", mutates_args=())
def attend_op(query: Tensor, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
    out, log = empty_results(query)
    launch(attend_kernel, TILES["forward"], False, query, key, window, value, out, log)
    return out, log


def empty_results(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    return torch.empty_like(query), query.new_empty(batch, heads, length, dtype=torch.float32)


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
    return empty_results(query)


@torch.library.custom_op("maglev::attend_backward", mutates_args=())
def attend_backward_op(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, d_out: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    delta = torch.empty_like(log)
    d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    launch(queries_kernel, TILES["queries"], False, query, key, window, value, out, log, d_out, delta, d_query)
    launch(keys_kernel, TILES["keys"], True, query, key, window, value, log, d_out, delta, d_key, d_value)
    return d_query, d_key, d_value


@attend_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output)


def backward(ctx: Any, d_out: Tensor, d_log: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attend_backward_op(*ctx.saved_tensors, d_out.contiguous(), ctx.window), None


attend_op.register_autograd(backward, setup_context=keep)


def attention(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """query (B, T, H, Dh), key and value (B, T, G, Dh) -> (B, T, H, Dh)."""
    out: Tensor = attend_op(query.contiguous(), key.contiguous(), value.contiguous(), window)[0]
    return out
