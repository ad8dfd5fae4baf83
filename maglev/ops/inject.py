"""Gated mix of local and memory features, and the two small maps around it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.ops.reference import mix, rotate

__all__ = ["gate", "inject", "mix", "rms_norm", "rotate", "takes_kernels"]

NORM_EPS = 1e-6


def rms_norm(x: Tensor) -> Tensor:
    """Parameter-free, over the last dimension; the sum of squares is taken in float32 or better."""
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def gate(logits: Tensor) -> Tensor:
    """2 * sigmoid: neutral, exactly 1, at 0."""
    return 2 * logits.sigmoid()


def takes_kernels(x: Tensor) -> bool:
    """Whether attention's inputs come from the kernels of fused_inject: in compiled blocks on CUDA, as in training.

    They write a layer's gradient of q, k, v and gates once; what the compiler makes of `inject` takes four times as
    long there (docs/log.md).
    """
    return x.is_cuda and torch.compiler.is_compiling() and x.dtype in (torch.bfloat16, torch.float32)


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
    norm: Callable[[Tensor], Tensor] = rms_norm,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention takes of projections (B, T, H or G, Dh), memory features (B, T, G, Dh) and gates (B, T, G):
    rotated, normalised queries, and mixed keys and values."""
    local_gate, memory_gate = gate(local_logits), gate(memory_logits)
    query, key = norm(rotate(query, cos, sin)), norm(rotate(key, cos, sin))
    return (
        query,
        mix(key, memory_key, local_gate, memory_gate),
        mix(value, memory_value, local_gate, memory_gate),
    )
