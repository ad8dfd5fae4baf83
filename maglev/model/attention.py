"""One block: attention over mixed K/V and a relu^2 MLP, each on the normalised residual stream."""

from typing import Protocol

from torch import Tensor, nn

from maglev.config import ModelConfig
from maglev.model.layers import MLP, Linear, project_packed
from maglev.model.memory import MemoryFeatures, MemoryGates, Rotation
from maglev.ops.inject import inject, rms_norm, rotate, takes_kernels
from maglev.ops.recompute import KEPT, Keeping, plainly


class Attend(Protocol):
    """Where keys and values go, and which of them the queries see: a whole pass, a ring, a buffer.

    One with `writes` notes down what it is given, which the compiler allows in no part of a block that is run again.
    """

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor: ...


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query_proj = Linear(config.width, config.heads * config.head_dim)
        self.key_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.value_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.output_proj = Linear(config.heads * config.head_dim, config.width)
        self.gates = MemoryGates(config) if config.memory == "kv" else None

    def linears(self, gated: bool) -> list[Linear]:
        """Query, key, value and, where there is memory, both gates."""
        gates = [self.gates.local_gate, self.gates.memory_gate] if gated and self.gates is not None else []
        return [self.query_proj, self.key_proj, self.value_proj, *gates]

    def project(self, x: Tensor, gated: bool) -> tuple[Tensor, ...]:
        """The residual stream (B, T, D) to query, key, value and, where there is memory, both gates' logits."""
        x = rms_norm(x)
        query, key, value, *logits = (linear(x) for linear in self.linears(gated))
        heads = (each.unflatten(-1, (-1, self.head_dim)) for each in (query, key, value))
        return (*heads, *logits)

    def pack(self, x: Tensor, gated: bool) -> Tensor:
        return project_packed(rms_norm(x), self.linears(gated))

    def forward(
        self, x: Tensor, rotation: Rotation, memory: MemoryFeatures | None, attend: Attend, keeping: Keeping = KEPT
    ) -> Tensor:
        """x (B, T, D). Without memory neither gate is applied: that is another function."""
        if takes_kernels(x):
            packed = keeping.run(self.pack, x, memory is not None)
            run = plainly if getattr(attend, "writes", False) else keeping.run
            seen = run(self.attend_packed, packed, rotation, memory, attend)
        else:
            query, key, value, *logits = keeping.run(self.project, x, memory is not None)
            if memory is not None:
                query, key, value = inject(
                    query, key, value, *rotation, *memory, logits[0], logits[1], norm=keeping.norm
                )
            else:
                query, key = keeping.norm(rotate(query, *rotation)), keeping.norm(rotate(key, *rotation))
            seen = attend(query, key, value)
        return self.output_proj(seen.flatten(-2))

    def attend_packed(
        self, packed: Tensor, rotation: Rotation, memory: MemoryFeatures | None, attend: Attend
    ) -> Tensor:
        from maglev.ops import fused_inject

        return attend(*fused_inject.inject(packed, *rotation, memory, self.heads, self.kv_heads))


class Block(nn.Module):
    """`keeping` says what training keeps of a pass; it changes no result."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config.width)
        self.keeping = KEPT

    def forward(
        self,
        x: Tensor,
        start: Tensor,
        entry: tuple[Tensor, Tensor],
        rotation: Rotation,
        memory: MemoryFeatures | None,
        attend: Attend,
    ) -> Tensor:
        """x and the embedded tokens x_0 (B, T, D); `entry` are the scales that both enter with."""
        x = entry[0] * x + entry[1] * start
        x = x + self.attention(x, rotation, memory, attend, self.keeping)
        return x + self.mlp(x, self.keeping)
