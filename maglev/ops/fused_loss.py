"""Soft-capped cross-entropy for training on CUDA: a chunk of logits is made, and written over by its own gradient.

Logits are in the precision of the computation and exist for one chunk of rows; loss and both gradients come out of
the same pass, so nothing is computed again in backward. Three matrix products and one kernel per chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maglev.ops.fused_product import power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# exp(-2 cap) is to be an ordinary float32: the largest logit is then known without a look, it is the cap
LARGEST_CAP = 40.0
CHUNK_LOGITS = 2**28
BLOCK, WARPS = 4096, 16


@triton.jit
def capped(logit, inverse_cap, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """tanh of a logit by the cap: the GPU's own to 11 bits where logits have 8, else by the exponential."""
    if NARROW:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [logit * inverse_cap], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 - 2.0 / (tl.exp(logit * (2.0 * inverse_cap)) + 1.0)


@triton.jit
def nats_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, targets_ptr, share_ptr, nats_ptr, columns, cap, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """One row: its nats, and the gradient of share x nats where its logits were. A negative target costs nothing."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    target = tl.load(targets_ptr + row)
    kind = logits_ptr.dtype.element_ty
    inverse_cap = 1.0 / cap
    at = tl.arange(0, BLOCK)
    if target < 0:
        tl.store(nats_ptr + row, 0.0)
        for first in range(0, columns, BLOCK):
            tl.store(logits_ptr + first + at, tl.zeros([BLOCK], kind), mask=first + at < columns)
    else:
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, columns, BLOCK):
            keep = first + at < columns
            bound = capped(tl.load(logits_ptr + first + at, mask=keep, other=0.0).to(tl.float32), inverse_cap, NARROW)
            sums += tl.where(keep, tl.exp(cap * bound - cap), 0.0)
        total = tl.sum(sums, axis=0)
        own = capped(tl.load(logits_ptr + target).to(tl.float32), inverse_cap, NARROW)
        tl.store(nats_ptr + row, cap + tl.log(total) - cap * own)
        share, inverse_total = tl.load(share_ptr), 1.0 / total
        # every read of the row comes before a write to it
        tl.debug_barrier()
        for first in range(0, columns, BLOCK):
            keep = first + at < columns
            bound = capped(tl.load(logits_ptr + first + at, mask=keep, other=0.0).to(tl.float32), inverse_cap, NARROW)
            likely = tl.exp(cap * bound - cap) * inverse_total
            hit = tl.where(first + at == target, 1.0, 0.0)
            slope = share * (likely - hit) * (1.0 - bound * bound)
            tl.store(logits_ptr + first + at, slope.to(kind), mask=keep)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right in float32, whatever the precision of the two."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left.T, right, out_dtype=torch.float32)
    return left.T.float() @ right.float()


class MeanNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_logits: int) -> Tensor:
        """memory (N, D), weight (V, D), targets (N,) -> the mean over targets that are not negative, ()"""
        columns = weight.shape[0]
        rows = max(1, min(chunk_logits // columns, memory.shape[0]))
        narrow = weight.to(memory.dtype)
        share = (targets >= 0).sum().clamp_min(1).float().reciprocal()
        nats = torch.empty(memory.shape[0], dtype=torch.float32, device=memory.device)
        buffer = memory.new_empty(rows, columns)
        memory_slope = torch.empty_like(memory)
        weight_slope: Tensor | None = None
        for first in range(0, memory.shape[0], rows):
            part = memory[first : first + rows]
            logits = torch.mm(part, narrow.T, out=buffer[: part.shape[0]])
            nats_kernel[(part.shape[0],)](
                logits, targets[first:], share, nats[first:], columns, cap,
                BLOCK=min(BLOCK, power_of_two(columns)), NARROW=logits.is_cuda and logits.dtype == torch.bfloat16,
                num_warps=WARPS,
            )  # fmt: skip
            torch.mm(logits, narrow, out=memory_slope[first : first + rows])
            added = product(logits, part)
            weight_slope = added if weight_slope is None else weight_slope.add_(added)
        assert weight_slope is not None
        ctx.save_for_backward(memory_slope, weight_slope.to(weight.dtype))
        return nats.sum() * share

    @staticmethod
    def backward(ctx: Any, pull: Tensor) -> tuple[Tensor | None, ...]:
        memory_slope, weight_slope = ctx.saved_tensors
        return memory_slope * pull.to(memory_slope.dtype), weight_slope * pull.to(weight_slope.dtype), None, None, None


def mean_nats(memory: Tensor, weight: Tensor, targets: Tensor, cap: float, chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """memory (..., D), weight (V, D), targets (...) -> (); 0 where no target counts."""
    mean: Tensor = MeanNats.apply(
        memory.flatten(0, -2).contiguous(), weight, targets.flatten().contiguous(), cap, chunk_logits
    )
    return mean


def serves(memory: Tensor, cap: float) -> bool:
    return memory.dtype in DTYPES and 0 < cap <= LARGEST_CAP
