"""How a decoder takes memory in: the last state enters the keys and values of every layer through gates."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maglev.config import ModelConfig
from maglev.model.layers import Linear
from maglev.ops.inject import rms_norm, rotate

Rotation = tuple[Tensor, Tensor]


class MemoryFeatures(NamedTuple):
    """k^rec, v^rec of every position, the same for all layers: (B, T, G, Dh) each."""

    memory_key: Tensor
    memory_value: Tensor


class MemoryProjections(nn.Module):
    """W_k^rec and W_v^rec, shared by all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kv_heads = config.kv_heads
        self.memory_key_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.memory_value_proj = Linear(config.width, config.kv_heads * config.head_dim)

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> MemoryFeatures:
        """m_{t-1} takes slot t, so its key is rotated there, like the local key it is mixed with."""
        memory_key = self.memory_key_proj(previous_memory).unflatten(-1, (self.kv_heads, -1))
        memory_value = self.memory_value_proj(previous_memory).unflatten(-1, (self.kv_heads, -1))
        return MemoryFeatures(rotate(rms_norm(memory_key), *rotation), memory_value)


class MemoryGates(nn.Module):
    """g_loc and g_rec of one layer, one number per K/V head, from all channels of the block's normalised input.

    Attention projects them together with its queries, keys and values; `gate` makes gates of the logits (B, T, G).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.local_gate = Linear(config.width, config.kv_heads)
        self.memory_gate = Linear(config.width, config.kv_heads)


def shift_right(memory: Tensor, keep: Tensor | None = None) -> Tensor:
    """m_{1:T} -> m_{0:T-1} with m_0 = 0; `keep` (B, T) is False where a position starts without memory."""
    shifted = F.pad(memory, (0, 0, 1, -1))
    return shifted if keep is None else torch.where(keep.unsqueeze(-1), shifted, 0)
