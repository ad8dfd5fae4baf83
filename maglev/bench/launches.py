"""What the parts of a fused step cost, one kind of launch at a time: where a step's time goes."""

import torch
from torch import Tensor

from maglev.bench.clock import Work, graphed, seconds
from maglev.inference.fast_step import FastDecoder
from maglev.model.state import DecoderState

CALLS = 20


def launches(fast: FastDecoder, state: DecoderState, tokens: Tensor) -> tuple[dict[str, Work], dict[str, Work]]:
    """Each of a layer's launches, for all layers after one another, and each of those once per step."""
    steps, layers, rings, position = fast.steps, fast.layers, state.caches, state.position
    start, cos, sin = steps.begin_step(tokens, fast.embedding, position, fast.frequencies)
    features = None if fast.memory_weight is None else steps.project(state.memory, fast.memory_weight)
    first = layers[0]
    x, projected, mixed, _ = fast.enter(start, start, first, features)
    attended = steps.project_add(x, x, first.output)
    hidden = steps.norm_project_relu2(x, first.up)
    out, after = torch.empty_like(x), torch.empty_like(position)

    def ring_attend() -> None:
        for ring in rings:
            steps.ring_attend(
                projected, mixed, ring.key, ring.value, position, cos, sin, fast.arrivals, fast.config.heads
            )

    per_layer: dict[str, Work] = {
        "scale_norm_project": lambda: [
            steps.scale_norm_project(x, start, each.scales, each.stacked) for each in layers
        ],
        "ring_attend": ring_attend,
        "output project_add": lambda: [steps.project_add(x, attended, each.output) for each in layers],
        "norm_project_relu2": lambda: [steps.norm_project_relu2(x, each.up) for each in layers],
        "down project_add": lambda: [steps.project_add(x, hidden, each.down) for each in layers],
    }
    if first.stream is not None and features is not None and first.added is not None:
        added = features[:, first.added]
        all_logits = steps.scale_norm_project(start, start, first.scales, first.stream)[1]
        per_layer |= {
            "gates scale_norm_project": lambda: [
                steps.scale_norm_project(x, start, each.scales, each.stream) for each in layers if each.stream
            ],
            "gate_norm_project": lambda: [
                steps.gate_norm_project(x, added, all_logits, fast.config.heads, each.stacked) for each in layers
            ],
        }
        del per_layer["scale_norm_project"]
    per_step: dict[str, Work] = {
        "begin_step": lambda: steps.begin_step(tokens, fast.embedding, position, fast.frequencies),
        "finish_step": lambda: steps.finish_step(x, position, out, after),
        "read_out": lambda: fast.readout(state.memory),
    }
    return per_layer, per_step


def launch_times(fast: FastDecoder, state: DecoderState, tokens: Tensor, repeats: int) -> dict[str, float]:
    """Microseconds of every launch, by itself in a graph."""
    per_layer, per_step = launches(fast, state, tokens)
    times = {}
    for name, work in (per_layer | per_step).items():
        taken = seconds(graphed(work, tokens.device), tokens.device, CALLS, repeats)
        times[name] = round(taken * 1e6 / (len(fast.layers) if name in per_layer else 1), 3)
    return times


def tuning(fast: FastDecoder, state: DecoderState, tokens: Tensor, repeats: int) -> None:
    """Print microseconds per layer with other shapes of the kernels' programs than those in `ops`."""
    from maglev.ops import fused_product, fused_ring

    kept = {
        module: {name: getattr(module, name) for name in names}
        for module, names in (
            (fused_ring, ("WARPS", "TILE", "PROGRAMS")),
            (fused_product, ("VECTOR_ROWS", "PROGRAMS")),
        )
    }
    rings = [{"WARPS": w, "TILE": t * w, "PROGRAMS": p} for w in (1, 2) for t in (1024, 2048) for p in (512, 2048)]
    products = [{"VECTOR_ROWS": r, "PROGRAMS": p} for r in (2, 4, 8) for p in (132, 264, 528)]
    for module, choices in ((fused_ring, rings), (fused_product, products)):
        for choice in choices:
            for name, value in choice.items():
                setattr(module, name, value)
            work = launches(fast, state, tokens)[0]
            names = [name for name in work if (name == "ring_attend") == (module is fused_ring)]
            times = {name: seconds(graphed(work[name], tokens.device), tokens.device, CALLS, repeats) for name in names}
            shown = {name: round(value * 1e6 / len(fast.layers), 3) for name, value in times.items()}
            print(f"batch {tokens.shape[0]}: {choice | shown}")
        for name, value in kept[module].items():
            setattr(module, name, value)
