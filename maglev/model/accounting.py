"""What a run costs, from its configuration alone: parameters, FLOPs, state bytes, the token budget. No torch."""

from typing import Any

from maglev.config import (
    ClosedMaglevConfig,
    LRTConfig,
    NextTokenConfig,
    RunConfig,
    SeparateMaglevConfig,
    SharedMaglevConfig,
    prefiller_config,
    sharing_of,
)
from maglev.model_config import MEMORY_SLOTS, ModelConfig, tile_windows

BYTES = {"float32": 4, "bfloat16": 2}
POSITION_BYTES = 8


def attention_matrices(config: ModelConfig) -> int:
    """q, k, v and output of one layer."""
    return 2 * config.width**2 + 2 * config.width * config.kv_heads * config.head_dim


def mlp_matrices(config: ModelConfig) -> int:
    return 8 * config.width**2


def block_matrices(config: ModelConfig) -> int:
    """Those of attention and MLP, of all layers."""
    return config.depth * (attention_matrices(config) + mlp_matrices(config))


def plain_parameters(config: ModelConfig) -> int:
    """Block matrices and readout: the count that sets the token budget of every row of the table."""
    return block_matrices(config) + config.vocab_size * config.width


def gate_parameters(config: ModelConfig) -> int:
    pair = 2 * config.kv_heads
    stream = config.heads * (1 + (config.delay > 1))
    gates = {"shared_kv": pair, "layer_kv": pair, "residual": stream, "layer_residual": stream}
    found = sum(gates.get(name, 0) for name in config.injections)
    return config.depth * found * config.width if config.memory == "kv" else 0


def memory_parameters(config: ModelConfig) -> int:
    """Matrices that memory brings beside its gates, shared or of every layer."""
    pair = 2 * config.width * config.kv_heads * config.head_dim
    # of the last memory, and with a delay of an older one
    stream = config.width**2 * (1 + (config.delay > 1))
    matrices = {
        "shared_kv": pair,
        "layer_kv": config.depth * pair,
        "slots": MEMORY_SLOTS * pair,
        "residual": stream,
        "layer_residual": config.depth * stream,
        "cross_attention": MEMORY_SLOTS * pair + config.depth * 2 * config.width**2,
        "tokens": pair,
    }
    return sum(matrices[name] for name in config.injections) if config.memory == "kv" else 0


def prefiller_parameters(config: RunConfig) -> int:
    """What a prefiller holds beside what it borrows from the decoder."""
    if isinstance(config.objective, SharedMaglevConfig):
        return 2 * config.model.depth
    if isinstance(config.objective, SeparateMaglevConfig) and config.objective.prefiller_from:
        return config.objective.prefiller_width * config.model.width
    if isinstance(config.objective, SeparateMaglevConfig):
        prefiller = prefiller_config(config.model, config.objective)
        sharing = sharing_of(config.model, config.objective)
        borrowed = len(sharing.attention) * attention_matrices(prefiller) + len(sharing.mlp) * mlp_matrices(prefiller)
        embedding = 0 if sharing.embedding else config.model.vocab_size * prefiller.width
        bridges = bridge_parameters(config.model, config.objective)
        return block_matrices(prefiller) - borrowed + 2 * prefiller.depth + embedding + bridges
    return 0


def bridge_parameters(model: ModelConfig, objective: SeparateMaglevConfig) -> int:
    """The matrices that lead from a shared embedding into a Q of another width, and out of it."""
    width = prefiller_config(model, objective).width
    count = 1 + sharing_of(model, objective).embedding if width != model.width else 0
    return count * width * model.width


def attended_keys(windows: tuple[int, ...], context: int) -> float:
    """Keys per query, averaged over the positions of a context, summed over layers."""
    total = 0.0
    for window in windows:
        w = min(window, context)
        total += (w * (w + 1) / 2 + (context - w) * w) / context
    return total


def memory_slots(config: ModelConfig) -> int:
    """Keys that a position sees beside those of its windows, summed over layers."""
    return config.depth * MEMORY_SLOTS * len({"slots", "cross_attention"} & {*config.injections})


def stack_flops(config: ModelConfig, windows: tuple[int, ...]) -> float:
    """Forward FLOPs per token of a stack without memory: 2 per matrix weight, 4 x width per attended key."""
    return 2 * block_matrices(config) + 4 * config.width * attended_keys(windows, config.context)


