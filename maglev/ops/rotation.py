"""Rotary positions that stay exact at any position, without a table.

A frequency is a whole number of 2^-64 turns per position. Position times frequency in wrapping 64-bit integers is
then the phase modulo one turn without any rounding, so the angle between two slots depends on their distance alone,
at position 10 as at 10^15.
"""

import math

import torch
from torch import Tensor


def turn_frequencies(head_dim: int, base: float) -> Tensor:
    """Frequencies in 2^-64 turns per position, (head_dim / 2,) int64."""
    turns = (base ** (-2 * pair / head_dim) / (2 * math.pi) for pair in range(head_dim // 2))
    return torch.tensor([round(turn * 2**64) for turn in turns], dtype=torch.int64)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for integer positions. (...,) -> two of (..., 1, half), broadcast over heads."""
    phase = positions[..., None] * frequencies  # (..., half), wraps at one turn
    # Apple's GPUs have no float64; the upper 24 bits of the phase fill a float32
    real = torch.float32 if phase.device.type == "mps" else torch.float64
    angle = phase.to(real) * (2 * math.pi / 2**64)
    wide = torch.promote_types(dtype, torch.float32)
    return angle.cos().to(wide).unsqueeze(-2), angle.sin().to(wide).unsqueeze(-2)
