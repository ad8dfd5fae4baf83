"""One query over the ring."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unpacked(features: Tensor, entries: int) -> Tensor:
    """Heads of several keys or values per slot to slots of one each. (B, W, E * G, Dh) -> (B, W * E, G, Dh)"""
    return features.unflatten(2, (entries, -1)).flatten(1, 2)


def decode_attention(query: Tensor, ring_key: Tensor, ring_value: Tensor, filled: Tensor, entries: int = 1) -> Tensor:
    """query (B, 1, H, Dh), ring (B, W, G, Dh), filled (B,): the first `filled` slots are in use -> (B, 1, H, Dh).

    The ring's order does not matter: keys carry their own rotation. With several `entries`, a slot holds the heads of
    so many keys.
    """
    if entries > 1:
        ring_key, ring_value, filled = unpacked(ring_key, entries), unpacked(ring_value, entries), filled * entries
    slots = torch.arange(ring_key.shape[1], device=ring_key.device)
    used = (slots[None] < filled[:, None])[:, None, None]  # (B, 1, 1, W)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        ring_key.transpose(1, 2),
        ring_value.transpose(1, 2),
        attn_mask=used,
        enable_gqa=query.shape[2] != ring_key.shape[2],
    )
    return out.transpose(1, 2)
