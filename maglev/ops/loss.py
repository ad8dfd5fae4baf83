"""Soft-capped cross-entropy in chunks: the T x V logits exist one chunk at a time, forward and backward."""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maglev.ops.reference import softcap

# padding, and a token that is read but has nothing to predict; every negative target costs nothing
IGNORED, UNSCORED = -1, -2
CHUNK_LOGITS = 2**25
# on a CPU, where nothing is computed a second time: what stays in its cache, in 4 bytes each
CACHED_LOGITS = 2**20


def chunk_nats(memory: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    logits = softcap(F.linear(memory, weight), cap)
    return F.cross_entropy(logits, targets.clamp_min(IGNORED), ignore_index=IGNORED, reduction="none")


def cross_entropy(
    memory: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_logits: int | None = None
) -> Tensor:
    """Nats of every target; 0 where the target is negative. memory (..., D), weight (V, D), targets (...) -> (...)."""
    if chunk_logits is None:
        chunk_logits = CHUNK_LOGITS if memory.is_cuda or torch.is_grad_enabled() else CACHED_LOGITS
    flat, flat_targets = memory.flatten(0, -2), targets.flatten()
    weight = weight.to(memory.dtype)
    rows = max(1, chunk_logits // weight.shape[0])
    if flat.shape[0] <= rows:
        return chunk_nats(flat, weight, flat_targets, cap).view(targets.shape)
    parts = [
        # the state of random numbers, of which there are none, cannot be read while a graph is recorded
        checkpoint(chunk_nats, m, weight, t, cap, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else chunk_nats(m, weight, t, cap)
        for m, t in zip(flat.split(rows), flat_targets.split(rows), strict=True)
    ]
    return torch.cat(parts).view(targets.shape)


def loss_kernels() -> ModuleType | None:
    try:
        from maglev.ops import fused_loss
    except ImportError:
        # no Triton here, or the one file of an export, which goes without
        return None
    return fused_loss


def mean_cross_entropy(memory: Tensor, weight: Tensor, targets: Tensor, cap: float, fused: bool = False) -> Tensor:
    """Mean nats over the targets that are not negative; 0 where there is none. Shapes as above -> ()

    `fused` wants loss and gradient by the kernel, on a GPU.
    """
    kernel = loss_kernels() if fused and memory.is_cuda and torch.is_grad_enabled() else None
    if kernel is not None and kernel.serves(memory, cap):
        mean: Tensor = kernel.mean_nats(memory, weight, targets, cap)
        return mean
    return cross_entropy(memory, weight, targets, cap).sum() / (targets >= 0).sum().clamp_min(1)
