"""The parts of one decoding step, for B rows of one token each, and of a parallel pass, whose rows are positions:
at most five calls per layer, or six where memory enters the residual stream.

These are the plain PyTorch twins: they serve any device and precision and define what the kernels of `fused_decode`
compute, under the same names and signatures. `decode_steps` chooses between the two.
"""

import importlib.util
from typing import Literal, Protocol, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.errors import RequestError
from maglev.ops.attention import plan_attention, windowed_attention
from maglev.ops.decode import decode_attention
from maglev.ops.inject import gate, mix, rms_norm, rotate
from maglev.ops.matrix import Matrix
from maglev.ops.reference import softcap
from maglev.ops.rotation import rotation

Backend = Literal["torch", "triton"]
FUSED_DTYPES = (torch.float32, torch.bfloat16)


class DecodeSteps(Protocol):
    """What both this module and `fused_decode` are."""

    def begin_step(
        self, tokens: Tensor, embedding: Tensor, position: Tensor, frequencies: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def scale_norm_project(self, x: Tensor, start: Tensor, scales: Tensor, weight: Matrix) -> tuple[Tensor, Tensor]: ...

    def gate_norm_project(
        self, x: Tensor, memory_projected: Tensor, logits: Tensor, heads: int, weight: Matrix
    ) -> tuple[Tensor, Tensor]: ...

    def ring_attend(
        self,
        projected: Tensor,
        memory_projected: Tensor | None,
        ring_key: Tensor,
        ring_value: Tensor,
        position: Tensor,
        cos: Tensor,
        sin: Tensor,
        arrivals: Tensor,
        heads: int,
    ) -> Tensor: ...

    def chunk_attend(
        self,
        projected: Tensor,
        memory_projected: Tensor | None,
        key: Tensor,
        value: Tensor,
        empty: Tensor,
        queries: range,
        window: int,
        cos: Tensor,
        sin: Tensor,
        heads: int,
    ) -> Tensor: ...

    def project(self, x: Tensor, weight: Matrix) -> Tensor: ...

    def project_add(self, x: Tensor, inputs: Tensor, weight: Matrix) -> Tensor: ...

    def norm_project_relu2(self, x: Tensor, weight: Matrix) -> Tensor: ...

    def finish_step(self, x: Tensor, position: Tensor, memory_out: Tensor, position_out: Tensor) -> None: ...

    def read_out(self, memory: Tensor, weight: Matrix, cap: float) -> Tensor: ...


def decode_steps(backend: Backend | None, device: torch.device, dtype: torch.dtype) -> DecodeSteps:
    """The kernels on a CUDA GPU and the twins elsewhere, unless told; what was asked for is never replaced."""
    if backend is not None and backend not in get_args(Backend):
        raise RequestError(f"backend is {backend!r}; it must be one of {', '.join(get_args(Backend))}")
    installed = importlib.util.find_spec("triton") is not None
    if backend is None:
        backend = "triton" if device.type == "cuda" and installed and dtype in FUSED_DTYPES else "torch"
    if backend == "torch":
        from maglev.ops import decode_steps as twins

        return cast(DecodeSteps, twins)
    if not installed:
        raise RequestError("backend 'triton' needs the package triton; install it or use backend 'torch'")
    if dtype not in FUSED_DTYPES:
        raise RequestError(f"backend 'triton' works in float32 or bfloat16, not {dtype}; use backend 'torch'")
    from maglev.ops import fused_decode

    if device.type != "cuda" and not fused_decode.INTERPRETED:
        raise RequestError(f"backend 'triton' needs a CUDA GPU, the weights are on {device}; use backend 'torch'")
    return cast(DecodeSteps, fused_decode)


def begin_step(
    tokens: Tensor, embedding: Tensor, position: Tensor, frequencies: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, position (B,) -> x_0 (B, D), and cos and sin (B, half) for all layers."""
    cos, sin = rotation(position, frequencies, embedding.dtype)  # (B, 1, half)
    return rms_norm(F.embedding(tokens, embedding)), cos[:, 0], sin[:, 0]


def scale_norm_project(x: Tensor, start: Tensor, scales: Tensor, weight: Matrix) -> tuple[Tensor, Tensor]:
    """x' = a x + b x_0 with scales (a, b) in (2,); W norm(x'). x, start (B, D), weight (N, D) -> x', (B, N)"""
    x = (scales[0] * x + scales[1] * start).to(x.dtype)
    return x, weight.times(rms_norm(x))


def gate_norm_project(
    x: Tensor, memory_projected: Tensor, logits: Tensor, heads: int, weight: Matrix
) -> tuple[Tensor, Tensor]:
    """x' = x + g W m, a gate for each head's share of the channels; W norm(x'). x, memory_projected (B, D), logits of
    the gates (B, H) and what pads them, weight (N, D) -> x', (B, N)"""
    share = gate(logits[:, :heads]).unsqueeze(-1)
    x = x + (share * memory_projected.unflatten(1, (heads, -1))).flatten(1)
    return x, weight.times(rms_norm(x))


def ring_attend(
    projected: Tensor,
    memory_projected: Tensor | None,
    ring_key: Tensor,
    ring_value: Tensor,
    position: Tensor,
    cos: Tensor,
    sin: Tensor,
    arrivals: Tensor,
    heads: int,
) -> Tensor:
    """Write one position per row into its ring, in place, then attend over what the ring holds. -> (B, H * Dh)

    projected (B, N) is [query; key; value] of H = `heads` heads, with memory also [local gate; memory gate], then what
    pads the matrix; memory_projected (B, 2 G Dh) is [W_k^rec m; W_v^rec m]; neither is normalised or rotated.
    ring_key and ring_value (B, W, G, Dh).
    `arrivals` (ARRIVALS,) is int32 zeros that the kernel counts in and leaves at zero. Slots that were never
    written must hold finite numbers here; the kernel does not read them.
    """
    window, kv_heads, head_dim = ring_key.shape[1:]
    query, key, value = mixed_features(projected, memory_projected, kv_heads, head_dim, cos, sin, heads)
    row, slot = torch.arange(position.shape[0], device=position.device), position % window
    ring_key[row, slot], ring_value[row, slot] = key, value
    filled = (position + 1).clamp_max(window)
    return decode_attention(query[:, None], ring_key, ring_value, filled).flatten(1)


def mixed_features(
    projected: Tensor,
    memory_projected: Tensor | None,
    kv_heads: int,
    head_dim: int,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention takes: query (N, H, Dh), mixed key and value (N, G, Dh)."""
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    query, key, value, rest = projected.split([*sizes, projected.shape[1] - sum(sizes)], dim=1)
    angles = cos[:, None], sin[:, None]  # (N, 1, half)
    query = rms_norm(rotate(query.unflatten(1, (heads, head_dim)), *angles))
    key = rms_norm(rotate(key.unflatten(1, (kv_heads, head_dim)), *angles))
    value = value.unflatten(1, (kv_heads, head_dim))
    if memory_projected is not None:
        memory_key, memory_value = memory_projected.unflatten(1, (2, kv_heads, head_dim)).unbind(1)
        gates = gate(rest[:, : 2 * kv_heads]).chunk(2, dim=1)  # (N, G) each
        key = mix(key, rotate(rms_norm(memory_key), *angles), *gates)
        value = mix(value, memory_value, *gates)
    return query, key, value


def memory_logits(projected: Tensor, kv_heads: int, head_dim: int, heads: int) -> Tensor:
    """Of the memory gate, (N, G): a view of what `mixed_features` takes where there is memory."""
    first = (heads + 2 * kv_heads) * head_dim + kv_heads
    return projected[:, first : first + kv_heads]


def chunk_attend(
    projected: Tensor,
    memory_projected: Tensor | None,
    key: Tensor,
    value: Tensor,
    empty: Tensor,
    queries: range,
    window: int,
    cos: Tensor,
    sin: Tensor,
    heads: int,
) -> Tensor:
    """`ring_attend` for many positions of every sequence. -> (B * Q, H * Dh)

    Rows are B sequences of Q positions each, sequence by sequence. key and value (B, L, G, Dh) are in the order of
    positions; `queries` says where the rows' own are, which are written in place. The first `empty` (B,) of them do not
    count.
    """
    batch, _, kv_heads, head_dim = key.shape
    at = slice(queries.start, queries.stop, queries.step)
    # what comes after them is not there yet
    key, value = key[:, : queries.stop], value[:, : queries.stop]
    query, own_key, own_value = mixed_features(projected, memory_projected, kv_heads, head_dim, cos, sin, heads)
    key[:, at], value[:, at] = own_key.unflatten(0, (batch, -1)), own_value.unflatten(0, (batch, -1))
    starts = empty[:, None].expand(-1, len(queries))
    plan = plan_attention(window, key.shape[1], key.device, queries, starts)
    return windowed_attention(query.unflatten(0, (batch, -1)), key, value, plan).flatten(2).flatten(0, 1)


def project(x: Tensor, weight: Matrix) -> Tensor:
    """W x. (B, K), (N, K) -> (B, N)"""
    return weight.times(x)


def project_add(x: Tensor, inputs: Tensor, weight: Matrix) -> Tensor:
    """x + W inputs. x (B, N), inputs (B, K), weight (N, K) -> (B, N)"""
    return x + weight.times(inputs)


def norm_project_relu2(x: Tensor, weight: Matrix) -> Tensor:
    """relu(W norm(x))^2. (B, K), (N, K) -> (B, N)"""
    return F.relu(weight.times(rms_norm(x))).square()


def finish_step(x: Tensor, position: Tensor, memory_out: Tensor, position_out: Tensor) -> None:
    """The memory of this token and the position after it, into the given tensors; they may be the state's own."""
    memory_out.copy_(rms_norm(x))
    torch.add(position, 1, out=position_out)


def read_out(memory: Tensor, weight: Matrix, cap: float) -> Tensor:
    """Soft-capped logits in float32 or better. (B, D), (V, D) -> (B, V)"""
    return softcap(weight.times(memory), cap)
