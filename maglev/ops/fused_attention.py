"""Causal windowed attention, forward and backward, for training on CUDA: of all positions of a row or every nth.

A program takes a block of queries (or, for the gradients of keys and values, of keys) and walks along the band that the
window leaves; only blocks that the band's border crosses are masked. Nothing outside of the band is touched, and
nothing is written but the results and one number per query and head. Blocks are fetched through descriptors, which the
GPU's own engine for tensors takes where it has one (TMA). Sums are made in one order: results are the same each time.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from maglev.ops.fused_product import power_of_two

# A score that no key has, and the largest of a row that has seen none yet. That is far above: a masked score less the
# largest is rounded but once on a GPU, so that the two must not be alike, or what is left of them overflows.
NOTHING, NONE_YET = tl.constexpr(-1.0e30), tl.constexpr(-1.0e20)
LN_2 = tl.constexpr(math.log(2))
DTYPES = (torch.bfloat16, torch.float16)
SMALLEST_HEAD, LARGEST_HEAD = 16, 128
# descriptors want rows to begin at multiples of so many bytes
ALIGNED = 16


class Tile(NamedTuple):
    queries: int
    keys: int
    warps: int
    stages: int


TILES = {"forward": Tile(64, 64, 4, 2), "queries": Tile(64, 64, 4, 2), "keys": Tile(64, 64, 4, 2)}


@triton.jit
def rows_of(source, row, head, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions (ROWS, BLOCK) of one head from `first` on; zeros beyond the text and beyond the head."""
    return source.load([row, head, first, 0]).reshape(ROWS, BLOCK)


