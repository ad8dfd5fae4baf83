"""What the GPU did in a profiled step, by kind of op, from a trace in Chrome's format."""

import re
from collections.abc import Iterable
from typing import Any

# of the ranges that the benchmark marks in the trace
PREFIX = "maglev."
KINDS = ("matmul", "attention", "norm and elementwise", "loss", "optimizer", "copies", "idle")
# names of kernels: FlexAttention and its rivals, our own last; cuBLAS and CUTLASS; what a cross-entropy is made of
ATTENTION = re.compile(r"flex_attention|flash|fmha|sdpa|attention|^(attend|queries|keys)_kernel", re.I)
MATMUL = re.compile(r"gemm|nvjet|xmma|cutlass|triton_tem_fused_\w*mm|wgrad|splitk", re.I)
LOSS = re.compile(r"softmax|nll_loss|cross_entropy|tanh|nats", re.I)

Event = dict[str, Any]


def kind_of(name: str, ranges: Iterable[str]) -> str:
    """By the range that a kernel lies in where that says it, else by its name. The readout's products are matmul."""
    if PREFIX + "optimizer" in ranges:
        return "optimizer"
    if ATTENTION.search(name):
        return "attention"
    if MATMUL.search(name):
        return "matmul"
    inside = [each for each in ranges if each.startswith(PREFIX)]
    # ranges nest, the innermost comes last
    if LOSS.search(name) or (inside and inside[-1] == PREFIX + "loss"):
        return "loss"
    return "norm and elementwise"


def kinds_of_ops(events: list[Event]) -> dict[str, float]:
    """Milliseconds by kind; idle is what lies between the first kernel and the last and belongs to none."""
    marked = [e for e in events if e.get("cat") == "gpu_user_annotation" and str(e["name"]).startswith(PREFIX)]
    # the outer one first
    marked.sort(key=lambda e: (e["ts"], -e["dur"]))
    marks = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in marked]
    work = sorted(
        (e["ts"], e["ts"] + e["dur"], str(e["name"]), e["cat"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    times = dict.fromkeys(KINDS, 0.0)
    reached = work[0][0] if work else 0.0
    for begin, end, name, category in work:
        ranges = [mark for first, last, mark in marks if first <= begin < last]
        kind = "copies" if category != "kernel" and PREFIX + "optimizer" not in ranges else kind_of(name, ranges)
        times[kind] += (end - begin) / 1e3
        times["idle"] += max(0.0, begin - reached) / 1e3
        reached = max(reached, end)
    return times
