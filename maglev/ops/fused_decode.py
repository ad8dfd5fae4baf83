"""Triton kernels for one decoding step; `decode_steps` defines what each of them computes."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import (
    INTERPRETED,
    early,
    entered,
    entry,
    finished,
    loaded_scales,
    next_kernel,
    power_of_two,
    previous_kernel,
    times_batch,
    times_vector,
)
from maglev.ops.fused_read import chunk_attend
from maglev.ops.fused_ring import ring_attend
from maglev.ops.inject import NORM_EPS
from maglev.ops.matrix import Matrix

__all__ = [
    "INTERPRETED",
    "begin_step",
    "chunk_attend",
    "finish_step",
    "gate_norm_project",
    "norm_project_relu2",
    "project",
    "project_add",
    "read_out",
    "ring_attend",
    "scale_norm_project",
]

# Beyond this many rows a matrix product of its own (cuBLAS) beats reading the activations in every program.
LARGEST_FUSED_BATCH = 64
ELEMENTS = 1024
TURN = 6.283185307179586 / 2**64


@triton.jit
def begin_kernel(  # type: ignore[no-untyped-def]
    token_ptr, embedding_ptr, position_ptr, frequency_ptr, out_ptr, cos_ptr, sin_ptr, vocabulary, eps,
    TURN: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Embedding and norm of one row, and its angles from the exact phase: position x frequency wraps in 64 bits."""
    previous_kernel(EARLY)
    next_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
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
    x_ptr, start_ptr, scales_ptr, scaled_ptr, out_ptr, position_ptr, position_out_ptr, start_width, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENTRY: tl.constexpr, CHANNELS: tl.constexpr, LOGITS: tl.constexpr,
    COUNT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The norm of one row by itself: after the last layer, and before the products of a large batch."""
    previous_kernel(EARLY)
    next_kernel(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    keep = column < WIDTH
    offset = row * WIDTH + column
    residual_scale, input_scale = loaded_scales(scales_ptr, ENTRY)
    # logits are those of the row, LOGITS of them; rows of what they let in may lie apart
    scales_ptr += row * LOGITS
    start_ptr += row * (start_width - WIDTH)
    x = entered(x_ptr, start_ptr, scales_ptr, residual_scale, input_scale, offset, column, keep, ENTRY, CHANNELS)
    if ENTRY != "none":
        tl.store(scaled_ptr + offset, x, mask=keep)
    wide = x.to(tl.float32)
    x = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps))
    tl.store(out_ptr + offset, x.to(out_ptr.dtype.element_ty), mask=keep)
    if COUNT:
        tl.store(position_out_ptr + row, tl.load(position_ptr + row) + 1)


@triton.jit
def finish_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, count, cap, BLOCK: tl.constexpr, EPILOGUE: tl.constexpr, EARLY: tl.constexpr
):
    """The end of a product that cuBLAS computed."""
    previous_kernel(EARLY)
    next_kernel(EARLY)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    x = finished(tl.load(x_ptr + at, mask=keep, other=0.0).to(tl.float32), x_ptr, at, keep, cap, EPILOGUE)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=keep)


def normalise(
    x: Tensor, start: Tensor | None = None, scales: Tensor | None = None, channels: int = 0
) -> tuple[Tensor, Tensor]:
    """x' and norm(x'), where x' is x, a x + b x_0, or x and what gates let in: see `times_vector`."""
    width = x.shape[1]
    scaled = x if start is None else torch.empty_like(x)
    out = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](
        x, x if start is None else start, x if scales is None else scales, scaled, out, x, x,
        (x if start is None else start).stride(0), NORM_EPS,
        WIDTH=width, BLOCK=power_of_two(width), ENTRY=entry(start, channels), CHANNELS=channels,
        LOGITS=scales.shape[1] if channels and scales is not None else 0, COUNT=False, num_warps=4, **early(x.device),
    )  # fmt: skip
    return scaled, out


def finish(product: Tensor, epilogue: str, cap: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    out = torch.empty_like(product, dtype=dtype or product.dtype)
    count = product.numel()
    finish_kernel[(-(-count // ELEMENTS),)](
        product, out, count, cap, BLOCK=ELEMENTS, EPILOGUE=epilogue, num_warps=4, **early(product.device)
    )
    return out


def fused(x: Tensor, weight: Matrix) -> bool:
    """Whether the product of a batch is ours; the only place that decides it. cuBLAS knows no weights in 8 bits."""
    return weight.scale is not None or x.shape[0] <= LARGEST_FUSED_BATCH


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
        TURN=TURN, WIDTH=width, HALF=half, WIDTH_BLOCK=power_of_two(width), HALF_BLOCK=power_of_two(half),
        num_warps=4, **early(out.device),
    )  # fmt: skip
    return out, cos, sin


def scale_norm_project(x: Tensor, start: Tensor, scales: Tensor, weight: Matrix) -> tuple[Tensor, Tensor]:
    if x.shape[0] == 1:
        scaled = torch.empty_like(x)
        return scaled, times_vector(x, weight, norm=True, start=start, scales=scales, scaled=scaled)
    scaled, normed = normalise(x, start, scales)
    return scaled, project(normed, weight)


def gate_norm_project(
    x: Tensor, memory_projected: Tensor, logits: Tensor, heads: int, weight: Matrix
) -> tuple[Tensor, Tensor]:
    assert memory_projected.stride(1) == 1 and logits.is_contiguous()
    channels = x.shape[1] // heads
    if x.shape[0] == 1:
        added = torch.empty_like(x)
        return added, times_vector(
            x, weight, norm=True, start=memory_projected, scales=logits, scaled=added, channels=channels
        )
    added, normed = normalise(x, memory_projected, logits, channels)
    return added, project(normed, weight)


def project(x: Tensor, weight: Matrix) -> Tensor:
    if x.shape[0] == 1:
        return times_vector(x, weight)
    return times_batch(x, weight) if fused(x, weight) else F.linear(x, weight.values)


def project_add(x: Tensor, inputs: Tensor, weight: Matrix) -> Tensor:
    if x.shape[0] == 1:
        return times_vector(inputs, weight, epilogue="add", base=x)
    if fused(x, weight):
        return times_batch(inputs, weight, epilogue="add", base=x)
    return torch.addmm(x, inputs, weight.values.t())


def norm_project_relu2(x: Tensor, weight: Matrix) -> Tensor:
    if x.shape[0] == 1:
        return times_vector(x, weight, norm=True, epilogue="relu2")
    normed = normalise(x)[1]
    if fused(x, weight):
        return times_batch(normed, weight, epilogue="relu2")
    return finish(F.linear(normed, weight.values), "relu2")


def finish_step(x: Tensor, position: Tensor, memory_out: Tensor, position_out: Tensor) -> None:
    width = x.shape[1]
    assert memory_out.is_contiguous() and position.is_contiguous() and position_out.is_contiguous()
    norm_kernel[(x.shape[0],)](
        x, x, x, x, memory_out, position, position_out, x.stride(0), NORM_EPS,
        WIDTH=width, BLOCK=power_of_two(width), ENTRY="none", CHANNELS=0, LOGITS=0, COUNT=True, num_warps=4,
        **early(x.device),
    )  # fmt: skip


def read_out(memory: Tensor, weight: Matrix, cap: float) -> Tensor:
    if memory.shape[0] == 1:
        return times_vector(memory, weight, epilogue="softcap", cap=cap, dtype=torch.float32)
    if fused(memory, weight):
        return times_batch(memory, weight, epilogue="softcap", cap=cap, dtype=torch.float32)
    return finish(F.linear(memory, weight.values), "softcap", cap, torch.float32)
