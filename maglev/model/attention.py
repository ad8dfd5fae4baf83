"""One block: attention over mixed K/V and a relu^2 MLP, each on the normalised residual stream."""

from typing import Protocol

from torch import Tensor, nn

from maglev.config import ModelConfig
from maglev.model.layers import MLP, Linear
from maglev.model.memory import MemoryFeatures, MemoryGates, Rotation
from maglev.ops.inject import rms_norm, rotate


class Attend(Protocol):
    """Where keys and values go, and which of them the queries see: a whole pass, a ring, a buffer."""

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor: ...


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_proj = Linear(config.width, config.heads * config.head_dim)
        self.key_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.value_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.output_proj = Linear(config.heads * config.head_dim, config.width)
        self.gates = MemoryGates(config) if config.memory == "kv" else None

    def forward(self, x: Tensor, rotation: Rotation, memory: MemoryFeatures | None, attend: Attend) -> Tensor:
        """x (B, T, D), already normalised. Without memory neither gate is applied: that is another function."""
        query = rms_norm(rotate(self.query_proj(x).unflatten(-1, (-1, self.head_dim)), *rotation))
        key = rms_norm(rotate(self.key_proj(x).unflatten(-1, (-1, self.head_dim)), *rotation))
        value = self.value_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.gates is not None and memory is not None:
            key, value = self.gates(x, key, value, memory)
        return self.output_proj(attend(query, key, value).flatten(-2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config.width)

    def forward(self, x: Tensor, rotation: Rotation, memory: MemoryFeatures | None, attend: Attend) -> Tensor:
        x = x + self.attention(rms_norm(x), rotation, memory, attend)
        return x + self.mlp(rms_norm(x))
