"""Attention of texts that go on side by side, one position of each at a time: a query sees the last W keys and values
of its own text. They are written in place, and their gradients too, so that a step costs what it sees.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Trails:
    """Keys and values of C texts per row, (B, C, W - 1 + S, G, Dh): those before a text, then its own, position by
    position. The texts of a row follow each other, S >= W positions each but for the last, which may be shorter.

    `starts` (B, T) is the first position of the row that each position may see.
    """

    def __init__(
        self, key: Tensor, value: Tensor, window: int, step: int, starts: Tensor | None, compiled: bool = False
    ) -> None:
        """Before each text is what key and value (B, T, G, Dh) are there, nothing before the first."""
        self.window, self.step, self.length = window, step, key.shape[1]
        parts: tuple[Callable[..., Any], ...] = compiled_parts() if compiled else (look, look_back)
        self.look, self.look_back = parts
        room = (0, 0) * (key.ndim - 2) + (0, step)
        before = (before_texts(each, window, step) for each in (key.detach(), value.detach()))  # (B, C, W - 1, G, Dh)
        self.keys, self.values = (F.pad(each, room) for each in before)
        self.key_gradients, self.value_gradients = self.keys, self.values
        places = torch.arange(self.keys.shape[1], device=key.device)[:, None] * step + 1 - window
        self.places = (places + torch.arange(window - 1 + step, device=key.device))[None]  # (1, C, W - 1 + S)
        self.starts = places.new_zeros(1, self.length) if starts is None else starts

    def seen(self, values: Tensor, first: int) -> Tensor:
        """By step `first`: (B, C, W, ...)"""
        return values[:, : len(range(first, self.length, self.step)), first : first + self.window]

    def begin(self, key: Tensor, value: Tensor) -> Tensor:
        """-> what chains one step to the next: backward then meets the last one first, and what was there before last.
        It is not kept here, where backward would keep it alive, and it all that backward keeps."""
        chain: Tensor = Begin.apply(*(before_texts(each, self.window, self.step) for each in (key, value)), self)
        return chain if chain.requires_grad else chain.requires_grad_()

    def attend(self, chain: Tensor, first: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Step `first` of all texts that are long enough. query (B, C, H, Dh), key and value (B, C, G, Dh) -> what is
        seen, and the next chain"""
        out, following = Step.apply(chain, query, key, value, self, first)
        return out, following


def before_texts(values: Tensor, window: int, step: int) -> Tensor:
    """(B, T, G, Dh) -> the W - 1 before every text, zeros before the first."""
    texts = -(-values.shape[1] // step)
    padded = F.pad(values, (0, 0) * (values.ndim - 2) + (window - 1, 0))
    if window == 1:
        return values.new_empty(len(values), texts, 0, *values.shape[2:])
    return padded[:, : (texts - 1) * step + window - 1].unfold(1, window - 1, step).movedim(-1, 2)


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, trails: Trails) -> Tensor:
        ctx.trails, ctx.dtype = trails, key.dtype
        return key.new_empty(0)

    @staticmethod
    def backward(ctx: Any, chain: Tensor) -> tuple[Tensor | None, ...]:
        trails = ctx.trails
        both = trails.key_gradients, trails.value_gradients
        return (*(each[:, :, : trails.window - 1].to(ctx.dtype) for each in both), None)


class Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Tensor, query: Tensor, key: Tensor, value: Tensor, trails: Trails, first: int
    ) -> tuple[Tensor, Tensor]:
        keys, values, places = (trails.seen(each, first) for each in (trails.keys, trails.values, trails.places))
        keys[:, :, -1], values[:, :, -1] = key, value
        out, weights = trails.look(query, keys, values, places, trails.starts[:, first :: trails.step])
        ctx.trails, ctx.first = trails, first
        ctx.save_for_backward(query, weights)
        ctx.set_materialize_grads(False)
        return out, chain

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, chain: Tensor | None) -> tuple[Tensor | None, ...]:
        trails, (query, weights) = ctx.trails, ctx.saved_tensors
        if chain is None:
            # nothing came after
            both = trails.keys, trails.values
            trails.key_gradients, trails.value_gradients = (
                torch.zeros_like(each, dtype=weights.dtype) for each in both
            )
        if gradient is None:
            gradient = torch.zeros_like(query)
        kept = trails.keys, trails.values, trails.key_gradients, trails.value_gradients
        seen = (trails.seen(each, ctx.first) for each in kept)
        return (query.new_empty(0), *trails.look_back(gradient, query, weights, *seen), None, None)


def grouped(query: Tensor, keys: Tensor) -> Tensor:
    """(B, C, H, Dh) -> (B, C, 1, G, H / G, Dh)"""
    return query.unflatten(2, (keys.shape[3], -1)).unsqueeze(2)


def look(query: Tensor, keys: Tensor, values: Tensor, places: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """query (B, C, H, Dh), keys and values (B, C, W, G, Dh) -> what is seen (B, C, H, Dh) and the weights (B, C, W, G,
    H / G). Sums of products, not matrix products: a query of its own for every few keys would be all launches."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (grouped(query, keys).to(wide) * keys.unsqueeze(-2)).sum(-1) * query.shape[-1] ** -0.5
    visible = places >= starts.unsqueeze(-1)  # (B, C, W)
    weights = scores.masked_fill(~visible[..., None, None], -torch.inf).softmax(2)
    out = (weights.unsqueeze(-1) * values.unsqueeze(-2)).sum(2)
    return out.flatten(2, 3).to(query.dtype), weights


def look_back(
    gradient: Tensor,
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    values: Tensor,
    key_gradients: Tensor,
    value_gradients: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of the query and of the key and the value that came with it, whose later readers have added theirs
    before; those of the others that it saw are added in place."""
    wide = weights.dtype
    pull, own = grouped(gradient, keys).to(wide), grouped(query, keys).to(wide)
    weight_gradients = (pull * values.unsqueeze(-2)).sum(-1)
    score_gradients = weights * (weight_gradients - (weights * weight_gradients).sum(2, keepdim=True))
    score_gradients = (score_gradients * query.shape[-1] ** -0.5).unsqueeze(-1)
    query_gradient = (score_gradients * keys.unsqueeze(-2)).sum(2).flatten(2, 3)
    key_gradients += (score_gradients * own).sum(4)
    value_gradients += (weights.unsqueeze(-1) * pull).sum(4)
    mine = (each[:, :, -1].to(query.dtype, copy=True) for each in (key_gradients, value_gradients))
    return (query_gradient.to(query.dtype), *mine)


@functools.cache
def compiled_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A few kernels where there would be thirty, of two shapes at most: the last text of a row may be shorter."""
    return torch.compile(look, dynamic=False), torch.compile(look_back, dynamic=False)
