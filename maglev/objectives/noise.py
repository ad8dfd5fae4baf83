"""Noise on what P reads in training."""

import torch
from torch import Tensor

# rows of noise to draw from, and what spreads tokens over them
NOISE_ROWS, SPREAD = 8191, 40_503


class MemoryNoise:
    """Noise on the memories of a row, a function of its tokens so far and of nothing else: a run that was interrupted,
    divided otherwise or recorded as a CUDA graph has the same."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.rows: Tensor | None = None

    def __call__(self, tokens: Tensor, like: Tensor) -> Tensor:
        """tokens (B, T) -> (B, T, D), as `like`"""
        if self.rows is None or (self.rows.device, self.rows.dtype) != (like.device, like.dtype):
            drawn = torch.randn(NOISE_ROWS, like.shape[-1], generator=torch.Generator().manual_seed(0))
            self.rows = drawn.to(like.device, like.dtype)
        places = (SPREAD * (tokens + 1).cumsum(dim=1)) % NOISE_ROWS
        return self.size * self.rows[places]
