"""Products of a block in 8-bit floats: forward, and the gradient of the input. That of the weight stays as it is.

One scale per tensor, from the largest number that it holds right now: nothing to carry from step to step, and nothing
to save. Activations and weights take e4m3, gradients e5m2, sums are float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# what the products' kernels ask of both sides of a matrix
ALIGNED = 16
SMALLEST_CAPABILITY = (8, 9)


def quantized(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """8 bits, and the scale that they are to be multiplied by. What is not finite stays so, or becomes NaN."""
    largest = torch.finfo(kind).max
    scale = (x.abs().amax().float() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    return (x.float() / scale).clamp(-largest, largest).to(kind), scale


Scaled = tuple[Tensor, Tensor]


def product(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """left (N, K) by right (K, M), which lies in memory by columns. `fast` sums with fewer bits in between."""
    return torch._scaled_mm(left[0], right[0], scale_a=left[1], scale_b=right[1], out_dtype=dtype, use_fast_accum=fast)


class Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x (N, K), weight (M, K) -> (N, M)"""
        ctx.save_for_backward(x, weight)
        narrow_weight, scale = quantized(weight, FORWARD)
        return product(quantized(x, FORWARD), (narrow_weight.T, scale), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        narrow_weight, scale = quantized(weight, FORWARD)
        by_columns = narrow_weight.T.contiguous().T, scale
        return product(quantized(pull, BACKWARD), by_columns, x.dtype, fast=False), pull.T @ x


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear`, in 8 bits where the matrix has sides that can be."""
    if weight.shape[0] % ALIGNED or weight.shape[1] % ALIGNED:
        return F.linear(x, weight)
    out: Tensor = Linear8.apply(x.flatten(0, -2), weight)
    return out.unflatten(0, x.shape[:-1])


def serves(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= SMALLEST_CAPABILITY
