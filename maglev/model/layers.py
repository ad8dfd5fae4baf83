"""The parts that every stack is made of. Weights are stored in one precision and used in that of their input."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maglev.ops.inject import rms_norm
from maglev.ops.recompute import KEPT, Keeping
from maglev.ops.reference import softcap


class Linear(nn.Module):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """Normalised token vectors; `compute_dtype` is the precision of everything that follows from them."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.compute_dtype: torch.dtype | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        return rms_norm(F.embedding(tokens, self.weight).to(self.compute_dtype or self.weight.dtype))


class Readout(nn.Module):
    """Memory to soft-capped logits, in float32 or better."""

    def __init__(self, width: int, vocab_size: int, cap: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.cap = cap

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
