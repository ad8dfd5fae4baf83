"""The kernels of windowed attention behind one signature, and what each of them can do.

`blockwise` is plain PyTorch and takes everything. The others are for training on CUDA: `flex` is FlexAttention, which
compiles for every shape; `fused` are kernels of our own; `varlen` is flash attention with its window; `sdpa` is
PyTorch's, by cuDNN or flash attention, which has none.
"""

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from maglev.ops import flex
from maglev.ops.blockwise import blocks_of, causal_attention, plain_attention
from maglev.ops.plan import AttentionPlan

BLOCKWISE, FLEX, FUSED, VARLEN, SDPA = "blockwise", "flex", "fused", "varlen", "sdpa"
HALVES = (torch.bfloat16, torch.float16)
# the first that can; never one that writes down all scores
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


Heads = tuple[int, int]
USUAL_HEADS: Heads = (4, 2)


class Case(NamedTuple):
    """What a layer asks of a kernel. `is_full`: a query sees all keys before it; `documents`: several in a row, kept
    apart by a mask; `is_whole`: there is a query at every position, and a row is one document; `step`: from one query
    to the next; `heads`: those of queries, and of keys and values."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    queries: int
    is_full: bool
    is_whole: bool
    documents: bool = False
    step: int = 1
    heads: Heads = USUAL_HEADS


class Kernel(NamedTuple):
    """`attend` takes query (B, Q, H, Dh), key and value (B, T, G, Dh) and a plan -> (B, Q, H, Dh)."""

    serves: Callable[[Case], bool]
    attend: Callable[[Tensor, Tensor, Tensor, AttentionPlan], Tensor]


def flex_serves(case: Case) -> bool:
    return case.device_type == "cuda" and flex.serves(case.queries, case.dtype, case.head_dim)


def flex_attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    return flex.attention(query, key, value, plan.mask)


def attention_kernels() -> ModuleType | None:
    try:
        from maglev.ops import fused_attention
    except ImportError:
        # no Triton here, or the one file of an export, which goes without
        return None
    return fused_attention


def fused_serves(case: Case) -> bool:
    if case.device_type != "cuda" or case.documents:
        return False
    fused = attention_kernels()
    return fused is not None and fused.serves(case.dtype, case.head_dim)


def fused_attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    fused = attention_kernels()
    assert fused is not None
    out: Tensor = fused.attention(query, key, value, plan.window, plan.queries)
    return out


def halves_whole(case: Case) -> bool:
    """What flash attention and cuDNN take."""
    fits = case.head_dim % 8 == 0 and case.head_dim <= 256
    return case.device_type == "cuda" and case.is_whole and case.dtype in HALVES and fits


def varlen_serves(case: Case) -> bool:
    return halves_whole(case) and find_spec("torch.nn.attention.varlen") is not None


def varlen_attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """All rows as one text with borders in it."""
    from torch.nn.attention.varlen import varlen_attn

    batch, length, heads, _ = query.shape
    group = heads // key.shape[2]
    if group > 1:
        key, value = (each.repeat_interleave(group, dim=2) for each in (key, value))
    borders = torch.arange(batch + 1, device=query.device, dtype=torch.int32) * length
    query, key, value = (each.flatten(0, 1) for each in (query, key, value))
    before = -1 if plan.is_full else plan.window - 1
    out = varlen_attn(query, key, value, borders, borders, length, length, window_size=(before, 0))
    assert isinstance(out, Tensor)
    return out.unflatten(0, (batch, length))


def sdpa_serves(case: Case) -> bool:
    return halves_whole(case) and case.is_full


def sdpa_attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    with sdpa_kernel(BACKENDS, set_priority=True):
        return causal_attention(query, key, value)


KERNELS = {
    BLOCKWISE: Kernel(lambda case: True, plain_attention),
    FLEX: Kernel(flex_serves, flex_attend),
    FUSED: Kernel(fused_serves, fused_attend),
    VARLEN: Kernel(varlen_serves, varlen_attend),
    SDPA: Kernel(sdpa_serves, sdpa_attend),
}


def plan_for(
    kernel: str,
    window: int,
    keys: int,
    device: torch.device,
    queries: range | None = None,
    starts: Tensor | None = None,
) -> AttentionPlan:
    """The plan of a kernel that is to take this, whatever others could. Arguments as in `plan_attention`."""
    queries = range(keys) if queries is None else queries
    window = min(window, keys)
    if kernel == FLEX:
        return AttentionPlan(kernel, window, keys, queries, mask=flex.block_mask(window, keys, queries, starts, device))
    if kernel == BLOCKWISE:
        return AttentionPlan(kernel, window, keys, queries, *blocks_of(window, keys, queries, starts, device))
    assert starts is None and (kernel == FUSED or queries == range(keys))
    return AttentionPlan(kernel, window, keys, queries)
