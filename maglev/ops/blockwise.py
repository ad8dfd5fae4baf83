"""Windowed attention in plain PyTorch, time and memory linear in T: for every device, shape and precision."""

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.ops import reference
from maglev.ops.plan import AttentionPlan

SMALLEST_BLOCK, LARGEST_BLOCK = 32, 256


def blocks_of(
    window: int, keys: int, queries: range, starts: Tensor | None, device: torch.device
) -> tuple[int, Tensor | None]:
    """How many queries are taken at a time, and which keys they see."""
    if window == keys:
        # every query sees all keys before it: whole causal attention, or block by block for some queries or documents
        whole = queries == range(keys) and starts is None
        return 0 if whole else LARGEST_BLOCK, starts
    block = min(max(SMALLEST_BLOCK, window // (2 * queries.step)), LARGEST_BLOCK, len(queries))
    return block, blockwise_mask(window, keys, queries, starts, block, device)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """query (B, Q, H, Dh), key and value (B, T, G, Dh) -> (B, Q, H, Dh)."""
    if not plan.is_full:
        return blockwise_attention(query, key, value, plan)
    return growing_attention(query, key, value, plan) if plan.block else causal_attention(query, key, value)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), repeat_heads(key, query), repeat_heads(value, query), is_causal=True
    )
    return out.transpose(1, 2)


def growing_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """Full causal attention of some positions: a block of queries at a time over the keys before its end."""
    parts = []
    for first in range(0, len(plan.queries), plan.block):
        positions = plan.queries[first : first + plan.block]
        end = positions[-1] + 1
        starts = None if plan.mask is None else plan.mask[:, first : first + plan.block]
        seen = reference.visible(end, plan.window, positions, starts, query.device)[:, None]  # (1 or B, 1, C, end)
        part = query[:, first : first + plan.block]
        keys, values = repeat_heads(key[:, :end], query), repeat_heads(value[:, :end], query)
        parts.append(F.scaled_dot_product_attention(part.transpose(1, 2), keys, values, attn_mask=seen).transpose(1, 2))
    return torch.cat(parts, dim=1)


def repeat_heads(features: Tensor, query: Tensor) -> Tensor:
    """(B, T, G, Dh) -> (B, H, T, Dh)."""
    group = query.shape[2] // features.shape[2]
    heads_first = features.transpose(1, 2)
    return heads_first if group == 1 else heads_first.repeat_interleave(group, dim=1)


def blockwise_mask(
    window: int, keys: int, queries: range, starts: Tensor | None, block: int, device: torch.device
) -> Tensor:
    """Query i of block n stands at i * step + window - 1 of the block's own span of keys."""
    step = queries.step
    blocks = -(-len(queries) // block)
    span = (block - 1) * step + window
    first_key = queries.start - (window - 1) + torch.arange(blocks, device=device) * block * step  # (n,)
    offset = torch.arange(span, device=device)  # (span,)
    at = torch.arange(block, device=device)[:, None] * step + window - 1  # (C, 1)
    seen = (offset <= at) & (offset > at - window)  # (C, span)
    key = first_key[:, None] + offset  # (n, span)
    seen = seen[None] & (key >= 0)[:, None]  # (n, C, span)
    if starts is not None:
        padded = F.pad(starts, (0, blocks * block - len(queries))).unflatten(1, (blocks, block))  # (B, n, C)
        seen = (seen[None] & (key[:, None] >= padded[..., None])).flatten(0, 1)  # (B * n, C, span)
    # queries that pad the last block see everything, so that no softmax is empty; their output is dropped
    row = torch.arange(blocks * block, device=device).view(blocks, block, 1) >= len(queries)
    row = row if starts is None else row.repeat(starts.shape[0], 1, 1)
    return (seen | row).unsqueeze(1)


def blockwise_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """Blocks of C queries over their own span of W + (C - 1) * step keys: time and memory linear in T."""
    batch, count = query.shape[:2]
    block, step, window = plan.block, plan.queries.step, plan.window
    blocks = -(-count // block)
    span = (block - 1) * step + window
    first = plan.queries.start - (window - 1)
    last = first + (blocks - 1) * block * step + span

    def spans(features: Tensor) -> Tensor:
        # keys from `first` to `last`, zeros where there are none: (B, L, G, Dh) -> (B * n, H, span, Dh)
        padded = F.pad(features, (0, 0, 0, 0, -first, last - features.shape[1]))
        parts = padded.unfold(1, span, block * step).permute(0, 1, 2, 4, 3).flatten(0, 1)
        group = query.shape[2] // features.shape[2]
        return parts if group == 1 else parts.repeat_interleave(group, dim=1)

    padded_query = F.pad(query, (0, 0, 0, 0, 0, blocks * block - count))
    parts = padded_query.unflatten(1, (blocks, block)).flatten(0, 1).transpose(1, 2)  # (B * n, H, C, Dh)
    mask = plan.mask if plan.mask.shape[0] == batch * blocks else plan.mask.repeat(batch, 1, 1, 1)
    out = F.scaled_dot_product_attention(parts, spans(key), spans(value), attn_mask=mask)
    return out.transpose(1, 2).unflatten(0, (batch, blocks)).flatten(1, 2)[:, :count]
