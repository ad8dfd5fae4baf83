"""Gated mix of local and memory features, and the two small maps around it."""

from collections.abc import Callable
from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from maglev.ops.reference import mix, rotate

__all__ = ["gate", "inject", "mix", "rms_norm", "rotate"]

NORM_EPS = 1e-6
# The Triton kernels of fused_inject instead of what the compiler makes of the lines below. They are tested, but not
# yet measured on a GPU, and until they are ahead there they are not taken.
FUSED = False


def rms_norm(x: Tensor) -> Tensor:
    """Parameter-free, over the last dimension; the sum of squares is taken in float32 or better."""
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def gate(logits: Tensor) -> Tensor:
    """2 * sigmoid: neutral, exactly 1, at 0."""
    return 2 * logits.sigmoid()


def takes_kernels(query: Tensor) -> bool:
    return FUSED and query.is_cuda


def kernels(query: Tensor) -> ModuleType | None:
    if not takes_kernels(query):
        return None
    try:
        from maglev.ops import fused_inject
    except ImportError:
        # no Triton here, or the one file of an export, which goes without
        return None
    return fused_inject


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
    fused = kernels(query)
    if fused is not None and fused.serves(query, cos):
        found: tuple[Tensor, Tensor, Tensor] = fused.inject(
            query, key, value, cos, sin, memory_key, memory_value, local_logits, memory_logits
        )
        return found
    local_gate, memory_gate = gate(local_logits), gate(memory_logits)
    query, key = norm(rotate(query, cos, sin)), norm(rotate(key, cos, sin))
    return (
        query,
        mix(key, memory_key, local_gate, memory_gate),
        mix(value, memory_value, local_gate, memory_gate),
    )
