"""Causal windowed attention over all positions; the only place where W becomes a kernel's argument.

A plan holds what all layers of one window share (block masks). The kernel is chosen per device by running it once.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.ops import flex, reference
from maglev.ops.decode import unpacked

BLOCKWISE, FLEX, PACKED = "blockwise", "flex", "packed"
SMALLEST_BLOCK, LARGEST_BLOCK = 32, 256


@dataclass(frozen=True)
class AttentionPlan:
    """`queries` are the positions of the queries among `keys` keys; a query sees `window` keys, itself included."""

    kernel: str
    window: int
    keys: int
    queries: range
    block: int
    # sliding: (blocks, 1, C, span) or (B * blocks, 1, C, span); full: the starts (B, Q), if any; flex: its BlockMask;
    # packed: the plan over single entries
    mask: Any


def plan_attention(
    window: int,
    keys: int,
    device: torch.device,
    queries: range | None = None,
    starts: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    kernel: str | None = None,
    entries: int = 1,
) -> AttentionPlan:
    """`starts` (B, Q): the first key that each query may see, for rows that hold several documents. With several
    `entries` the heads of all keys of a position come one after another, and a query sees all of its own too."""
    queries = range(keys) if queries is None else queries
    if entries > 1:
        at = range((queries.start + 1) * entries - 1, queries.stop * entries, queries.step * entries)
        starts = None if starts is None else starts * entries
        single = plan_attention(
            window * entries, keys * entries, device, at, starts, dtype=dtype, head_dim=head_dim, kernel=kernel
        )
        return AttentionPlan(PACKED, min(window, keys), keys, queries, 0, single)
    kernel = kernel or kernel_for(device, len(queries), dtype, head_dim)
    window = min(window, keys)
    if kernel == FLEX:
        return AttentionPlan(kernel, window, keys, queries, 0, flex.block_mask(window, keys, queries, starts, device))
    if window == keys:
        # every query sees all keys before it: whole causal attention, or block by block for some queries or documents
        whole = queries == range(keys) and starts is None
        return AttentionPlan(kernel, window, keys, queries, 0 if whole else LARGEST_BLOCK, starts)
    block = min(max(SMALLEST_BLOCK, window // (2 * queries.step)), LARGEST_BLOCK, len(queries))
    mask = blockwise_mask(window, keys, queries, starts, block, device)
    return AttentionPlan(kernel, window, keys, queries, block, mask)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """query (B, Q, H, Dh), key and value (B, T, G, Dh) -> (B, Q, H, Dh)."""
    if plan.kernel == PACKED:
        entries = plan.mask.keys // plan.keys
        return windowed_attention(query, unpacked(key, entries), unpacked(value, entries), plan.mask)
    if plan.kernel == FLEX:
        return flex.attention(query, key, value, plan.mask)
    if plan.window < plan.keys:
        return blockwise_attention(query, key, value, plan)
    return growing_attention(query, key, value, plan) if plan.block else causal_attention(query, key, value)


def slot_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query over a few keys of its own, or none of them. query (B, T, H, Dh), slots (B, T, S, G, Dh)"""
    grouped = query.unflatten(2, (key.shape[3], -1))  # (B, T, G, H / G, Dh)
    scores = torch.einsum("btghd,btsgd->btghs", grouped, key) / query.shape[-1] ** 0.5
    # one more of score 0 and value 0: a query that finds nothing is not made to take something
    weights = F.pad(scores, (0, 1)).softmax(-1)[..., :-1]
    return torch.einsum("btghs,btsgd->btghd", weights, value).flatten(2, 3)


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


def kernel_for(device: torch.device, queries: int, dtype: torch.dtype, head_dim: int) -> str:
    """FlexAttention compiles for every shape it meets: training has few of them, reading and evaluation have any."""
    if torch.is_grad_enabled() and flex.serves(queries, dtype, head_dim):
        return choose_kernel(device.type)
    return BLOCKWISE


@functools.cache
def choose_kernel(device_type: str) -> str:
    """The kernel that this process trains with on that kind of device, found by running it; `describe` says which."""
    return probe(device_type)[0]


def describe(device_type: str) -> str:
    """One line for the log: which kernel, and why not the faster one."""
    kernel, reason = probe(device_type)
    return f"attention on {device_type}: {kernel} ({reason})"


@functools.cache
def probe(device_type: str) -> tuple[str, str]:
    if device_type != "cuda":
        return BLOCKWISE, "plain PyTorch"
    try:
        return check_flex(torch.device(device_type))
    except Exception as error:  # whatever a missing compiler, driver or kernel raises: say it and go on without
        line = (str(error).splitlines() or [""])[0]
        return BLOCKWISE, f"FlexAttention failed: {type(error).__name__}: {line[:120]}"


def check_flex(device: torch.device) -> tuple[str, str]:
    """Forward and backward of FlexAttention against the definition, on a shape with an edge in it."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(heads: int) -> Tensor:
        numbers = torch.randn(1, 192, heads, 64, generator=generator)
        return numbers.to(device, torch.bfloat16).requires_grad_()

    # the first call may come from an evaluation, which has no gradients
    with torch.inference_mode(False), torch.enable_grad():
        inputs = (draw(4), draw(2), draw(2))
        plan = plan_attention(50, 192, device, kernel=FLEX)
        results = []
        for out in (windowed_attention(*inputs, plan), reference.windowed_attention(*inputs, 50)):
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
        worst = max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))
    if not worst < 0.02:
        return BLOCKWISE, f"FlexAttention differs from the definition by {worst:.3f}"
    return FLEX, f"FlexAttention, within {worst:.4f} of the definition"
