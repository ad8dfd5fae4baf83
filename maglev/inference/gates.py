"""How far the gates that let memory in stand open, token by token: into keys and values, or the residual stream."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from maglev.model.attention import Block
from maglev.model.decoder import Decoder
from maglev.model.memory import ResidualGate
from maglev.ops.inject import gate


def mean_gate(logits: list[Tensor]) -> Tensor | None:
    """g_rec, from 0 to 2, over all layers and heads. logits (B, G) of each layer -> (B,); None without layers"""
    if not logits:
        return None
    together = torch.stack(logits)  # (L, B, G)
    return gate(together.to(torch.promote_types(together.dtype, torch.float32))).mean((0, 2))


@contextmanager
def recorded_gates(decoder: Decoder) -> Iterator[list[Tensor]]:
    """The logits (B, G) of every layer's memory gate in the step made meanwhile; none where there are no such gates.

    For one thread: steps that another one makes of the same decoder would be among them.
    """
    logits: list[Tensor] = []

    def record(linear: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> None:
        logits.append(found[:, -1])

    with ExitStack() as hooks:
        for block in decoder.blocks:
            assert isinstance(block, Block)
            gates = block.attention.gates or (block.stream if isinstance(block.stream, ResidualGate) else None)
            if gates is not None:
                hooks.enter_context(gates.memory_gate.register_forward_hook(record))
            if isinstance(gates, ResidualGate) and gates.older is not None:
                hooks.enter_context(gates.older.memory_gate.register_forward_hook(record))
        yield logits
