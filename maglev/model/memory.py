"""How a decoder takes memory in. The paper's way: the last state enters the keys and values of every layer through
gates, by projections that all layers share. Beside it the ways that the paper leaves open.

An injection has a part of the decoder, which makes features of m_{t-1}, and a part in every layer, which takes them: in
attention (`shared_kv`, `layer_kv`, `tokens`; `slots`) or in the residual stream before it (`residual`,
`layer_residual`, `cross_attention`). A decoder may have one of each.

With a delay s the last memory comes with an older one beside it, m_{t-1} and m_{t-s} as (B, T, 2 D): keys and values of
every position are made of the older one, the residual stream is given both, slots are of the last.
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
    """What layers take of m_{t-1}, (B, T, D), or of m_{t-1} and m_{t-s} side by side: features of every layer, or one
    that all of them share."""

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        raise NotImplementedError


class MemoryProjections(Injection):
    """W_k^rec and W_v^rec, shared by all layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kv_heads, self.width = config.kv_heads, config.width
        self.memory_key_proj = Linear(config.width, config.kv_heads * config.head_dim)
        self.memory_value_proj = Linear(config.width, config.kv_heads * config.head_dim)

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        """m_{t-1}, or m_{t-s}, takes slot t, so its key is rotated there, like the local key it is mixed with."""
        oldest = previous_memory[..., -self.width :]
        memory_key = self.memory_key_proj(oldest).unflatten(-1, (self.kv_heads, -1))
        memory_value = self.memory_value_proj(oldest).unflatten(-1, (self.kv_heads, -1))
        return [Features(with_tokens=(rotate(rms_norm(memory_key), *rotation), memory_value))]


class Older(nn.Module):
    """What the residual stream has of its own for m_{t-s}, under the names of what it has for m_{t-1}."""

    residual_proj: Linear
    memory_gate: Linear


class ResidualProjection(Injection):
    """W m_{t-1}, (B, T, D), which every layer adds to its stream, and with a delay W' m_{t-s}. Zero at the start, like
    all that writes there."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = config.width
        self.residual_proj = Linear(config.width, config.width)
        self.older = Older() if config.delay > 1 else None
        if self.older is not None:
            self.older.residual_proj = Linear(config.width, config.width)

    def forward(self, previous_memory: Tensor, rotation: Rotation) -> list[Features]:
        found = [self.residual_proj(previous_memory[..., : self.width])]
        if self.older is not None:
            found.append(self.older.residual_proj(previous_memory[..., self.width :]))
        return [Features(stream=(*found,))]


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
        self.shape, self.width = (MEMORY_SLOTS, config.kv_heads, config.head_dim), config.width
        self.memory_key_proj = Linear(config.width, MEMORY_SLOTS * config.kv_heads * config.head_dim)
        self.memory_value_proj = Linear(config.width, MEMORY_SLOTS * config.kv_heads * config.head_dim)

    def made(self, previous_memory: Tensor) -> Pair:
        previous_memory = previous_memory[..., : self.width]
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
    """How much of W m_{t-1} a layer adds to its stream, and with a delay of W' m_{t-s}: one number per head's worth of
    channels for each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.memory_gate = Linear(config.width, config.heads)
        self.older = Older() if config.delay > 1 else None
        if self.older is not None:
            self.older.memory_gate = Linear(config.width, config.heads)

    def forward(self, x: Tensor, memory: tuple[Tensor, ...]) -> Tensor:
        """The stream (B, T, D) -> what is added to it."""
        normed = rms_norm(x)
        added = self.share(self.memory_gate(normed), memory[0])
        return added if self.older is None else added + self.share(self.older.memory_gate(normed), memory[1])

    def share(self, logits: Tensor, memory: Tensor) -> Tensor:
        """Gates' logits (B, T, H) of a memory (B, T, D)."""
        return (gate(logits).unsqueeze(-1) * memory.unflatten(-1, (self.heads, -1))).flatten(-2)


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


def shift_right(memory: Tensor, keep: Tensor | None = None, delay: int = 1) -> Tensor:
    """m_{1:T} -> m_{0:T-1} with m_0 = 0; `keep` (B, T) is False where a position starts without memory. With a delay of
    more than 1 the memories of so many positions ago stand beside these, (B, T, 2 D)."""
    shifted = F.pad(memory, (0, 0, 1, -1))
    shifted = shifted if keep is None else torch.where(keep.unsqueeze(-1), shifted, 0)
    return shifted if delay == 1 else torch.cat((shifted, shift_by(memory, keep, delay)), dim=-1)


def shift_by(memory: Tensor, keep: Tensor | None, delay: int) -> Tensor:
    """m_t -> m_{t - delay}, zeros where there is none, or where memory began anew since."""
    shifted = F.pad(memory, (0, 0, delay, 0))[:, : memory.shape[1]]
    return shifted if keep is None else torch.where(kept_over(keep, delay).unsqueeze(-1), shifted, 0)


def kept_over(keep: Tensor, delay: int) -> Tensor:
    """Whether a position (B, T) and the `delay - 1` before it all go on with memory."""
    slots = torch.arange(keep.shape[1], device=keep.device)
    newest = torch.where(keep, -delay, slots).cummax(dim=1).values
    return slots - newest >= delay
