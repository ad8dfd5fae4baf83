"""Windowed attention on a GPU, forward and backward: FlexAttention in several tilings, and varlen attention.

    python benchmarks/attention_gpu.py [--context 2048] [--tilings]

Shapes of d12 and d20 at 32,768 tokens, windowed (a quarter of the context) and full. Set beside the matrix product's
rate, counting the keys that a query sees: 4 x width each forward, 10 x backward. The last line of stdout is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.bench.clock import machine_facts, seconds
from maglev.bench.limits import machine_rates
from maglev.ops import flex, fused_attention

TOKENS, HEAD_DIM = 32_768, 128
CALLS, REPEATS = 5, 5
USUAL = dict(fused_attention.TILES)
# what FlexAttention is told about its tiles; the first is what it chooses by itself
TILINGS: dict[str, dict[str, Any]] = {
    "flex": {},
    "flex, 128 x 64, 4 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    "flex, 128 x 64, 8 warps": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3},
    "flex, 64 x 64, 4 warps": {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    "flex, back 64 x 128": {
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64, "bwd_num_warps": 8,
        "bwd_num_stages": 2,
    },
    "flex, back 64 x 64": {
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_warps": 4,
        "bwd_num_stages": 2,
    },
    "flex, back 32 x 128": {
        "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_warps": 8,
        "bwd_num_stages": 3,
    },
}  # fmt: skip


def by_flex(options: dict[str, Any], context: int, window: int, device: torch.device) -> Callable[..., Tensor]:
    mask = flex.shared_mask(window, context, 0, context, 1, str(device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (each.transpose(1, 2) for each in (query, key, value))
        out: Tensor = compiled(*heads_first, block_mask=mask, kernel_options=options)
        return out.transpose(1, 2)

    return attend


def by_varlen(context: int, window: int, rows: int, device: torch.device) -> Callable[..., Tensor]:
    borders = torch.arange(rows + 1, device=device, dtype=torch.int32) * context
    seen = (window - 1 if window < context else -1, 0)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = (each.flatten(0, 1) for each in (query, key, value))
        out: Tensor = varlen_attn(*flat, borders, borders, context, context, window_size=seen)
        return out.unflatten(0, query.shape[:2])

    return attend


# queries, keys, warps, stages of each of our kernels, the others as they are
OURS: list[tuple[str, tuple[int, int, int, int]]] = [
    ("forward", (64, 64, 4, 3)), ("forward", (128, 128, 8, 2)), ("forward", (128, 64, 8, 2)), ("forward", (128, 32, 8, 4)),
    ("queries", (64, 64, 4, 3)), ("queries", (128, 64, 8, 2)), ("queries", (128, 32, 8, 3)), ("queries", (64, 32, 4, 3)),
    ("keys", (32, 128, 8, 3)), ("keys", (64, 64, 4, 2)), ("keys", (32, 64, 4, 3)), ("keys", (64, 128, 8, 3)),
]  # fmt: skip


def by_kernels(window: int, changed: tuple[str, tuple[int, int, int, int]] | None = None) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        fused_attention.TILES.update(USUAL)
        if changed is not None:
            fused_attention.TILES[changed[0]] = fused_attention.Tile(*changed[1])
        return fused_attention.attention(query, key, value, window)

    return attend


def by_sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    """Whole causal attention alone."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            heads_first = (each.transpose(1, 2) for each in (query, key, value))
            return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    return attend


def measure(attend: Callable[..., Tensor], given: list[Tensor], keys: float, device: torch.device) -> dict[str, float]:
    out = attend(*given)
    pull = torch.randn_like(out)
    forward = seconds(lambda: attend(*given), device, CALLS, REPEATS)
    both = seconds(lambda: torch.autograd.grad(attend(*given), given, pull), device, CALLS, REPEATS)
    work = keys * given[0].shape[2] * HEAD_DIM * TOKENS
    return {
        "forward_us": forward * 1e6,
        "backward_us": (both - forward) * 1e6,
        "forward_flops": 4 * work / forward,
        "backward_flops": 10 * work / (both - forward),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tilings", action="store_true", help="all of FlexAttention's, not only its own choice")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    device, context = torch.device("cuda"), asked.context
    rates = machine_rates(device, torch.bfloat16, False, REPEATS)
    rows, found = TOKENS // context, []
    shapes = [(heads, window) for heads in (6, 10) for window in (context // 4, context)][
        : 1 if asked.tilings else None
    ]
    for heads, window in shapes:
        torch.manual_seed(0)
        shape = (rows, context, heads, HEAD_DIM)
        given = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        keys = sum(min(at + 1, window) for at in range(context)) / context
        tilings = TILINGS if asked.tilings else {"flex": {}}
        ways = {name: by_flex(options, context, window, device) for name, options in tilings.items()}
        ways["varlen"] = by_varlen(context, window, rows, device)
        if window == context:
            ways |= {
                f"sdpa, {each.name}": by_sdpa(each) for each in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
            }
        ways["ours"] = by_kernels(window)
        if asked.tilings:
            ways |= {f"ours, {name} {tile}": by_kernels(window, (name, tile)) for name, tile in OURS}
        for name, attend in ways.items():
            torch._dynamo.reset()
            try:
                row = {"way": name, "heads": heads, "window": window} | measure(attend, given, keys, device)
            except Exception as error:  # a tiling that does not fit, or an op that this build lacks: the others go on
                print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}")
                continue
            found.append(row)
            ratios = (row[f"{part}_flops"] / rates["matrix_flops"] for part in ("forward", "backward"))
            print(
                f"{heads:3} heads, window {window:5}, {name:24}: forward {row['forward_us']:7.0f} us, backward "
                f"{row['backward_us']:7.0f} us; of the rate {next(ratios):.1%} and {next(ratios):.1%}"
            )
    facts = rates | machine_facts(device, torch.bfloat16)
    print(json.dumps({"context": context, "tokens": TOKENS, "rows": found} | facts))


if __name__ == "__main__":
    main()
