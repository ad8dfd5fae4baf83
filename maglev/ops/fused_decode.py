"""Triton kernels for one decoding step; `decode_steps` defines what each of them computes.

At batch 1 a step reads every weight once and does little else, so a matrix-vector kernel is judged by how many bytes
it keeps in flight: each program owns a few output rows with the whole of K. The norm costs no pass of its own, since
W (x r) = (W x) r for the scalar r = 1 / rms(x), which is summed up beside the product.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_ring import power_of_two, ring_attend
from maglev.ops.inject import NORM_EPS

__all__ = [
    "begin_step",
    "finish_step",
    "norm_project_relu2",
    "project",
    "project_add",
    "read_out",
    "ring_attend",
    "scale_norm_project",
]

# Beyond this many rows a matrix product of its own (cuBLAS) beats reading the activations in every program.
LARGEST_FUSED_BATCH = 16
SMALLEST_DOT = 16
# Two programs per multiprocessor of an H100 or H200: fewer leave some of them without loads in flight.
PROGRAMS = 264
# More rows per program would not fit into the registers beside their sums.
VECTOR_ROWS = 4
ELEMENTS = 1024
TURN = 6.283185307179586 / 2**64


@triton.jit
def loaded_scales(scales_ptr, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    residual_scale, input_scale = 1.0, 0.0
    if SCALE:
        residual_scale, input_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    return residual_scale, input_scale


@triton.jit
def scaled_input(  # type: ignore[no-untyped-def]
    x_ptr, start_ptr, residual_scale, input_scale, offset, keep, SCALE: tl.constexpr
):
    """x, or a x + b x_0 rounded to what the residual stream holds."""
    x = tl.load(x_ptr + offset, mask=keep, other=0.0)
    if SCALE:
        start = tl.load(start_ptr + offset, mask=keep, other=0.0)
        x = (residual_scale * x.to(tl.float32) + input_scale * start.to(tl.float32)).to(x.dtype)
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
def vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr, start_ptr, scales_ptr, weight_ptr, base_ptr, scaled_ptr, out_ptr, rows, cap, eps, batch,
    K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr,
    SCALE: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """One row of activations: ROWS outputs per program, every thread on its own columns until the very end."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # rows past the end read the last one again and are not stored: no load needs a mask for them
    weight_ptr += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K
    total = tl.zeros([ROWS, CHUNK], dtype=tl.float32)
    squares = tl.zeros([CHUNK], dtype=tl.float32)
    residual_scale, input_scale = loaded_scales(scales_ptr, SCALE)
    for first in tl.static_range(0, K, CHUNK):
        column = first + tl.arange(0, CHUNK)
        keep = column < K
        if K % CHUNK == 0:
            weight = tl.load(weight_ptr + column[None, :], eviction_policy="evict_first")
        else:
            weight = tl.load(weight_ptr + column[None, :], mask=keep[None, :], other=0.0, eviction_policy="evict_first")
        x = scaled_input(x_ptr, start_ptr, residual_scale, input_scale, column, keep, SCALE)
        if SCALE:
            # by the first program alone
            tl.store(scaled_ptr + column, x, mask=column + tl.program_id(0) * K < K)
        wide = x.to(tl.float32)
        total += weight.to(tl.float32) * wide[None, :]
        if NORM:
            squares += wide * wide
    result = tl.sum(total, axis=1)
    if NORM:
        result *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + eps)
    inside = row < rows
    result = finished(result, base_ptr, row, inside, cap, EPILOGUE)
    tl.store(out_ptr + row, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def batch_kernel(  # type: ignore[no-untyped-def]
    x_ptr, start_ptr, scales_ptr, weight_ptr, base_ptr, scaled_ptr, out_ptr, rows, cap, eps, batch,
    K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BATCH: tl.constexpr,
    SCALE: tl.constexpr, NORM: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """A few rows of activations, padded to what the tensor cores take: the weights are still read once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BATCH)
    present = lane < batch
    weight_ptr += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * K
    total = tl.zeros([BATCH, ROWS], dtype=tl.float32)
    squares = tl.zeros([BATCH], dtype=tl.float32)
    residual_scale, input_scale = loaded_scales(scales_ptr, SCALE)
    for first in range(0, K, CHUNK):
        column = first + tl.arange(0, CHUNK)
        keep = column < K
        weight = tl.load(weight_ptr + column[None, :], mask=keep[None, :], other=0.0, eviction_policy="evict_first")
        offset = lane[:, None] * K + column[None, :]
        held = present[:, None] & keep[None, :]
        x = scaled_input(x_ptr, start_ptr, residual_scale, input_scale, offset, held, SCALE)
        if SCALE:
            # by the first program alone
            tl.store(scaled_ptr + offset, x, mask=held & (lane + tl.program_id(0) * BATCH < batch)[:, None])
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        if NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
    if NORM:
        total *= (1.0 / tl.sqrt(squares / K + eps))[:, None]
    offset = lane[:, None] * rows + row[None, :]
    inside = present[:, None] & (row < rows)[None, :]
    total = finished(total, base_ptr, offset, inside, cap, EPILOGUE)
    tl.store(out_ptr + offset, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def begin_kernel(  # type: ignore[no-untyped-def]
    token_ptr, embedding_ptr, position_ptr, frequency_ptr, out_ptr, cos_ptr, sin_ptr, vocabulary, eps,
    TURN: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Embedding and norm of one row, and its angles from the exact phase: position x frequency wraps in 64 bits."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH_BLOCK)
    token = tl.load(token_ptr + row) + tl.zeros_like(column).to(tl.int64)
    keep = column < WIDTH
    # a token outside of the vocabulary gives NaN in its own row, never another tensor's content
    known = (token >= 0) & (token < vocabulary)
    x = tl.load(embedding_ptr + token * WIDTH + column, mask=keep & known, other=float("nan"))
    wide = tl.where(keep, x.to(tl.float32), 0.0)
    x = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    tl.store(out_ptr + row * WIDTH + column, x.to(out_ptr.dtype.element_ty), mask=keep)
    pair = tl.arange(0, HALF_BLOCK)
    real = pair < HALF
    phase = tl.load(position_ptr + row) * tl.load(frequency_ptr + pair, mask=real, other=0)
    angle = phase.to(tl.float64) * TURN
    tl.store(cos_ptr + row * HALF + pair, tl.cos(angle).to(tl.float32), mask=real)
    tl.store(sin_ptr + row * HALF + pair, tl.sin(angle).to(tl.float32), mask=real)


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, start_ptr, scales_ptr, scaled_ptr, out_ptr, position_ptr, position_out_ptr, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The norm of one row by itself: after the last layer, and before the products of a large batch."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    keep = column < WIDTH
    offset = row * WIDTH + column
    residual_scale, input_scale = loaded_scales(scales_ptr, SCALE)
    x = scaled_input(x_ptr, start_ptr, residual_scale, input_scale, offset, keep, SCALE)
    if SCALE:
        tl.store(scaled_ptr + offset, x, mask=keep)
    wide = x.to(tl.float32)
    x = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), mask=keep)
    if COUNT:
        tl.store(position_out_ptr + row, tl.load(position_ptr + row) + 1)


@triton.jit
def finish_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, count, cap, BLOCK: tl.constexpr, EPILOGUE: tl.constexpr
):
    """The end of a product that cuBLAS computed."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    x = finished(tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32), x_ptr, at, keep, cap, EPILOGUE)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=keep)


# Under TRITON_INTERPRET=1 the decorator gives something else, which runs on CPU tensors.
INTERPRETED = not isinstance(vector_kernel, triton.JITFunction)


class Tile(NamedTuple):
    """What one program takes of a matrix."""

    rows: int
    columns: int  # at a time; the program goes over all of K
    warps: int


def vector_tile(outputs: int, inputs: int, element_size: int) -> Tile:
    """Every thread keeps to 16 bytes of columns in all rows of the tile: x is then read in place, without a barrier.

    Columns are the largest power of two that divides K, so that no load needs a mask, else one that covers it.
    """
    per_warp = 32 * 16 // element_size
    dividing = min(inputs & -inputs, 4 * per_warp)
    columns = dividing if dividing >= per_warp else min(power_of_two(inputs), 4 * per_warp)
    warps = max(1, columns // per_warp)
    rows = VECTOR_ROWS
    while rows > 1 and -(-outputs // rows) < max(PROGRAMS, 2 * PROGRAMS // warps):
        rows //= 2
    return Tile(rows, columns, warps)


def batch_tile(outputs: int, inputs: int) -> Tile:
    rows = 2 * SMALLEST_DOT if outputs >= 2 * SMALLEST_DOT * PROGRAMS else SMALLEST_DOT
    return Tile(rows, max(SMALLEST_DOT, min(power_of_two(inputs), 256)), 4)


def multiply(
    x: Tensor,
    weight: Tensor,
    *,
    epilogue: str = "none",
    norm: bool = False,
    start: Tensor | None = None,
    scales: Tensor | None = None,
    scaled: Tensor | None = None,
    base: Tensor | None = None,
    cap: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """epilogue(W norm(a x + b x_0)) for a batch of at most LARGEST_FUSED_BATCH rows."""
    assert x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    batch, inputs = x.shape
    outputs = weight.shape[0]
    out = x.new_empty(batch, outputs, dtype=dtype or x.dtype)
    if batch == 1:
        kernel, tile, padded = vector_kernel, vector_tile(outputs, inputs, x.element_size()), 1
    else:
        kernel, tile, padded = batch_kernel, batch_tile(outputs, inputs), max(SMALLEST_DOT, power_of_two(batch))
    # absent tensors are never read; the kernel takes any pointer for them
    pointers = [tensor if tensor is not None else x for tensor in (start, scales)]
    ends = [tensor if tensor is not None else x for tensor in (base, scaled)]
    kernel[(-(-outputs // tile.rows),)](
        x, *pointers, weight, *ends, out, outputs, cap, NORM_EPS, batch,
        K=inputs, ROWS=tile.rows, CHUNK=tile.columns, BATCH=padded,
        SCALE=start is not None, NORM=norm, EPILOGUE=epilogue, num_warps=tile.warps,
    )  # fmt: skip
    return out


def normalise(x: Tensor, start: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x' and norm(x'), where x' is x or a x + b x_0."""
    width = x.shape[1]
    scaled = x if start is None else torch.empty_like(x)
    out = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](
        x, x if start is None else start, x if scales is None else scales, scaled, out, x, x, NORM_EPS,
        WIDTH=width, BLOCK=power_of_two(width), SCALE=start is not None, COUNT=False, num_warps=4,
    )  # fmt: skip
    return scaled, out


def finish(product: Tensor, epilogue: str, cap: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty_like(product, dtype=dtype or product.dtype)
    count = product.numel()
    finish_kernel[(-(-count // ELEMENTS),)](product, out, count, cap, BLOCK=ELEMENTS, EPILOGUE=epilogue, num_warps=4)
    return out


def fused(x: Tensor) -> bool:
    """Whether the products of this batch are ours; the only place where that is decided."""
    return x.shape[0] <= LARGEST_FUSED_BATCH


def begin_step(
    tokens: Tensor, embedding: Tensor, position: Tensor, frequencies: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # the tokens of one position are often a column of a batch
    tokens = tokens.contiguous()
    assert position.is_contiguous() and embedding.is_contiguous()
    batch, (vocabulary, width), half = tokens.shape[0], embedding.shape, frequencies.shape[0]
    out = embedding.new_empty(batch, width)
    cos, sin = (torch.empty(batch, half, dtype=torch.float32, device=out.device) for _ in range(2))
    begin_kernel[(batch,)](
        tokens, embedding, position, frequencies, out, cos, sin, vocabulary, NORM_EPS,
        TURN=TURN, WIDTH=width, HALF=half, WIDTH_BLOCK=power_of_two(width), HALF_BLOCK=power_of_two(half), num_warps=4,
    )  # fmt: skip
    return out, cos, sin


def scale_norm_project(x: Tensor, start: Tensor, scales: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if fused(x):
        scaled = torch.empty_like(x)
        return scaled, multiply(x, weight, norm=True, start=start, scales=scales, scaled=scaled)
    scaled, normed = normalise(x, start, scales)
    return scaled, F.linear(normed, weight)


def project(x: Tensor, weight: Tensor) -> Tensor:
    return multiply(x, weight) if fused(x) else F.linear(x, weight)


def project_add(x: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
    return multiply(inputs, weight, epilogue="add", base=x) if fused(x) else torch.addmm(x, inputs, weight.t())


def norm_project_relu2(x: Tensor, weight: Tensor) -> Tensor:
    if fused(x):
        return multiply(x, weight, norm=True, epilogue="relu2")
    return finish(F.linear(normalise(x)[1], weight), "relu2")


def finish_step(x: Tensor, position: Tensor, memory_out: Tensor, position_out: Tensor) -> None:
    width = x.shape[1]
    assert memory_out.is_contiguous() and position.is_contiguous() and position_out.is_contiguous()
    norm_kernel[(x.shape[0],)](
        x, x, x, x, memory_out, position, position_out, NORM_EPS,
        WIDTH=width, BLOCK=power_of_two(width), SCALE=False, COUNT=True, num_warps=4,
    )  # fmt: skip


def read_out(memory: Tensor, weight: Tensor, cap: float) -> Tensor:
    if fused(memory):
        return multiply(memory, weight, epilogue="softcap", cap=cap, dtype=torch.float32)
    return finish(F.linear(memory, weight), "softcap", cap, torch.float32)
