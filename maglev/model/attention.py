"""One block: attention over mixed K/V and a relu^2 MLP, each on the normalised residual stream."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from maglev.model.layers import MLP, Linear, project_packed
from maglev.model.memory import Features, Pair, Rotation, gates_of, stream_of
from maglev.model_config import ModelConfig
from maglev.ops.attention import slot_attention
from maglev.ops.entry import enter
from maglev.ops.inject import inject, kernels, rms_norm, rotate, takes_kernels
from maglev.ops.recompute import KEPT, Keeping, plainly


class Attend(Protocol):
    """Where keys and values go, and which of them the queries see: a whole pass, a ring, a buffer."""

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor: ...


class Recording:
    """An `Attend` that notes down what it is given; the compiler allows none in a part that backward runs again."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query_proj = Linear(config.width, config.heads * config.head_dim)
        self.key_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.value_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.output_proj = Linear(config.heads * config.head_dim, config.width)
        self.gates = gates_of(config)
        self.has_kernels = config.has_kernels

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
        self, x: Tensor, rotation: Rotation, memory: Features | None, attend: Attend, keeping: Keeping = KEPT
    ) -> Tensor:
        """x (B, T, D). Without memory neither gate is applied: that is another function."""
        mixed, slots = (None, None) if memory is None else (memory.with_tokens, memory.slots)
        fused = kernels() if self.has_kernels and takes_kernels(x) else None
        if fused is not None:
            packed = keeping.run(self.pack, x, mixed is not None)
            run = plainly if isinstance(attend, Recording) else keeping.run
            seen = run(self.attend_packed, fused.inject, packed, rotation, mixed, slots, attend)
        else:
            query, key, value, *logits = keeping.run(self.project, x, mixed is not None)
            if mixed is not None and self.gates is not None:
                memory_key, memory_value = mixed
                query, key, value = inject(
                    query, key, value, *rotation, memory_key, memory_value, logits[0], logits[1], norm=keeping.norm
                )
            else:
                query, key = keeping.norm(rotate(query, *rotation)), keeping.norm(rotate(key, *rotation))
                if mixed is not None:
                    # a recurrent token before each token: two entries of a position, heads side by side
                    key, value = torch.cat((mixed[0], key), dim=2), torch.cat((mixed[1], value), dim=2)
            seen = look(query, key, value, slots, attend)
        return self.output_proj(seen.flatten(-2))

    def attend_packed(
        self,
        prepare: Callable[..., tuple[Tensor, Tensor, Tensor]],
        packed: Tensor,
        rotation: Rotation,
        mixed: Pair | None,
        slots: Pair | None,
        attend: Attend,
    ) -> Tensor:
        return look(*prepare(packed, *rotation, mixed, self.heads, self.kv_heads), slots, attend)


def look(query: Tensor, key: Tensor, value: Tensor, slots: Pair | None, attend: Attend) -> Tensor:
    """At the windows, and with the same queries at the last memory, where it has slots."""
    seen = attend(query, key, value)
    return seen if slots is None else seen + slot_attention(query, *slots)


class Block(nn.Module):
    """`keeping` says what training keeps of a pass; it changes no result."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config.width)
        self.stream = stream_of(config)
        self.keeping = KEPT

    def forward(
        self,
        x: Tensor,
        start: Tensor,
        entry: tuple[Tensor, Tensor],
        rotation: Rotation,
        memory: Features | None,
        attend: Attend,
        attention: Attention | None = None,
        mlp: MLP | None = None,
    ) -> Tensor:
        """x and the embedded tokens x_0 (B, T, D); `entry` are the scales that both enter with.

        A prefiller that borrows this block in part brings what it has of its own.
        """
        attention, mlp = attention or self.attention, mlp or self.mlp
        x = enter(x, start, entry)
        if self.stream is not None and memory is not None:
            x = x + self.stream(x, memory.stream)
        x = x + attention(x, rotation, memory, attend, self.keeping)
        return x + mlp(x, self.keeping)