def decoder_flops(config: ModelConfig) -> float:
    """Forward FLOPs per token of P, readout included; 0 for lookups, norms and elementwise work."""
    return pass_flops(config, 0, config.context) / config.context + 2 * config.vocab_size * config.width


def pass_flops(config: ModelConfig, first: int, count: int) -> float:
    """FLOPs of one pass of P over positions `first` to `first + count - 1` of a text, without the readout.

    A position counts the keys that its windows hold, not those that a kernel touches and masks.
    """

    def keys_before(position: int) -> float:
        return position * attended_keys(config.windows, position) if position else 0.0

    matrices = block_matrices(config) + gate_parameters(config) + memory_parameters(config)
    keys = config.entries * (keys_before(first + count) - keys_before(first)) + memory_slots(config) * count
    return 2 * matrices * count + 4 * config.width * keys


def objective_flops(config: RunConfig) -> float:
    """Forward FLOPs per token of one training step; forward and backward together cost three times that."""
    model, objective = config.model, config.objective
    forward = decoder_flops(model)
    if isinstance(objective, NextTokenConfig):
        return forward
    if isinstance(objective, LRTConfig):
        # interleaved: one full pass, then S passes over 1/S of the positions each
        return forward * (2 if objective.schedule == "interleaved" else objective.passes)
    if isinstance(objective, ClosedMaglevConfig):
        # P on Q's memories and, as soon as it does, on its own, and Q's readout
        forward += forward * objective.own_passes
        forward += 2 * model.vocab_size * model.width * (objective.prefiller_weight > 0)
    if isinstance(objective, SharedMaglevConfig):
        windows = tile_windows(objective.prefiller_pattern, model.depth, model.window, model.context)
        return forward + stack_flops(model, windows)
    if objective.prefiller_from:
        # as if it were a Transformer of that depth and width; it has no backward
        depth, width = objective.prefiller_depth, objective.prefiller_width
        frozen = depth * (24 * width**2 + 4 * width * attended_keys((model.context,), model.context))
        return forward + frozen / 3 + 2 * prefiller_parameters(config)
    prefiller = prefiller_config(model, objective)
    return forward + stack_flops(prefiller, prefiller.windows) + 2 * bridge_parameters(model, objective)


def state_nbytes(config: ModelConfig, element_size: int) -> int:
    """Bytes per sequence: K and V of every layer's window, the memory vector (with a delay so many of them), the
    position."""
    slots = 2 * config.entries * sum(config.windows) * config.kv_heads * config.head_dim
    return (slots + config.delay * config.width) * element_size + POSITION_BYTES


def full_attention_nbytes(config: ModelConfig, length: int, element_size: int) -> int:
    """What the same stack would keep after `length` tokens if every layer kept every key and value."""
    return 2 * config.depth * length * config.kv_heads * config.head_dim * element_size


def training_steps(config: RunConfig) -> int:
    """`train.steps`, or what the token budget gives."""
    if config.train.steps:
        return config.train.steps
    budget = config.train.tokens_per_parameter * plain_parameters(config.model)
    return max(1, round(budget / config.train.tokens_per_step))


def describe(config: RunConfig) -> dict[str, Any]:
    model = config.model
    plain = plain_parameters(model)
    embedding = model.vocab_size * model.width
    extra = gate_parameters(model) + memory_parameters(model) + 2 * model.depth
    steps = training_steps(config)
    return {
        "recipe": config.recipe,
        "depth": model.depth,
        "width": model.width,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "context": model.context,
        "windows": list(model.windows),
        "plain_reach": model.plain_reach,
        "injection": model.injection if model.memory != "none" else "none",
        "delay": model.delay,
        "parameters": {
            "plain": plain,
            "blocks": block_matrices(model),
            "readout": embedding,
            "embedding": embedding,
            "memory_projections": memory_parameters(model),
            "gates": gate_parameters(model),
            "scales": 2 * model.depth,
            "deployed": plain + embedding + extra,
            "prefiller": prefiller_parameters(config),
            "trained": plain + embedding + extra + prefiller_parameters(config),
        },
        "flops_per_token": {
            "decoder_forward": round(decoder_flops(model)),
            "training": round(3 * objective_flops(config)),
        },
        "state_bytes": {name: state_nbytes(model, size) for name, size in BYTES.items()},
        "steps": steps,
        "tokens_per_step": config.train.tokens_per_step,
        "tokens": steps * config.train.tokens_per_step,
    }
