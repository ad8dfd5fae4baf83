"""Causal windowed attention over all positions; the only place where W becomes a kernel's argument.

A plan holds what all layers of one window share, their kernel among it: the first in an order that serves the case and
agrees with the definition when it is run once.
"""

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.errors import WorkError
from maglev.ops import reference
from maglev.ops.decode import unpacked
from maglev.ops.kernels import BLOCKWISE, FLEX, FUSED, KERNELS, SDPA, USUAL_HEADS, VARLEN, Case, Heads, plan_for
from maglev.ops.plan import AttentionPlan

__all__ = ["AttentionPlan", "describe", "plan_attention", "slot_attention", "windowed_attention"]

PACKED = "packed"
# Fastest first, forward and backward together, as `benchmarks/attention_gpu.py` found it on an H200 for every shape of
# its models over all positions (results/attention-h200.json).
ORDER = {
    "windowed": (FUSED, FLEX, VARLEN, BLOCKWISE),
    "full": (SDPA, FUSED, FLEX, VARLEN, BLOCKWISE),
}
# what a check runs: a window that ends inside of blocks; both divide by 16, as those of training do, so that what is
# compiled for the check serves there too
CHECKED_LENGTH, CHECKED_WINDOW = 192, 48
LARGEST_ERROR = 0.02


def plan_attention(
    window: int,
    keys: int,
    device: torch.device,
    queries: range | None = None,
    starts: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    heads: Heads = USUAL_HEADS,
    kernel: str | None = None,
    entries: int = 1,
) -> AttentionPlan:
    """`starts` (B, Q): the first key that each query may see, for rows that hold several documents. With several
    `entries` the heads of all keys of a position come one after another, and a query sees all of its own too. `kernel`
    is the one to train with where it serves."""
    queries = range(keys) if queries is None else queries
    if entries > 1:
        at = range((queries.start + 1) * entries - 1, queries.stop * entries, queries.step * entries)
        starts = None if starts is None else starts * entries
        single = plan_attention(
            window * entries,
            keys * entries,
            device,
            at,
            starts,
            dtype=dtype,
            head_dim=head_dim,
            heads=heads,
            kernel=kernel,
        )
        return AttentionPlan(PACKED, min(window, keys), keys, queries, mask=single)
    whole = queries == range(keys) and starts is None
    documents, step = starts is not None, queries.step
    case = Case(device.type, dtype, head_dim, len(queries), window >= keys, whole, documents, step, heads)
    # reading and evaluation have any shape, which FlexAttention would compile for, and no gradients
    chosen = choose(case, kernel)[0] if torch.is_grad_enabled() else BLOCKWISE
    return plan_for(chosen, window, keys, device, queries, starts)


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
    """query (B, Q, H, Dh), key and value (B, T, G, Dh) -> (B, Q, H, Dh)."""
    if plan.kernel == PACKED:
        entries = plan.mask.keys // plan.keys
        return windowed_attention(query, unpacked(key, entries), unpacked(value, entries), plan.mask)
    return KERNELS[plan.kernel].attend(query, key, value, plan)


def slot_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each query over a few keys of its own, or none of them. query (B, T, H, Dh), slots (B, T, S, G, Dh)"""
    grouped = query.unflatten(2, (key.shape[3], -1))  # (B, T, G, H / G, Dh)
    scores = torch.einsum("btghd,btsgd->btghs", grouped, key) / query.shape[-1] ** 0.5
    # one more of score 0 and value 0: a query that finds nothing is not made to take something
    weights = F.pad(scores, (0, 1)).softmax(-1)[..., :-1]
    return torch.einsum("btghs,btsgd->btghd", weights, value).flatten(2, 3)


def choose(case: Case, wanted: str | None = None) -> tuple[str, str]:
    """The kernel that a training pass takes, and a word on it and on those before it that failed.

    One that is asked for and serves, but fails, ends the work: who asks wants to know.
    """
    if wanted is not None and KERNELS[wanted].serves(case):
        works, reason = check_for(wanted, case)
        if not works:
            raise WorkError(f"train.attention is {wanted}, which {reason}; set it to auto")
        return wanted, reason
    failed = ""
    for name in ORDER["full" if case.is_full else "windowed"]:
        if KERNELS[name].serves(case):
            works, reason = check_for(name, case)
            if works:
                return name, reason + failed
            failed += f"; {name} {reason}"
    raise AssertionError("plain PyTorch serves everything")


def check_for(kernel: str, case: Case) -> tuple[bool, str]:
    """Of ours as the case has it: one kernel is compiled for one number of heads and one step."""
    if kernel == FUSED:
        return check(kernel, case.device_type, case.head_dim, case.heads, case.step)
    return check(kernel, case.device_type, case.head_dim)


@functools.cache
def check(kernel: str, device_type: str, head_dim: int, heads: Heads = USUAL_HEADS, step: int = 1) -> tuple[bool, str]:
    """Whether a kernel works on that kind of device for such heads, found by running it once, and what came of it."""
    if kernel == BLOCKWISE:
        return True, "plain PyTorch"
    try:
        error = error_of(kernel, torch.device(device_type), head_dim, heads, step)
    except Exception as failure:  # whatever a missing compiler, driver or kernel raises: say it and go on without
        line = (str(failure).splitlines() or [""])[0]
        return False, f"failed: {type(failure).__name__}: {line[:120]}"
    if not error < LARGEST_ERROR:
        return False, f"differs from the definition by {error:.3f}"
    return True, f"within {error:.4f} of the definition"


def error_of(kernel: str, device: torch.device, head_dim: int, heads: Heads, step: int) -> float:
    """Forward and backward against the definition, on a shape with an edge in it."""
    generator = torch.Generator("cpu").manual_seed(0)
    window = CHECKED_LENGTH if kernel == SDPA else CHECKED_WINDOW
    # those that end a step, and one at least
    queries = range(min(step, CHECKED_LENGTH) - 1, CHECKED_LENGTH, step)

    def draw(count: int, heads: int) -> Tensor:
        numbers = torch.randn(1, count, heads, head_dim, generator=generator)
        return numbers.to(device, torch.bfloat16).requires_grad_()

    # the first call may come from an evaluation, which has no gradients
    with torch.inference_mode(False), torch.enable_grad():
        inputs = (draw(len(queries), heads[0]), draw(CHECKED_LENGTH, heads[1]), draw(CHECKED_LENGTH, heads[1]))
        plan = plan_for(kernel, window, CHECKED_LENGTH, device, queries)
        results = []
        for out in (windowed_attention(*inputs, plan), reference.windowed_attention(*inputs, window, queries)):
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), inputs)])
        # NaN is larger than any number, for PyTorch
        return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(*results, strict=True)]).max())


def describe(device_type: str, cases: Mapping[str, Case] | None = None, wanted: str | None = None) -> str:
    """One line for the log: which kernel each kind of layer takes, and why not a faster one."""
    if cases is None:
        usual = Case(device_type, torch.bfloat16, 128, 2048, is_full=False, is_whole=True)
        cases = {"windows": usual, "whole context": usual._replace(is_full=True)}
    chosen = {name: choose(case, wanted) for name, case in cases.items()}
    found = dict.fromkeys(chosen.values())
    if len(found) == 1:
        parts = [f"{kernel} ({reason})" for kernel, reason in found]
    else:
        parts = [f"{name}: {kernel} ({reason})" for name, (kernel, reason) in chosen.items()]
    return f"attention on {device_type}: " + "; ".join(parts)
