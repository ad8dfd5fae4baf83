"""How a decoder takes memory in. The paper's way: the last state enters the keys and values of every layer through
gates, by projections that all layers share. Beside it the ways that the paper leaves open.

An injection has a part of the decoder, which makes features of m_{t-1}, and a part in every layer, which takes them: in
attention (`shared_kv`, `layer_kv`, `tokens`; `slots`) or in the residual stream before it (`residual`,
`layer_residual`, `cross_attention`). A decoder may have one of each.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maglev.model.layers import Linear
from maglev.model_config import MEMORY_SLOTS, ModelConfig
from maglev.ops.attention import slot_attention
from maglev.ops.inject import gate, rms_norm, rotate

Rotation = tuple[Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


class Features(NamedTuple):
    """What one layer takes of the memories of all positions, by where it enters."""

    # keys and values (B, T, G, Dh): mixed into those of tokens by gates, or before them where there are none
    with_tokens: Pair | None = None
    # keys and values (B, T, S, G, Dh) beside those of the window
    slots: Pair | None = None
    # what writes to the residual stream is given
    stream: tuple[Tensor, ...] | None = None


class Injection(nn.Module):
    """What layers take of m_{t-1}, (B, T, D): features of every layer, or one that all of them share."""

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        raise NotImplementedError


class MemoryProjections(Injection):
    """W_k^rec and W_v^rec, shared by all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kv_heads = config.kv_heads
        self.memory_key_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.memory_value_proj = Linear(config.width, config.kv_heads * config.head_dim)

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        """m_{t-1} takes slot t, so its key is rotated there, like the local key it is mixed with."""
        memory_key = self.memory_key_proj(previous_memory).unflatten(-1, (self.kv_heads, -1))
        memory_value = self.memory_value_proj(previous_memory).unflatten(-1, (self.kv_heads, -1))
        return [Features(with_tokens=(rotate(rms_norm(memory_key), *rotation), memory_value))]


class ResidualProjection(Injection):
    """W m_{t-1}, (B, T, D), which every layer adds to its stream. Zero at the start, like all that writes there."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.residual_proj = Linear(config.width, config.width)

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        return [Features(stream=(self.residual_proj(previous_memory),))]


class OfEveryLayer(Injection):
    """What all layers share in another injection, of every layer its own."""

    kind: type[MemoryProjections | ResidualProjection]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.kind(config) for _ in range(config.depth))

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        return [features for layer in self.layers for features in layer(previous_memory, rotation)]


class LayerProjections(OfEveryLayer):
    kind = MemoryProjections


class LayerResiduals(OfEveryLayer):
    kind = ResidualProjection


class MemorySlots(nn.Module):
    """A few keys and values of the last memory alone, (B, T, S, G, Dh): a state holds no more than without them. They
    are as old at every position, so their keys are not rotated."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.shape = (MEMORY_SLOTS, config.kv_heads, config.head_dim)
        self.memory_key_proj = Linear(config.width, MEMORY_SLOTS * config.kv_heads * config.head_dim)
        self.memory_value_proj = Linear(config.width, MEMORY_SLOTS * config.kv_heads * config.head_dim)

    def made(self, previous_memory: Tensor) -> Pair:
        memory_key = self.memory_key_proj(previous_memory).unflatten(-1, self.shape)
        return rms_norm(memory_key), self.memory_value_proj(previous_memory).unflatten(-1, self.shape)


class StreamSlots(MemorySlots, Injection):
    """For queries of a layer's own."""

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        return [Features(stream=self.made(previous_memory))]


class TurnedSlots(MemorySlots, Injection):
    """For queries that attention has rotated: turned as these are, keys stay as old at every position."""

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        memory_key, memory_value = self.made(previous_memory)
        turned = rotate(memory_key.flatten(2, 3), *rotation).unflatten(2, memory_key.shape[2:4])
        return [Features(slots=(turned, memory_value))]


class Several(Injection):
    """One for each place where memory enters."""

    def __init__(self, parts: dict[str, Injection]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        found = [part(previous_memory, rotation) for part in self.parts.values()]
        layers = max(map(len, found))
        by_layer = zip(*(each * (layers // len(each)) for each in found), strict=True)
        return [together(features) for features in by_layer]


def together(features: tuple[Features, ...]) -> Features:
    """No two of them have something for one place."""
    return Features(*(next((part for part in place if part is not None), None) for place in zip(*features)))


class MemoryGates(nn.Module):
    """g_loc and g_rec of one layer, one number per K/V head, from all channels of the block's normalised input.

    Attention projects them together with its queries, keys and values; `gate` makes gates of the logits (B, T, G).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.local_gate = Linear(config.width, config.kv_heads)
        self.memory_gate = Linear(config.width, config.kv_heads)


class ResidualGate(nn.Module):
    """How much of W m_{t-1} a layer adds to its stream: one number per head's worth of channels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.memory_gate = Linear(config.width, config.heads)

    def forward(self, x: Tensor, memory: tuple[Tensor, ...]) -> Tensor:
        """The stream (B, T, D) -> what is added to it."""
        share = gate(self.memory_gate(rms_norm(x)))  # (B, T, H)
        return (share.unsqueeze(-1) * memory[0].unflatten(-1, (self.heads, -1))).flatten(-2)


class CrossAttention(nn.Module):
    """A layer's queries over the slots of the last memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_proj = Linear(config.width, config.width)
        self.output_proj = Linear(config.width, config.width)

    def forward(self, x: Tensor, memory: tuple[Tensor, ...]) -> Tensor:
        """The stream (B, T, D) -> what is added to it."""
        key, value = memory
        query = rms_norm(self.query_proj(rms_norm(x)).unflatten(-1, (-1, self.head_dim)))
        return self.output_proj(slot_attention(query, key, value).flatten(-2))


def injection_of(config: ModelConfig) -> Injection | None:
    """The decoder's part."""
    kinds: dict[str, type[Injection]] = {
        "shared_kv": MemoryProjections,
        "layer_kv": LayerProjections,
        "slots": TurnedSlots,
        "residual": ResidualProjection,
        "layer_residual": LayerResiduals,
        "cross_attention": StreamSlots,
        "tokens": MemoryProjections,
    }
    if config.memory == "none":
        return None
    parts = {name: kinds[name](config) for name in config.injections}
    return Several(parts) if len(parts) > 1 else parts[config.injection]


def gates_of(config: ModelConfig) -> MemoryGates | None:
    """A layer's part where memory is mixed into K/V. `slots` and `tokens` need none: there the queries choose."""
    return MemoryGates(config) if config.gated else None


def stream_of(config: ModelConfig) -> ResidualGate | CrossAttention | None:
    """A layer's part where memory enters the residual stream."""
    kinds: dict[str, type[ResidualGate | CrossAttention]] = {
        "residual": ResidualGate,
        "layer_residual": ResidualGate,
        "cross_attention": CrossAttention,
    }
    found = [kinds[name] for name in config.injections if name in kinds]
    return found[0](config) if found and config.memory != "none" else None


def shift_right(memory: Tensor, keep: Tensor | None = None) -> Tensor:
    """m_{1:T} -> m_{0:T-1} with m_0 = 0; `keep` (B, T) is False where a position starts without memory."""
    shifted = F.pad(memory, (0, 0, 1, -1))
    return shifted if keep is None else torch.where(keep.unsqueeze(-1), shifted, 0)
