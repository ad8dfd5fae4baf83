"""The state of a running decoder: constant in size, however long the sequence.

The paper's memory window has no variable of its own: it is the ring of mixed keys and values, whose entry j holds
token x_j and memory m_{j-1} together, or m_{j-s} with a delay s; then memories wait for their turn in `older`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from maglev.model_config import ModelConfig
from maglev.ops.decode import decode_attention


@dataclass
class RingCache:
    """Mixed K/V of the last `window` positions of one layer; position p lives in slot p mod window."""

    key: Tensor  # (B, window, G, Dh), G the heads of all entries of a position
    value: Tensor  # (B, window, G, Dh)

    def attend_at(self, position: Tensor, entries: int = 1) -> "RingAttend":
        return RingAttend(self, position, entries)


class RingAttend:
    """Write one position per row into the ring, then attend over what it holds."""

    def __init__(self, cache: RingCache, position: Tensor, entries: int) -> None:
        self.cache, self.entries = cache, entries
        self.position = position  # (B,)

    def __call__(self, query: Tensor, mixed_key: Tensor, mixed_value: Tensor, /) -> Tensor:
        window = self.cache.key.shape[1]
        row = torch.arange(query.shape[0], device=query.device)
        slot = self.position % window
        self.cache.key[row, slot] = mixed_key[:, 0]
        self.cache.value[row, slot] = mixed_value[:, 0]
        filled = (self.position + 1).clamp_max(window)
        return decode_attention(query, self.cache.key, self.cache.value, filled, self.entries)


def previous_of(memories: Tensor) -> Tensor:
    """What a token is given after these (B, s, D), the oldest first: m_{t-1}, and with a delay m_{t-s} beside it."""
    last = memories[:, -1:]
    return last if memories.shape[1] == 1 else torch.cat((last, memories[:, :1]), dim=-1)


@dataclass
class DecoderState:
    """Rings, the memory of the last token, and how many tokens were read; with a delay s the memories before the last
    as well, as far back as m_{t-s}. Rows may be at different positions."""

    caches: list[RingCache]
    memory: Tensor  # (B, D)
    position: Tensor  # (B,) int64, tokens read so far
    older: Tensor  # (B, s - 1, D), the oldest first

    @classmethod
    def zeros(cls, config: ModelConfig, batch_size: int, dtype: torch.dtype, device: torch.device) -> "DecoderState":
        def ring(window: int) -> Tensor:
            heads = config.entries * config.kv_heads
            return torch.zeros(batch_size, window, heads, config.head_dim, dtype=dtype, device=device)

        return cls(
            caches=[RingCache(ring(window), ring(window)) for window in config.windows],
            memory=torch.zeros(batch_size, config.width, dtype=dtype, device=device),
            position=torch.zeros(batch_size, dtype=torch.int64, device=device),
            older=torch.zeros(batch_size, config.delay - 1, config.width, dtype=dtype, device=device),
        )

    @property
    def memories(self) -> Tensor:
        """The last s of them, the oldest first. (B, s, D)"""
        last = self.memory[:, None]
        return torch.cat((self.older, last), dim=1) if self.older.shape[1] else last

    @memories.setter
    def memories(self, memories: Tensor) -> None:
        self.older, self.memory = memories[:, :-1], memories[:, -1]

    @property
    def previous_memory(self) -> Tensor:
        """What the next token is given. (B, 1, D), with a delay (B, 1, 2 D)"""
        return previous_of(self.memories)

    def push_(self, memory: Tensor) -> None:
        """The memory (B, D) of one more token."""
        if self.older.shape[1]:
            self.older = torch.cat((self.older[:, 1:], self.memory[:, None]), dim=1)
        self.memory = memory
        self.position = self.position + 1

    @property
    def batch_size(self) -> int:
        return self.memory.shape[0]

    @property
    def nbytes(self) -> int:
        tensors = [self.memory, self.position, self.older]
        tensors += [tensor for cache in self.caches for tensor in (cache.key, cache.value)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def clone(self) -> "DecoderState":
        caches = [RingCache(cache.key.clone(), cache.value.clone()) for cache in self.caches]
        return DecoderState(caches, self.memory.clone(), self.position.clone(), self.older.clone())

    def to(self, dtype: torch.dtype, device: torch.device) -> "DecoderState":
        """The same rows in another precision or place; what fits already is not copied."""
        caches = [RingCache(cache.key.to(device, dtype), cache.value.to(device, dtype)) for cache in self.caches]
        return DecoderState(
            caches, self.memory.to(device, dtype), self.position.to(device), self.older.to(device, dtype)
        )

    @staticmethod
    def join(states: Sequence["DecoderState"]) -> "DecoderState":
        """One batch of many; rows keep their own positions."""
        caches = [
            RingCache(torch.cat([cache.key for cache in layer]), torch.cat([cache.value for cache in layer]))
            for layer in zip(*(state.caches for state in states), strict=True)
        ]
        memory, position, older = (
            torch.cat(each)
            for each in zip(*((state.memory, state.position, state.older) for state in states), strict=True)
        )
        return DecoderState(caches, memory, position, older)

    def row(self, index: int) -> "DecoderState":
        """A copy of one row, as a batch of one."""
        at = slice(index, index + 1)
        caches = [RingCache(cache.key[at].clone(), cache.value[at].clone()) for cache in self.caches]
        return DecoderState(caches, self.memory[at].clone(), self.position[at].clone(), self.older[at].clone())

    def rows(self, index: Tensor) -> "DecoderState":
        """A copy of these rows (N,), in this order; a row that comes again is forked."""
        caches = [RingCache(cache.key[index], cache.value[index]) for cache in self.caches]
        return DecoderState(caches, self.memory[index], self.position[index], self.older[index])

    def put_rows_(self, index: Tensor, rows: "DecoderState") -> None:
        """Write `rows` over these ones (N,)."""
        for cache, source in zip(self.caches, rows.caches, strict=True):
            cache.key[index], cache.value[index] = source.key, source.value
        self.memory = self.memory.index_copy(0, index, rows.memory)
        self.older = self.older.index_copy(0, index, rows.older)
        self.position = self.position.index_copy(0, index, rows.position)

    def fork(self, count: int) -> list["DecoderState"]:
        """Independent copies: what happens to one is not seen by another."""
        return [self.clone() for _ in range(count)]

    def restart(self, rows: Tensor, *, cache: bool, memory: bool) -> None:
        """Begin anew in the rows where `rows` (B,) is True. Only distances matter to keys, so position 0 serves."""
        if cache:
            self.position = torch.where(rows, 0, self.position)
            # a slot out of use is weighted with 0, and 0 x NaN would be NaN: nothing old may stay
            for ring in self.caches:
                for tensor in (ring.key, ring.value):
                    tensor.masked_fill_(rows[:, None, None, None], 0)
        if memory:
            self.memory = torch.where(rows[:, None], 0, self.memory)
            self.older = torch.where(rows[:, None, None], 0, self.older)
