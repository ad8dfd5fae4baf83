"""How a block begins: x <- a x + b x_0, two scales of one number each."""

from typing import Any

import torch
from torch import Tensor


class Entry(torch.autograd.Function):
    """A scale's gradient is a sum over everything. Here it is made of sums per token, in float32 or better, which the
    compiler takes along where it has a token's gradient at hand; otherwise it would read all three tensors again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, residual_scale: Tensor, input_scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, start, residual_scale, input_scale)
        return residual_scale * x + input_scale * start

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, ...]:
        x, start, residual_scale, input_scale = ctx.saved_tensors
        wide = slope.to(torch.promote_types(slope.dtype, torch.float32))

        def along(other: Tensor, scale: Tensor) -> Tensor:
            return (wide * other).sum(-1).sum().to(scale.dtype)

        return residual_scale * slope, input_scale * slope, along(x, residual_scale), along(start, input_scale)


def enter(x: Tensor, start: Tensor, scales: tuple[Tensor, Tensor]) -> Tensor:
    """x and the embedded tokens x_0 (B, T, D) -> (B, T, D)"""
    entered: Tensor = Entry.apply(x, start, *scales)
    return entered
