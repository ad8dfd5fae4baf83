"""The products of a decoding step: every weight is read once, and what surrounds a product costs no pass of its own.

At batch 1 a step does little but read weights, so a kernel is judged by how many bytes it keeps in flight: each
program owns a few output rows with the whole of K. The norm comes out of the sum, since W (x r) = (W x) r for the
scalar r = 1 / rms(x), which is summed up beside the product; so does the scale of a row in 8 bits.

On GPUs that can, a kernel starts while the one before it still runs, and fetches its weights meanwhile.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from maglev.ops.inject import NORM_EPS
from maglev.ops.matrix import ARRIVALS, Matrix

# Two programs per multiprocessor of an H100 or H200: fewer leave some of them without loads in flight.
PROGRAMS = 264
MULTIPROCESSORS = 132
# More rows per program would not fit into the registers beside their sums.
VECTOR_ROWS = 4
# 32-bit registers that a thread may fill with weights before it knows the activations.
WEIGHT_REGISTERS = 96
SMALLEST_DOT = 16
LARGEST_BATCH_TILE = 64
# What the faster instructions of these GPUs take at once.
LARGEST_ROWS = 64
# What meeting at a counter costs, and each turn of the loop, as if so many numbers were loaded.
MEETING = 100_000
ITERATION = 1_000
STAGES = 5


@triton.jit
def next_kernel(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """It may start, and do what does not depend on this one, as soon as all programs of this one have come here."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def previous_kernel(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until it has ended.

    Before this a product reads nothing but weights, so it lets the next kernel start at once, and a chain of products
    has the weights of several on their way. All others let the next one start only after this: then, whatever runs,
    the step before has ended.
    """
    if EARLY:
        gdc_wait()


@triton.jit
def fetch_lines(start_ptr, rows, COUNT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask the L2 cache for the first COUNT bytes of every row, one line of SIZE at a time."""
    block: tl.constexpr = triton.next_power_of_2((COUNT + SIZE - 1) // SIZE)
    line = tl.minimum(tl.arange(0, block) * SIZE, COUNT - 1)
    address = (start_ptr + rows).to(tl.int64)[:, None] + line[None, :].to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def loaded_scales(scales_ptr, ENTRY: tl.constexpr):  # type: ignore[no-untyped-def]
    residual_scale, input_scale = 1.0, 0.0
    if ENTRY == "scales":
        residual_scale, input_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    return residual_scale, input_scale


@triton.jit
def entered(  # type: ignore[no-untyped-def]
    x_ptr, start_ptr, scales_ptr, residual_scale, input_scale, offset, column, keep, ENTRY: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """x, or a x + b x_0, or x + g m with a gate for CHANNELS each; rounded to what the residual stream holds."""
    x = tl.load(x_ptr + offset, mask=keep, other=0.0)
    if ENTRY == "scales":
        start = tl.load(start_ptr + offset, mask=keep, other=0.0)
        x = (residual_scale * x.to(tl.float32) + input_scale * start.to(tl.float32)).to(x.dtype)
    elif ENTRY == "gates":
        memory = tl.load(start_ptr + offset, mask=keep, other=0.0)
        logit = tl.load(scales_ptr + column // CHANNELS, mask=keep, other=0.0)
        share = 2.0 * tl.sigmoid(logit.to(tl.float32))
        x = (x.to(tl.float32) + share * memory.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def finished(total, base_ptr, offset, keep, cap, EPILOGUE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What becomes of the product before it is stored."""
    if EPILOGUE == "add":
        total += tl.load(base_ptr + offset, mask=keep, other=0.0).to(tl.float32)
    elif EPILOGUE == "relu2":
        total = tl.maximum(total, 0.0)
        total = total * total
    elif EPILOGUE == "softcap":
        # tanh(z) = 2 sigmoid(2 z) - 1
        total = cap * (2.0 * tl.sigmoid(2.0 * total / cap) - 1.0)
    return total


@triton.jit
def widened(weight):  # type: ignore[no-untyped-def]
    """Weights as float32. Converting integers is slow on these GPUs: an int8 b becomes the last byte of the float
    2^23 + 128 + b, and the rest is taken off."""
    if weight.dtype == tl.int8:
        bits = (weight.to(tl.int32) & 0xFF) ^ 0x4B000080
        wide = bits.to(tl.float32, bitcast=True) - 8388736.0
    else:
        wide = weight.to(tl.float32)
    return wide


@triton.jit
def vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr, start_ptr, scales_ptr, weight_ptr, row_scale_ptr, base_ptr, scaled_ptr, out_ptr, rows, cap, eps,
    K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, EIGHT_BITS: tl.constexpr,
    ENTRY: tl.constexpr, CHANNELS: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row of activations: ROWS outputs per program, every thread on its own columns until the very end."""
    next_kernel(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # rows past the end read the last one again and are not stored: no load needs a mask for them
    held = tl.minimum(row, rows - 1)
    weight_ptr += held.to(tl.int64)[:, None] * K
    weights = tl.tuple(())
    for first in tl.static_range(0, K, CHUNK):
        column = first + tl.arange(0, CHUNK)
        if K % CHUNK == 0:
            weight = tl.load(weight_ptr + column[None, :], eviction_policy="evict_first")
        else:
            keep = (column < K)[None, :]
            weight = tl.load(weight_ptr + column[None, :], mask=keep, other=0.0, eviction_policy="evict_first")
        weights = weights + (weight,)
    row_scale = 1.0
    if EIGHT_BITS:
        row_scale = tl.load(row_scale_ptr + held)
    previous_kernel(EARLY)
    total = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
    squares = tl.zeros([CHUNK], dtype=tl.float32)
    residual_scale, input_scale = loaded_scales(scales_ptr, ENTRY)
    for number in tl.static_range(0, (K + CHUNK - 1) // CHUNK):
        column = number * CHUNK + tl.arange(0, CHUNK)
        x = entered(
            x_ptr, start_ptr, scales_ptr, residual_scale, input_scale, column, column, column < K, ENTRY, CHANNELS
        )
        if ENTRY != "none":
            # by the first program alone
            tl.store(scaled_ptr + column, x, mask=column + tl.program_id(0) * K < K)
        wide = x.to(tl.float32)
        total += widened(weights[number]) * wide[None, :]
        if NORM:
            squares += wide * wide
    result = tl.sum(total, axis=1) * row_scale
    if NORM:
        result *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    inside = row < rows
    result = finished(result, base_ptr, row, inside, cap, EPILOGUE)
    tl.store(out_ptr + row, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def added_up(  # type: ignore[no-untyped-def]
    total, partial_ptr, arrivals_ptr, offset, ROWS: tl.constexpr, BATCH: tl.constexpr, SPLITS: tl.constexpr
):
    """Leave this program's sums; the last of SPLITS programs gets those of all, in the order of the columns."""
    size: tl.constexpr = ROWS * BATCH
    tl.store(partial_ptr + tl.program_id(2) * size + offset, total)
    # all warps have stored before one thread releases the count
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.store(arrivals_ptr, 0)
        total = tl.zeros([ROWS, BATCH], dtype=tl.float32)
        for number in tl.static_range(0, SPLITS):
            total += tl.load(partial_ptr + number * size + offset, cache_modifier=".cg")
    return total, arrived


@triton.jit
def batch_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, row_scale_ptr, base_ptr, out_ptr, partial_ptr, arrivals_ptr, rows, batch, cap,
    K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr, SLICE: tl.constexpr,
    SPLITS: tl.constexpr, EIGHT_BITS: tl.constexpr, EPILOGUE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BATCH rows of activations by ROWS rows of weights, over SLICE columns of both. The norm is not here: between
    the asynchronous copies and the product, nothing may pass through registers."""
    next_kernel(EARLY)
    row_in_tile, lane_in_tile = tl.arange(0, ROWS), tl.arange(0, BATCH)
    row, lane = tl.program_id(0) * ROWS + row_in_tile, tl.program_id(1) * BATCH + lane_in_tile
    begin = tl.program_id(2) * SLICE
    present, held = lane < batch, tl.minimum(row, rows - 1).to(tl.int64)
    if EARLY:
        element: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        fetch_lines(weight_ptr + begin, held * K, SLICE * element, 128)
    row_scale = 1.0
    if EIGHT_BITS:
        row_scale = tl.load(row_scale_ptr + held)[:, None]
    weight_ptr += held[:, None] * K
    previous_kernel(EARLY)
    total = tl.zeros([ROWS, BATCH], dtype=tl.float32)
    for first in range(0, SLICE, CHUNK):
        column = begin + first + tl.arange(0, CHUNK)
        keep = column < K
        if K % (CHUNK * SPLITS) == 0:
            weight = tl.load(weight_ptr + column[None, :], eviction_policy="evict_first")
        else:
            weight = tl.load(weight_ptr + column[None, :], mask=keep[None, :], other=0.0, eviction_policy="evict_first")
        offset = lane[:, None].to(tl.int64) * K + column[None, :]
        x = tl.load(x_ptr + offset, mask=present[:, None] & keep[None, :], other=0.0)
        if EIGHT_BITS:
            weight = widened(weight).to(x.dtype)
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    inside = present[None, :] & (row < rows)[:, None]
    if SPLITS > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        partial_ptr += tile.to(tl.int64) * (SPLITS * ROWS * BATCH)
        offset = row_in_tile[:, None] * BATCH + lane_in_tile[None, :]
        total, arrived = added_up(total, partial_ptr, arrivals_ptr + tile, offset, ROWS, BATCH, SPLITS)
        inside = inside & (row[:, None] * 0 + arrived == SPLITS - 1)
    total *= row_scale
    offset = lane[None, :].to(tl.int64) * rows + row[:, None]
    total = finished(total, base_ptr, offset, inside, cap, EPILOGUE)
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=inside)


# Under TRITON_INTERPRET=1 the decorator gives something else, which runs on CPU tensors.
INTERPRETED = not isinstance(vector_kernel, triton.JITFunction)


@cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels there may start before the one in front of them has ended."""
    return not INTERPRETED and torch.cuda.get_device_capability(device)[0] >= 9


def early(device: torch.device) -> dict[str, Any]:
    """What a launch says about it."""
    return {"EARLY": True, "launch_pdl": True} if starts_early(device) else {"EARLY": False}


def power_of_two(number: int) -> int:
    """The smallest one that is not below it."""
    return 1 << max(0, number - 1).bit_length()


class Tile(NamedTuple):
    """What one program takes of a matrix."""

    rows: int
    columns: int  # at a time
    warps: int
    splits: int = 1  # programs that share the columns
    batch: int = 1


def vector_tile(outputs: int, inputs: int, element_size: int) -> Tile:
    """Every thread keeps to 8 columns, or 16 bytes, in all rows of the tile: x is read in place, without a barrier.

    Columns are the largest power of two that divides K, so that no load needs a mask, else one that covers it.
    """
    per_thread = min(8, 16 // element_size)
    per_warp = 32 * per_thread
    dividing = min(inputs & -inputs, 4 * per_warp)
    columns = dividing if dividing >= per_warp else min(power_of_two(inputs), 4 * per_warp)
    warps = max(1, columns // per_warp)
    registers = -(-inputs // columns) * per_thread * element_size // 4
    rows = VECTOR_ROWS
    while rows > 1 and (
        rows * registers > WEIGHT_REGISTERS or -(-outputs // rows) < max(PROGRAMS, 2 * PROGRAMS // warps)
    ):
        rows //= 2
    return Tile(rows, columns, warps)


@cache
def batch_tile(batch: int, outputs: int, inputs: int) -> Tile:
    """The shape whose busiest multiprocessor has the least to load, weights and activations together."""
    lanes = min(LARGEST_BATCH_TILE, max(SMALLEST_DOT, power_of_two(batch)))
    columns = max(SMALLEST_DOT, min(power_of_two(inputs), 128))
    chunks = -(-inputs // columns)

    def load(tile: Tile) -> float:
        tiles = -(-outputs // tile.rows) * -(-batch // lanes)
        if tile.splits > 1 and tiles > ARRIVALS:
            return float("inf")
        rounds = -(-tiles * tile.splits // MULTIPROCESSORS)
        each = ((tile.rows + lanes) * columns + ITERATION) * (chunks // tile.splits)
        return rounds * each + MEETING * (tile.splits > 1)

    choices = [
        Tile(rows, columns, 4, splits, lanes)
        for rows in (SMALLEST_DOT, LARGEST_ROWS)
        for splits in range(1, min(chunks, 8) + 1)
        if chunks % splits == 0
    ]
    return min(choices, key=load)


def entry(start: Tensor | None, channels: int) -> str:
    """What becomes of x before its norm."""
    return "none" if start is None else "gates" if channels else "scales"


def times_vector(
    x: Tensor,
    weight: Matrix,
    *,
    epilogue: str = "none",
    norm: bool = False,
    start: Tensor | None = None,
    scales: Tensor | None = None,
    scaled: Tensor | None = None,
    channels: int = 0,
    base: Tensor | None = None,
    cap: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """epilogue(W norm(a x + b x_0)). x (1, K) -> (1, N). With `channels`, `scales` are logits of a gate for so many of
    them each, and `start` is what the gates let in."""
    out, inputs, outputs = prepared(x, weight, dtype)
    tile = vector_tile(outputs, inputs, weight.values.element_size())

    def given(tensor: Tensor | None) -> Tensor:
        # absent tensors are never read; the kernel takes any pointer for them
        return x if tensor is None else tensor

    vector_kernel[(-(-outputs // tile.rows),)](
        x, given(start), given(scales), weight.values, given(weight.scale), given(base), given(scaled), out, outputs,
        cap, NORM_EPS, K=inputs, ROWS=tile.rows, CHUNK=tile.columns, EIGHT_BITS=weight.scale is not None,
        ENTRY=entry(start, channels), CHANNELS=channels, NORM=norm, EPILOGUE=epilogue, num_warps=tile.warps,
        **early(x.device),
    )  # fmt: skip
    return out


def times_batch(
    x: Tensor,
    weight: Matrix,
    *,
    epilogue: str = "none",
    base: Tensor | None = None,
    cap: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """epilogue(W x). x (B, K) -> (B, N)"""
    out, inputs, outputs = prepared(x, weight, dtype)
    batch = x.shape[0]
    tile = batch_tile(batch, outputs, inputs)
    tiles = -(-outputs // tile.rows), -(-batch // tile.batch)
    shared = tiles[0] * tiles[1] * tile.splits * tile.rows * tile.batch if tile.splits > 1 else 0
    partial = torch.empty(shared, dtype=torch.float32, device=x.device)
    batch_kernel[(*tiles, tile.splits)](
        x, weight.values, x if weight.scale is None else weight.scale, x if base is None else base, out, partial,
        weight.arrivals, outputs, batch, cap, K=inputs, ROWS=tile.rows, CHUNK=tile.columns, BATCH=tile.batch,
        SLICE=-(-inputs // tile.columns) // tile.splits * tile.columns, SPLITS=tile.splits,
        EIGHT_BITS=weight.scale is not None, EPILOGUE=epilogue, num_warps=tile.warps, num_stages=STAGES,
        **early(x.device),
    )  # fmt: skip
    return out


def prepared(x: Tensor, weight: Matrix, dtype: torch.dtype | None) -> tuple[Tensor, int, int]:
    """Where the product goes, and how many numbers it takes and gives."""
    values = weight.values
    assert x.is_contiguous() and values.is_contiguous() and (weight.scale is not None or x.dtype == values.dtype)
    return x.new_empty(x.shape[0], weight.rows, dtype=dtype or x.dtype), x.shape[1], weight.rows
