"""One block: attention over mixed K/V and a relu^2 MLP, each on the normalised residual stream."""

from typing import Protocol

from torch import Tensor, nn

from maglev.config import ModelConfig
from maglev.model.layers import MLP, Linear
from maglev.model.memory import MemoryFeatures, MemoryGates, Rotation
from maglev.ops.inject import inject, rms_norm, rotate
from maglev.ops.recompute import KEPT, Keeping


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

    def project(self, x: Tensor, gated: bool) -> tuple[Tensor, ...]:
        """The residual stream (B, T, D) to query, key, value and, where there is memory, both gates' logits."""
        x = rms_norm(x)
        heads = [
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.query_proj, self.key_proj, self.value_proj)
        ]
        return (*heads, *self.gates(x)) if gated and self.gates is not None else tuple(heads)

    def forward(
        self, x: Tensor, rotation: Rotation, memory: MemoryFeatures | None, attend: Attend, keeping: Keeping = KEPT
    ) -> Tensor:
        """x (B, T, D). Without memory neither gate is applied: that is another function."""
        query, key, value, *logits = keeping.run(self.project, x, memory is not None)
        if logits and memory is not None:
            query, key, value = inject(query, key, value, *rotation, *memory, logits[0], logits[1], norm=keeping.norm)
        else:
            query, key = keeping.norm(rotate(query, *rotation)), keeping.norm(rotate(key, *rotation))
        return self.output_proj(attend(query, key, value).flatten(-2))


class Block(nn.Module):
    """`keeping` says what training keeps of a pass; it changes no result."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config.width)
        self.keeping = KEPT

    def forward(self, x: Tensor, rotation: Rotation, memory: MemoryFeatures | None, attend: Attend) -> Tensor:
        x = x + self.attention(x, rotation, memory, attend, self.keeping)
        return x + self.mlp(x, self.keeping)
