"""Gated mix of local and memory features, and the two small maps around it."""

import torch.nn.functional as F
from torch import Tensor

from maglev.ops.reference import mix, rotate

__all__ = ["gate", "mix", "rms_norm", "rotate"]

NORM_EPS = 1e-6


def rms_norm(x: Tensor) -> Tensor:
    """Parameter-free, over the last dimension; the sum of squares is taken in float32 or better."""
    return F.rms_norm(x, (x.shape[-1],), eps=NORM_EPS)


def gate(logits: Tensor) -> Tensor:
    """2 * sigmoid: neutral, exactly 1, at 0."""
    return 2 * logits.sigmoid()
