"""A parallel pass over the positions that follow a state: the bridge between whole passes and single steps."""

import torch
from torch import Tensor

from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache
from maglev.ops.attention import AttentionPlan, plan_attention, windowed_attention


class ChunkAttend:
    """Attend over the ring's entries in order, then the chunk's own; keeps the chunk's K/V for the commit."""

    def __init__(self, cache: RingCache, position: Tensor, plan: AttentionPlan) -> None:
        self.plan = plan
        history = cache.key.shape[1] - 1
        # positions p - history .. p - 1, wherever the ring keeps them; what lies before 0 is masked by the plan
        slots = (position[:, None] - history + torch.arange(history, device=position.device)) % (history + 1)
        row = torch.arange(position.shape[0], device=position.device)[:, None]
        self.past_key, self.past_value = cache.key[row, slots], cache.value[row, slots]  # (B, W - 1, G, Dh)
        self.key = self.value = cache.key

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        self.key, self.value = mixed_key, mixed_value
        key = torch.cat((self.past_key, mixed_key), dim=1)
        value = torch.cat((self.past_value, mixed_value), dim=1)
        return windowed_attention(query, key, value, self.plan)


class ChunkPass:
    """Passes of a decoder over tokens (B, C) that come after `state`; the state changes only on `commit_`."""

    def __init__(self, decoder: Decoder, tokens: Tensor, state: DecoderState) -> None:
        self.decoder, self.tokens = decoder, tokens
        self.first_memory = state.memory[:, None]  # (B, 1, D)
        length = tokens.shape[1]
        self.positions = state.position[:, None] + torch.arange(length, device=tokens.device)  # (B, C)
        plans = {window: self.plan(window, length, state.position) for window in set(decoder.config.windows)}
        self.attends = [
            ChunkAttend(cache, state.position, plans[window])
            for cache, window in zip(state.caches, decoder.config.windows, strict=True)
        ]
        self.memory = self.first_memory

    @staticmethod
    def plan(window: int, length: int, position: Tensor) -> AttentionPlan:
        history = window - 1
        # rows that have read less than the window have empty slots at the front
        empty = (history - position).clamp_min(0)
        starts = empty[:, None].expand(-1, length) if bool((empty > 0).any()) else None
        queries = range(history, history + length)
        return plan_attention(window, history + length, position.device, queries, starts)

    def run(self, memory: Tensor | None) -> Tensor:
        """One pass on the chunk's memories of the pass before; None for a decoder without memory."""
        previous = None if memory is None else torch.cat((self.first_memory, memory[:, :-1]), dim=1)
        self.memory = self.decoder.run(self.tokens, self.positions, previous, self.attends)
        return self.memory

    def commit_(self, state: DecoderState, count: int) -> None:
        """Take the first `count` positions of the last pass into the state."""
        row = torch.arange(self.tokens.shape[0], device=self.tokens.device)[:, None]
        for cache, attend in zip(state.caches, self.attends, strict=True):
            window = cache.key.shape[1]
            kept = slice(max(0, count - window), count)
            slots = self.positions[:, kept] % window
            cache.key[row, slots] = attend.key[:, kept]
            cache.value[row, slots] = attend.value[:, kept]
        state.memory = self.memory[:, count - 1].clone()
        state.position = state.position + count
