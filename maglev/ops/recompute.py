"""What a block keeps for its backward: everything, or what is costly to compute, the rest being computed again.

Left out when lean: normalised inputs of projections, relu^2, and what lies between a projection and its normalised,
rotated result. Matrix products and attention are not run again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from maglev.ops.inject import NORM_EPS, rms_norm

# by name: some are known to PyTorch only once their kernel is chosen
COSTLY = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_mm",
    "flex_attention",
    "maglev::attend",
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


class Keeping(NamedTuple):
    """`run` calls a function whose insides need not be kept; `norm` is the norm of features that attention keeps."""

    run: Callable[..., Any]
    norm: Callable[[Tensor], Tensor]


def plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Keep the arguments alone. Backward stops as soon as it has what it needs, so a product that comes last is not
    run again."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def leave_costly(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_SAVE if op.name() in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def again_compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """For the compiler, which keeps of the products only what backward needs."""
    contexts = partial(create_selective_checkpoint_contexts, leave_costly)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class LeanNorm(torch.autograd.Function):
    """The norm whose backward needs its result, which attention keeps anyway, and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt()
        normed = (wide * scale).to(x.dtype)
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """With y = x s: dx = s (dy - y mean(y dy))."""
        normed, scale = ctx.saved_tensors
        wide, own = gradient.to(scale.dtype), normed.to(scale.dtype)
        return (scale * (wide - own * (own * wide).mean(-1, keepdim=True))).to(gradient.dtype)


def lean_norm(x: Tensor) -> Tensor:
    normed: Tensor = LeanNorm.apply(x)
    return normed


KEPT = Keeping(plainly, rms_norm)
LEAN = Keeping(again, lean_norm)
LEAN_COMPILED = Keeping(again_compiled, lean_norm)
