"""What memory injection costs forward and backward, compiled and by the kernels of ops/fused_inject.py.

    python benchmarks/inject.py [--depth 12] [--rows 16] [--context 2048] [--device cuda|cpu]

Set beside the time that a copy takes for the bytes which must move. Training takes the
kernels in compiled blocks. The last line of stdout is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.bench.clock import machine_facts, seconds
from maglev.bench.limits import machine_rates
from maglev.model.layers import ALIGNED
from maglev.model_config import ModelConfig
from maglev.ops import inject
from maglev.ops.rotation import rotation, turn_frequencies
from maglev.recipes import run_config

CALLS, REPEATS = 10, 7


def inputs(model: ModelConfig, rows: int, context: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """One product's rows, the angles of the positions, and memory's keys and values."""
    columns = (model.heads + 2 * model.kv_heads) * model.head_dim + 2 * model.kv_heads
    features = (rows, context, model.kv_heads, model.head_dim)
    shapes = [(rows, context, columns + -columns % ALIGNED), features, features]
    packed, *memory = (torch.randn(*shape, device=device, dtype=dtype).requires_grad_() for shape in shapes)
    frequencies = turn_frequencies(model.head_dim, model.rope_base).to(device)
    return [packed, *rotation(torch.arange(context, device=device), frequencies, dtype), *memory]


def plainly(model: ModelConfig, packed: Tensor, cos: Tensor, sin: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
    sizes = [count * model.head_dim for count in (model.heads, model.kv_heads, model.kv_heads)]
    sizes += 2 * [model.kv_heads]
    *heads, local, remembered, _ = packed.split([*sizes, packed.shape[-1] - sum(sizes)], dim=-1)
    query, key, value = (each.unflatten(-1, (-1, model.head_dim)) for each in heads)
    return inject.inject(query, key, value, cos, sin, memory[0], memory[1], local, remembered)


def measure(op: Callable[..., Any], given: list[Tensor], device: torch.device) -> dict[str, float]:
    wanted = [tensor for tensor in given if tensor.requires_grad]
    outs = op(*given)
    gradients = [torch.randn_like(out) for out in outs]

    def both() -> None:
        torch.autograd.grad(op(*given), wanted, gradients)

    with torch.no_grad():
        forward = seconds(lambda: op(*given), device, CALLS, REPEATS)
    return {"forward_us": forward * 1e6, "forward_backward_us": seconds(both, device, CALLS, REPEATS) * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, standard in (("depth", 12), ("rows", 16), ("context", 2048)):
        parser.add_argument(f"--{name}", type=int, default=standard)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = run_config("maglev-shared-0.1", asked.depth).model
    given = inputs(model, asked.rows, asked.context, device, dtype)
    plain = partial(plainly, model)
    ways: dict[str, Callable[..., Any]] = {"plain": plain, "compiled": torch.compile(plain, dynamic=False)}
    if device.type == "cuda":
        from maglev.ops import fused_inject

        def fused(packed: Tensor, cos: Tensor, sin: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
            return fused_inject.inject(packed, cos, sin, (memory[0], memory[1]), model.heads, model.kv_heads)

        # within a graph, as in training: called plainly, a launch of the op costs the host more than the GPU
        ways["fused"] = torch.compile(fused, dynamic=False)
    rates = machine_rates(device, dtype, False, REPEATS)
    # forward reads all and writes queries, keys and values; backward reads all and their gradients, and writes its own
    size = [tensor.numel() * tensor.element_size() for tensor in given]
    moved = {"forward": sum(size) + size[0], "forward_backward": 3 * sum(size) + 2 * size[0]}
    result = vars(asked) | machine_facts(device, dtype) | rates
    result["copy_us"] = {name: count / rates["copy_bytes_per_s"] * 1e6 for name, count in moved.items()}
    result["ways"] = {name: measure(op, given, device) for name, op in ways.items()}
    for name, times in result["ways"].items():
        print(f"{name:>9}: " + ", ".join(f"{each} {value:,.0f}" for each, value in times.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
