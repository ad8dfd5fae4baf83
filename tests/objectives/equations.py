"""The paper's network written out position by position: no batch, no masks, no kernels, float64, plain loops.

Read beside section 2.2. Where the paper leaves a choice, facts.md has made it: parameter-free RMSNorm everywhere,
x <- a_l x + b_l x_0 before block l, the gates read the block's normalised input, a relu^2 MLP of four times the width.
Nothing here uses the library; the weights come in as a dictionary of named tensors.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Network:
    """A stack's shape. `blocks` and `scales` are the prefixes of its weights' names."""

    windows: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    blocks: str
    scales: str
    rope_base: float = 10_000.0


@dataclass
class Cache:
    """bar-k and bar-v of one layer by position and K/V head."""

    keys: dict[int, list[Tensor]] = field(default_factory=dict)
    values: dict[int, list[Tensor]] = field(default_factory=dict)


def norm(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6)


def turn(x: Tensor, slot: int, base: float) -> Tensor:
    """RoPE of one head at one slot; the pairs are (x_i, x_{i + half}) and turn by minus the angle."""
    half = len(x) // 2
    out = [x[0]] * len(x)
    for i in range(half):
        angle = slot * base ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) + x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) - x[i] * math.sin(angle)
    return torch.stack(out)


def heads_of(x: Tensor, count: int) -> list[Tensor]:
    return list(x.reshape(count, -1))


def recurrent_features(
    weights: Weights, network: Network, previous: Tensor, slot: int
) -> tuple[list[Tensor], list[Tensor]]:
    """k^rec_t = RMSNorm(W_k^rec m_{t-1}) per head, then RoPE at slot t; v^rec_t = W_v^rec m_{t-1}. For all layers."""
    keys = heads_of(weights["decoder.injection.memory_key_proj.weight"] @ previous, network.kv_heads)
    values = heads_of(weights["decoder.injection.memory_value_proj.weight"] @ previous, network.kv_heads)
    return [turn(norm(key), slot, network.rope_base) for key in keys], values


def write_and_attend(
    weights: Weights,
    network: Network,
    layer: int,
    a: dict[int, Tensor],
    previous: dict[int, Tensor] | None,
    cache: Cache,
    starts: dict[int, int] | None,
) -> dict[int, Tensor]:
    """Attention of one layer: every position writes its mixed entry, then each attends to its window."""

    def matrix(name: str) -> Tensor:
        return weights[f"{network.blocks}.{layer}.attention.{name}.weight"]

    queries: dict[int, list[Tensor]] = {}
    for t, stream in a.items():
        x = norm(stream)
        queries[t] = [norm(turn(q, t, network.rope_base)) for q in heads_of(matrix("query_proj") @ x, network.heads)]
        k = [norm(turn(k, t, network.rope_base)) for k in heads_of(matrix("key_proj") @ x, network.kv_heads)]
        v = heads_of(matrix("value_proj") @ x, network.kv_heads)
        if previous is not None:
            k_rec, v_rec = recurrent_features(weights, network, previous[t], t)
            g_loc = 2 * torch.sigmoid(matrix("gates.local_gate") @ x)
            g_rec = 2 * torch.sigmoid(matrix("gates.memory_gate") @ x)
            k = [g_loc[g] * k[g] + g_rec[g] * k_rec[g] for g in range(network.kv_heads)]
            v = [g_loc[g] * v[g] + g_rec[g] * v_rec[g] for g in range(network.kv_heads)]
        cache.keys[t], cache.values[t] = k, v

    out = {}
    group = network.heads // network.kv_heads
    for t in a:
        first = max(0, t - network.windows[layer] + 1)
        if starts is not None:
            first = max(first, starts[t])
        window = range(first, t + 1)
        heads = []
        for h, query in enumerate(queries[t]):
            scores = torch.stack([query @ cache.keys[j][h // group] for j in window]) / math.sqrt(network.head_dim)
            shares = torch.exp(scores) / torch.exp(scores).sum()
            heads.append(sum(share * cache.values[j][h // group] for share, j in zip(shares, window, strict=True)))
        out[t] = matrix("output_proj") @ torch.cat(heads)
    return out


def run_stack(
    weights: Weights,
    network: Network,
    x: dict[int, Tensor],
    previous: dict[int, Tensor] | None,
    caches: list[Cache] | None = None,
    starts: dict[int, int] | None = None,
) -> dict[int, Tensor]:
    """The positions in `x` (embedded, normalised) through all blocks to the final norm.

    `previous` holds m_{t-1} for each of them, or None for a stack without memory; `caches` may already hold entries
    of other positions.
    """
    caches = caches or [Cache() for _ in network.windows]
    start = dict(x)
    for layer, cache in enumerate(caches):
        residual = weights[f"{network.scales}.residual_scale"][layer]
        skip = weights[f"{network.scales}.input_scale"][layer]
        a = {t: residual * x[t] + skip * start[t] for t in x}
        attended = write_and_attend(weights, network, layer, a, previous, cache, starts)
        x = {t: a[t] + attended[t] for t in a}
        up = weights[f"{network.blocks}.{layer}.mlp.up_proj.weight"]
        down = weights[f"{network.blocks}.{layer}.mlp.down_proj.weight"]
        x = {t: x[t] + down @ torch.relu(up @ norm(x[t])) ** 2 for t in x}
    return {t: norm(x[t]) for t in x}


def embed(weights: Weights, tokens: list[int]) -> dict[int, Tensor]:
    return {t: norm(weights["decoder.embedding.weight"][token]) for t, token in enumerate(tokens)}


def cross_entropy(weights: Weights, memory: Tensor, target: int) -> Tensor:
    """CE(softmax(15 tanh(U m / 15)), y)."""
    o = weights["decoder.readout.weight"] @ memory
    capped = 15 * torch.tanh(o / 15)
    return torch.log(torch.exp(capped).sum()) - capped[target]
