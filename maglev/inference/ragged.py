"""Reading many texts at once: rows of different lengths, padded on the right, each into its own row of a state.

Padding stands after all that is read and attention is causal, so it changes nothing. As in `reading`, memories are the
fixed point of parallel passes; here every row settles by itself, and what it reads does not depend on its neighbours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from maglev.inference.checks import check_tokens
from maglev.inference.reading import (
    PASS_BUDGET,
    TOLERANCE,
    Reader,
    alone,
    chunk_of,
    default_block,
    have_settled,
    no_changes,
    nothing_yet,
    reads_at_once,
    relative_changes,
)
from maglev.model.chunk import Chunk
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState


@dataclass
class Effort:
    """What reading took, padding included: rows that share a batch have as many passes as the slowest of them."""

    tokens: int = 0
    passed: int = 0
    stepped: int = 0

    @property
    def passes(self) -> float:
        """In the mean, of tokens that were not stepped from the start."""
        return self.passed / self.tokens if self.tokens else 0.0


@torch.inference_mode()
def read_rows_(
    decoder: Decoder | Reader,
    tokens: Tensor,
    lengths: Tensor,
    state: DecoderState,
    *,
    budget: int = PASS_BUDGET,
    chunk: int | None = None,
    effort: Effort | None = None,
) -> Tensor:
    """Read the first `lengths` (B,) of tokens (B, T) into `state`, which is rewritten in place. -> memories (B, T, D)

    Those of padding mean nothing. With a budget of 0 passes every token is stepped. `effort` is added to.
    """
    effort = effort or Effort()
    check_tokens(tokens, decoder.config.vocab_size)
    assert lengths.shape == (tokens.shape[0],) == (state.batch_size,)
    # rows fill a GPU: one block at a time will do
    size = chunk or default_block(decoder.config)
    parts = [state.memory.new_empty(tokens.shape[0], 0, state.memory.shape[-1])]
    for first in range(0, tokens.shape[1], size):
        part = tokens[:, first : first + size]
        counts = (lengths - first).clamp(0, part.shape[1])
        with alone(decoder):
            parts.append(read_part_(decoder, part, counts, state, budget, effort))
    return torch.cat(parts, dim=1)


def read_part_(
    decoder: Decoder | Reader, tokens: Tensor, counts: Tensor, state: DecoderState, budget: int, effort: Effort
) -> Tensor:
    if budget and reads_at_once(decoder.config, tokens.shape[1]):
        chunk = chunk_of(decoder, tokens, state)
        memory = chunk.run(nothing_yet(decoder.config, tokens, state.memory))
        chunk.commit_rows_(state, counts)
        effort.tokens += tokens.numel()
        effort.passed += tokens.numel()
        return memory
    memory = state.memory.new_zeros(*tokens.shape, state.memory.shape[-1])
    moving, done = counts > 0, 0
    if budget:
        chunk = chunk_of(decoder, tokens, state)
        memory, moving, done = settle(chunk, memory, counts, min(budget, tokens.shape[1]))
        effort.tokens += tokens.numel()
        effort.passed += tokens.numel() * done
        moving = moving & (counts > done)
        chunk.commit_rows_(state, torch.where(moving, done, counts))
    left = moving.nonzero()[:, 0]
    if len(left):
        effort.stepped += int((counts[left] - done).sum())
        step_rows_(decoder, tokens, counts, state, memory, left, done)
    return memory


def settle(chunk: Chunk, memory: Tensor, counts: Tensor, budget: int) -> tuple[Tensor, Tensor, int]:
    """Passes until no row moves or the budget is spent. -> memories, which rows still move (B,), exact positions"""
    tolerance = TOLERANCE[memory.dtype]
    inside = torch.arange(chunk.length, device=counts.device) < counts[:, None]  # (B, C)
    moving, recent, passes = counts > 0, no_changes(len(counts), device=counts.device), 0
    while True:
        fresh = chunk.run(memory)
        passes += 1
        # padding is left out
        before, after = (torch.where(inside[..., None], each, 0) for each in (memory, fresh))
        recent = torch.cat((recent[1:], relative_changes(before, after)[None]))
        moving = moving & ~have_settled(recent, tolerance)
        if passes == budget or not bool(moving.any()):
            return fresh, moving, passes
        # A row that has settled is given what it settled on, however long others take: its memories stay, and so do its
        # keys and values, which are those of memories a pass older.
        memory = torch.where(moving[:, None, None], fresh, memory)


def step_rows_(
    decoder: Decoder | Reader,
    tokens: Tensor,
    counts: Tensor,
    state: DecoderState,
    memory: Tensor,
    rows: Tensor,
    first: int,
) -> None:
    """Read what is left of these rows, from position `first` of the chunk on, token by token."""
    running, ends = state.rows(rows), counts[rows].tolist()
    for slot in range(first, max(ends)):
        memory[rows, slot] = decoder.step_(tokens[rows, slot], running)
        done = [index for index, end in enumerate(ends) if end == slot + 1]
        if done:
            own = torch.tensor(done, device=rows.device)
            state.put_rows_(rows[own], running.rows(own))
