"""The parts that every stack is made of. Weights are stored in one precision and used in that of their input."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maglev.ops.inject import rms_norm
from maglev.ops.recompute import KEPT, Keeping
from maglev.ops.reference import softcap


class Linear(nn.Module):
    """A matrix without bias; `product` is how it is multiplied with."""

    product: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.linear)

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight.to(x.dtype))


# rows of so many numbers, or a multiple, are what products and the compiler want: others it copies to such ones
ALIGNED = 64


def project_packed(x: Tensor, linears: Sequence[Linear]) -> Tensor:
    """One input through several matrices as one product, with zeros up to an aligned width: (..., D) -> (..., columns).

    The copy of the weights is nothing beside many rows; a narrow matrix alone would cost the reading of its input.
    """
    weights = [linear.weight.to(x.dtype) for linear in linears]
    filler = -sum(weight.shape[0] for weight in weights) % ALIGNED
    return linears[0].product(x, torch.cat([*weights, x.new_zeros(filler, x.shape[-1])]))


class Embedding(nn.Module):
    """Normalised token vectors; `compute_dtype` is the precision of everything that follows from them."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.compute_dtype: torch.dtype | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return rms_norm(F.embedding(tokens, self.weight).to(self.compute_dtype or self.weight.dtype))


class Readout(nn.Module):
    """Memory to soft-capped logits, in float32 or better. Training with `fused` takes a kernel for their loss."""

    def __init__(self, width: int, vocab_size: int, cap: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.cap = cap
        self.fused = False

    def forward(self, memory: Tensor) -> Tensor:
        return softcap(F.linear(memory, self.weight.to(memory.dtype)), self.cap)


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = Linear(width, 4 * width)
        self.down_proj = Linear(4 * width, width)

    def enter(self, x: Tensor) -> Tensor:
        return self.up_proj(rms_norm(x))

    def leave(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.relu(hidden).square())

    def forward(self, x: Tensor, keeping: Keeping = KEPT) -> Tensor:
        """Of the residual stream."""
        return keeping.run(self.leave, keeping.run(self.enter, x))
