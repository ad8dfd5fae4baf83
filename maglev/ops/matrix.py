"""A matrix that decoding reads: in the precision of the computation, or in 8 bits with a scale per row."""

from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.errors import RequestError

WeightFormat = Literal["plain", "int8", "fp8"]
# the largest magnitude that each of them holds
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
STORED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Pieces of work that several programs may share at a time.
ARRIVALS = 4096


class Matrix(NamedTuple):
    values: Tensor  # (N, K)
    scale: Tensor | None  # (N,) float32, where the values are in 8 bits
    arrivals: Tensor  # (ARRIVALS,) int32 zeros that kernels count in and leave at zero

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = (self.values,) if self.scale is None else (self.values, self.scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """What it stands for. (N, K)"""
        if self.scale is None:
            return self.values.to(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return (self.values.to(wide) * self.scale[:, None].to(wide)).to(dtype)

    def times(self, x: Tensor) -> Tensor:
        """W x. (B, K) -> (B, N)"""
        return F.linear(x, self.dense(x.dtype))


def check_format(weights: str) -> None:
    if weights not in get_args(WeightFormat):
        raise RequestError(f"weights are {weights!r}; they must be one of {', '.join(get_args(WeightFormat))}")


def matrix(weight: Tensor, weights: WeightFormat = "plain") -> Matrix:
    """`weight` (N, K) as it is, or rounded row by row, so that the largest number of a row is held exactly."""
    check_format(weights)
    weight = weight.detach()
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=weight.device)
    if weights == "plain":
        return Matrix(weight.contiguous(), None, arrivals)
    stored = STORED[weights]
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    # a row of zeros stays one, whatever its scale
    scale = wide.abs().amax(dim=1).clamp_min(1e-30) / LARGEST[stored]
    values = wide / scale[:, None]
    values = values.round() if stored == torch.int8 else values
    return Matrix(values.to(stored).contiguous(), scale.float(), arrivals)