@triton.jit
def store_rows(  # type: ignore[no-untyped-def]
    target, row, head, first, length, values, ROWS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    target += (row.to(tl.int64) * length * HEADS + head) * WIDTH
    at, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    place = target + at.to(tl.int64) * (HEADS * WIDTH) + column
    tl.store(place, values.to(target.dtype.element_ty), mask=(at < length) & (column < WIDTH))


@triton.jit
def in_band(query, key, window):  # type: ignore[no-untyped-def]
    """0 <= query - key < window, as one comparison: what is negative is large without its sign."""
    return tl.cast(query - key, tl.uint32) < tl.cast(window, tl.uint32)


@triton.jit(do_not_specialize=["start"])
def attend_kernel(  # type: ignore[no-untyped-def]
    query_from, key_from, value_from, out_ptr, log_ptr, count, start, length, window, scale, STEP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Query i of `count` stands at start + i * STEP of `length` keys. `log_ptr` (B, H, Q) takes the binary logarithm of
    every row's sum of exponentials."""
    # the last queries first: without a window they have the most keys
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    query = rows_of(query_from, row, head, first, QUERIES, BLOCK)
    index = first + tl.arange(0, QUERIES)
    at, begins, ends = start + index * STEP, start + first * STEP, start + (first + QUERIES - 1) * STEP
    low = tl.maximum(begins - window + 1, 0) // KEYS * KEYS
    sums = tl.zeros([QUERIES, BLOCK], tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    top = tl.zeros([QUERIES], tl.float32) + NONE_YET
    for begin in range(low, tl.minimum(ends + 1, length), KEYS):
        key = rows_of(key_from, row, head // GROUP, begin, KEYS, BLOCK)
        scores = tl.dot(query, tl.trans(key), input_precision=EXACT)
        if (begin + KEYS > begins) | (begin <= ends - window):
            scores = tl.where(in_band(at[:, None], begin + tl.arange(0, KEYS)[None, :], window), scores, NOTHING)
        # scaled after the largest is known: one instruction then scales and subtracts
        best = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shares = tl.exp2(scores * scale - best[:, None])
        fade = tl.exp2(top - best)
        weight = weight * fade + tl.sum(shares, axis=1)
        value = rows_of(value_from, row, head // GROUP, begin, KEYS, BLOCK)
        sums = tl.dot(shares.to(value.dtype), value, sums * fade[:, None], input_precision=EXACT)
        top = best
    store_rows(out_ptr, row, head, first, count, sums / weight[:, None], QUERIES, HEADS, WIDTH, BLOCK)
    tl.store(log_ptr + tl.program_id(1).to(tl.int64) * count + index, top + tl.log2(weight), mask=index < count)


@triton.jit(do_not_specialize=["start"])
def queries_kernel(  # type: ignore[no-untyped-def]
    query_from, key_from, value_from, out_from, log_ptr, d_out_from, delta_ptr, d_query_ptr,
    count, start, length, window, scale, STEP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradient of queries; on the way what `keys_kernel` needs of every query: out . d_out."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    index = first + tl.arange(0, QUERIES)
    at, begins, ends = start + index * STEP, start + first * STEP, start + (first + QUERIES - 1) * STEP
    line = tl.program_id(1).to(tl.int64) * count + index
    query = rows_of(query_from, row, head, first, QUERIES, BLOCK)
    d_out = rows_of(d_out_from, row, head, first, QUERIES, BLOCK)
    out = rows_of(out_from, row, head, first, QUERIES, BLOCK)
    delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), axis=1)
    tl.store(delta_ptr + line, delta, mask=index < count)
    log = tl.load(log_ptr + line, mask=index < count, other=0.0)
    low = tl.maximum(begins - window + 1, 0) // KEYS * KEYS
    d_query = tl.zeros([QUERIES, BLOCK], tl.float32)
    for begin in range(low, tl.minimum(ends + 1, length), KEYS):
        key = rows_of(key_from, row, head // GROUP, begin, KEYS, BLOCK)
        value = rows_of(value_from, row, head // GROUP, begin, KEYS, BLOCK)
        shares = tl.exp2(tl.dot(query, tl.trans(key), input_precision=EXACT) * scale - log[:, None])
        if (begin + KEYS > begins) | (begin <= ends - window):
            shares = tl.where(in_band(at[:, None], begin + tl.arange(0, KEYS)[None, :], window), shares, 0.0)
        d_shares = tl.dot(d_out, tl.trans(value), input_precision=EXACT)
        d_scores = shares * (d_shares - delta[:, None])
        d_query = tl.dot(d_scores.to(key.dtype), key, d_query, input_precision=EXACT)
    store_rows(d_query_ptr, row, head, first, count, d_query * (scale * LN_2), QUERIES, HEADS, WIDTH, BLOCK)


@triton.jit(do_not_specialize=["start"])
def keys_kernel(  # type: ignore[no-untyped-def]
    query_from, key_from, value_from, log_ptr, d_out_from, delta_ptr, d_key_ptr, d_value_ptr,
    count, start, length, window, scale, STEP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, from all heads of their group."""
    kv_heads: tl.constexpr = HEADS // GROUP
    first, row, head = tl.program_id(0) * KEYS, tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    key = rows_of(key_from, row, head, first, KEYS, BLOCK)
    value = rows_of(value_from, row, head, first, KEYS, BLOCK)
    own = first + tl.arange(0, KEYS)
    # the queries from the first of these keys on, until the last of them is left behind
    low = tl.maximum(first - start + STEP - 1, 0) // STEP // QUERIES * QUERIES
    last = tl.minimum(tl.maximum(first + KEYS - 1 + window - start + STEP - 1, 0) // STEP, count)
    d_key, d_value = tl.zeros([KEYS, BLOCK], tl.float32), tl.zeros([KEYS, BLOCK], tl.float32)
    for member in range(GROUP):
        which = head * GROUP + member
        line = (row.to(tl.int64) * HEADS + which) * count
        for begin in range(low, last, QUERIES):
            index = begin + tl.arange(0, QUERIES)
            begins, ends = start + begin * STEP, start + (begin + QUERIES - 1) * STEP
            query = rows_of(query_from, row, which, begin, QUERIES, BLOCK)
            log = tl.load(log_ptr + line + index, mask=index < count, other=0.0)
            shares = tl.exp2(tl.dot(key, tl.trans(query), input_precision=EXACT) * scale - log[None, :])
            if (begins < first + KEYS - 1) | (ends >= first + window) | (begin + QUERIES > count):
                seeing = tl.where(index < count, start + index * STEP, -1)
                shares = tl.where(in_band(seeing[None, :], own[:, None], window), shares, 0.0)  # (KEYS, QUERIES)
            d_out = rows_of(d_out_from, row, which, begin, QUERIES, BLOCK)
            d_value = tl.dot(shares.to(d_out.dtype), d_out, d_value, input_precision=EXACT)
            delta = tl.load(delta_ptr + line + index, mask=index < count, other=0.0)
            d_shares = tl.dot(value, tl.trans(d_out), input_precision=EXACT)
            d_scores = shares * (d_shares - delta[None, :])
            d_key = tl.dot(d_scores.to(query.dtype), query, d_key, input_precision=EXACT)
    store_rows(d_key_ptr, row, head, first, length, d_key * (scale * LN_2), KEYS, kv_heads, WIDTH, BLOCK)
    store_rows(d_value_ptr, row, head, first, length, d_value, KEYS, kv_heads, WIDTH, BLOCK)


def blocks(rows: int, *tensors: Tensor) -> list[TensorDescriptor]:
    """Of tensors (B, T, heads, Dh), to be fetched so many positions of one head at a time."""
    found = []
    for tensor in tensors:
        assert tensor.is_contiguous()
        batch, length, heads, width = tensor.shape
        strides = [length * heads * width, width, heads * width, 1]
        block = [1, 1, rows, padded(width)]
        found.append(TensorDescriptor(tensor, [batch, heads, length, width], strides, block))
    return found


def padded(width: int) -> int:
    """Products want at least so many columns."""
    return max(16, power_of_two(width))


class Places(NamedTuple):
    """Query i stands at start + i * step; it sees `window` keys, itself included."""

    window: int
    start: int
    step: int


def launch(
    kernel: Any, tile: Tile, query: Tensor, key: Tensor, places: Places, *given: Tensor | TensorDescriptor
) -> None:
    """Scores are kept in powers of two: their scale holds 1 / sqrt(head size) and the logarithm's base."""
    batch, count, heads, width = query.shape
    length, kv_heads = key.shape[1:3]
    if kernel is keys_kernel:
        grid = (-(-length // tile.keys), batch * kv_heads)
    else:
        grid = (-(-count // tile.queries), batch * heads)
    kernel[grid](
        *given, count, places.start, length, min(places.window, length), width**-0.5 / math.log(2), STEP=places.step,
        HEADS=heads, GROUP=heads // kv_heads, WIDTH=width, BLOCK=padded(width), QUERIES=tile.queries, KEYS=tile.keys,
        EXACT="ieee" if query.dtype == torch.float32 else "tf32", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@torch.library.custom_op("maglev::attend", mutates_args=())
def attend_op(query: Tensor, key: Tensor, value: Tensor, window: int, start: int, step: int) -> tuple[Tensor, Tensor]:
    """All three contiguous. -> out, and the logarithms that backward wants (B, H, Q)"""
    out, log = empty_results(query)
    tile = TILES["forward"]
    asked, seen = blocks(tile.queries, query), blocks(tile.keys, key, value)
    launch(attend_kernel, tile, query, key, Places(window, start, step), *asked, *seen, out, log)
    return out, log


def empty_results(query: Tensor) -> tuple[Tensor, Tensor]:
    batch, count, heads, _ = query.shape
    return torch.empty_like(query), query.new_empty(batch, heads, count, dtype=torch.float32)


@attend_op.register_fake
def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_results(query)


@torch.library.custom_op("maglev::attend_backward", mutates_args=())
def attend_backward_op(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, log: Tensor, d_out: Tensor,
    window: int, start: int, step: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    delta, places = torch.empty_like(log), Places(window, start, step)
    d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    tile = TILES["queries"]
    (q, o, d_o), seen = blocks(tile.queries, query, out, d_out), blocks(tile.keys, key, value)
    launch(queries_kernel, tile, query, key, places, q, *seen, o, log, d_o, delta, d_query)
    tile = TILES["keys"]
    (q, d_o), seen = blocks(tile.queries, query, d_out), blocks(tile.keys, key, value)
    launch(keys_kernel, tile, query, key, places, q, *seen, log, d_o, delta, d_key, d_value)
    return d_query, d_key, d_value


@attend_backward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, *ctx.places = inputs
    ctx.save_for_backward(query, key, value, *output)


def backward(ctx: Any, d_out: Tensor, d_log: Tensor | None) -> tuple[Tensor | None, ...]:
    return *attend_backward_op(*ctx.saved_tensors, d_out.contiguous(), *ctx.places), None, None, None


attend_op.register_autograd(backward, setup_context=keep)


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in DTYPES and SMALLEST_HEAD <= head_dim <= LARGEST_HEAD and head_dim * dtype.itemsize % ALIGNED == 0


def attention(query: Tensor, key: Tensor, value: Tensor, window: int, queries: range | None = None) -> Tensor:
    """query (B, Q, H, Dh), key and value (B, T, G, Dh) -> (B, Q, H, Dh). `queries`: their positions, all T or some."""
    queries = range(key.shape[1]) if queries is None else queries
    given = (each.contiguous() for each in (query, key, value))
    out: Tensor = attend_op(*given, window, queries.start, queries.step)[0]
    return out
