"""A stock cache as the decoder's state, and back.

Layers hold keys and values in the order of reading, the newest last, so that rows which read less have empty places in
front. The first layer also holds what belongs to no layer: as its recurrent state the memory, with a delay those before
it as well, and as its convolution state how many tokens each row has read. So reordering, copying and moving a cache
are transformers' own.
"""

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from maglev.errors import RequestError
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache, previous_of
from maglev.ops.decode import decode_attention


def check_cache(cache: Cache, decoder: Decoder) -> None:
    layers = cache.layers if isinstance(cache, Cache) else []
    suits = all(isinstance(layer, LinearAttentionLayer) and isinstance(layer, DynamicLayer) for layer in layers)
    if len(layers) != decoder.config.depth or not suits:
        raise RequestError(
            f"past_key_values is a {type(cache).__name__} that cannot hold this model's state; "
            "give DynamicCache(config=model.config), or nothing"
        )


def is_empty(cache: Cache) -> bool:
    return not cache.has_previous_state(0)


def position_in(cache: Cache) -> Tensor:
    """(B,), tokens read so far"""
    return cache.layers[0].conv_states[0][:, 0]


def memories_in(cache: Cache) -> Tensor:
    """The last s of them, the oldest first; s is 1 without a delay. (B, s, D)"""
    kept: Tensor = cache.layers[0].recurrent_states[0]
    return kept if kept.ndim == 3 else kept[:, None]


def keep_memories(cache: Cache, memories: Tensor, position: Tensor) -> None:
    cache.update_recurrent_state(memories if memories.shape[1] > 1 else memories[:, 0], 0)
    cache.update_conv_state(position[:, None], 0)


def state_in(cache: Cache, decoder: Decoder, batch_size: int) -> DecoderState:
    """A copy; the initial state of an empty cache."""
    state = decoder.initial_state(batch_size)
    if is_empty(cache):
        return state
    state.memories, state.position = memories_in(cache).clone(), position_in(cache).clone()
    row = torch.arange(batch_size, device=decoder.device)[:, None]
    for layer, ring in zip(cache.layers, state.caches, strict=True):
        window = ring.key.shape[1]
        # the one that the next token replaces is left out, and with it no two share a slot
        keys, values = (
            kept.transpose(1, 2)[:, max(0, kept.shape[2] - window + 1) :] for kept in (layer.keys, layer.values)
        )
        count = keys.shape[1]
        # places before the first token fall into slots that are not in use yet
        slots = (state.position[:, None] - count + torch.arange(count, device=decoder.device)) % window
        ring.key[row, slots], ring.value[row, slots] = keys, values
    return state


def keep_state(cache: Cache, state: DecoderState, columns: int) -> None:
    """Write the state after `columns` more columns of input, padding among them, into the cache."""
    total = cache.get_seq_length() + columns
    for layer, ring in zip(cache.layers, state.caches, strict=True):
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        # a layer that slides keeps what the next token sees, one that does not counts its columns by what it keeps
        places = min(total, ring.key.shape[1] - 1) if sliding else total
        keys, values = in_order(ring, state.position, places)
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if sliding:
            layer.cumulative_length = total
    keep_memories(cache, state.memories, state.position)


def in_order(ring: RingCache, position: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """The last `places` positions, newest last, zeros where the ring has none. -> two of (B, G, places, Dh)"""
    window = ring.key.shape[1]
    at = position[:, None] - places + torch.arange(places, device=position.device)  # (B, places)
    held = (at >= 0) & (at >= position[:, None] - window)
    row = torch.arange(position.shape[0], device=position.device)[:, None]
    key, value = (torch.where(held[..., None, None], kept[row, at % window], 0) for kept in (ring.key, ring.value))
    return key.transpose(1, 2), value.transpose(1, 2)


class CacheAttend:
    """One token per row: its key and value go into the cache, its query sees the last `window` of what is there."""

    def __init__(self, cache: Cache, layer: int, window: int, position: Tensor, entries: int) -> None:
        self.cache, self.layer, self.window, self.position = cache, layer, window, position
        self.entries = entries

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        kept = self.cache.update(mixed_key.transpose(1, 2), mixed_value.transpose(1, 2), self.layer)
        # newest first, so that empty places are at the end, as they are in a ring
        keys, values = (features[:, :, -self.window :].transpose(1, 2).flip(1) for features in kept)
        filled = (self.position + 1).clamp_max(keys.shape[1])
        return decode_attention(query, keys, values, filled, self.entries)


def step(decoder: Decoder, tokens: Tensor, cache: Cache) -> Tensor:
    """Read one token per row into a cache that has read before. tokens (B, 1) -> memory (B, 1, D)"""
    position = position_in(cache).clone()
    config = decoder.config
    attends = [
        CacheAttend(cache, layer, window, position, config.entries) for layer, window in enumerate(config.windows)
    ]
    before = memories_in(cache)
    memory = decoder.run(tokens, position[:, None], previous_of(before), attends)
    keep_memories(cache, torch.cat((before[:, 1:], memory), dim=1), position + 1)
    return memory
