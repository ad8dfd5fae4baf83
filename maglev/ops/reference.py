"""The plain PyTorch definition of every op: what the fast versions are tested against, never what a run uses."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + half}) of every head. x: (..., heads, head_dim), cos and sin: (..., 1, half)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(x.dtype)


def mix(local: Tensor, memory: Tensor, local_gate: Tensor, memory_gate: Tensor) -> Tensor:
    """g_loc * local + g_rec * memory, one gate per K/V head. features (B, T, G, Dh), gates (B, T, G)."""
    return local_gate.unsqueeze(-1) * local + memory_gate.unsqueeze(-1) * memory


def inject(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    memory_key: Tensor,
    memory_value: Tensor,
    local_logits: Tensor,
    memory_logits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections (B, T, H or G, Dh), memory features (B, T, G, Dh) and gates before their sigmoid (B, T, G) to queries
    and to mixed keys and values. Memory keys come normalised and rotated; gates are 2 * sigmoid."""
    local_gate, memory_gate = 2 * local_logits.sigmoid(), 2 * memory_logits.sigmoid()
    query, key = rms_norm(rotate(query, cos, sin)), rms_norm(rotate(key, cos, sin))
    mixed_key = mix(key, memory_key, local_gate, memory_gate)
    return query, mixed_key, mix(value, memory_value, local_gate, memory_gate)


def visible(keys: int, window: int, queries: range, starts: Tensor | None, device: torch.device) -> Tensor:
    """Which keys each query sees: the last `window` up to and including its own, none before its start."""
    at = torch.arange(queries.start, queries.stop, queries.step, device=device)[:, None]  # (Q, 1)
    key = torch.arange(keys, device=device)[None, :]  # (1, T)
    seen = (key <= at) & (key > at - window)  # (Q, T)
    return seen[None] if starts is None else seen[None] & (key[None] >= starts[..., None])  # (1 or B, Q, T)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    queries: range | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Dense masked attention. query (B, Q, H, Dh), key and value (B, T, G, Dh) -> (B, Q, H, Dh).

    `queries` are the positions of the queries among the keys; `starts` (B, Q) the first key each one may see.
    """
    queries = range(key.shape[1]) if queries is None else queries
    group = query.shape[2] // key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide)
    k = key.to(wide).repeat_interleave(group, dim=2)
    v = value.to(wide).repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / query.shape[-1] ** 0.5
    seen = visible(key.shape[1], window, queries, starts, query.device)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(query.dtype)


def decode_attention(query: Tensor, ring_key: Tensor, ring_value: Tensor, filled: Tensor) -> Tensor:
    """One query per row over its ring. query (B, 1, H, Dh), ring (B, W, G, Dh), filled (B,) slots in use."""
    group = query.shape[2] // ring_key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    k = ring_key.to(wide).repeat_interleave(group, dim=2)
    v = ring_value.to(wide).repeat_interleave(group, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query.to(wide), k) / query.shape[-1] ** 0.5
    unused = torch.arange(k.shape[1], device=k.device)[None] >= filled[:, None]  # (B, W)
    weights = scores.masked_fill(unused[:, None, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(query.dtype)


def softcap(logits: Tensor, cap: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cap * torch.tanh(wide / cap)


def cross_entropy(memory: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Nats of every target; 0 where the target is -1. memory (N, D), weight (V, D), targets (N,) -> (N,)."""
    logits = softcap(memory @ weight.to(memory.dtype).T, cap)
    nats = logits.logsumexp(-1) - logits.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    return nats.masked_fill(targets < 0, 0.0)


def consistency(memory: Tensor, target_memory: Tensor) -> Tensor:
    """||m - m'||_2 / sqrt(d) of every position, with gradient 0 where the two are equal. (..., D) -> (...)"""
    wide = torch.promote_types(memory.dtype, torch.float32)
    squared = (memory.to(wide) - target_memory.to(wide)).square().mean(-1)
    apart = squared > 0
    # sqrt has an infinite slope at 0, and inf * 0 is NaN: equal memories take the constant branch before the root
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)
