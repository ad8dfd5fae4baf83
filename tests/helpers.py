"""What several test files share: small models whose weights are not those of the start, and batches of tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from maglev.config import ClosedMaglevConfig
from maglev.inference.fast_step import FastDecoder
from maglev.inference.stepper import EagerStepper
from maglev.model.decoder import Decoder
from maglev.model.init import generator_for
from maglev.model.memory import shift_right
from maglev.model.state import DecoderState
from maglev.objectives import Objective, build
from maglev.recipes import RECIPES

ALL_RECIPES = list(RECIPES)
MEMORY_RECIPES = [name for name in ALL_RECIPES if name.startswith(("lrt", "maglev"))]
PLAIN_RECIPES = [name for name in ALL_RECIPES if name not in MEMORY_RECIPES]
MAGLEV_RECIPES = [name for name in ALL_RECIPES if name.startswith("maglev")]
VOCAB = 61


def next_token_losses(recipe: str) -> float:
    """How many of them, by their weights, are in the total."""
    objective = RECIPES[recipe]().objective
    return 2 + objective.prefiller_weight if isinstance(objective, ClosedMaglevConfig) else 1


def random_weights(module: nn.Module, scale: float = 1.0, seed: int = 0) -> None:
    """Weights far from the start: output projections and gates are zero there, which hides nearly every mistake.

    Matrices get standard deviation scale / sqrt(inputs), residual and input scales something near 1 and 0.3.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator_for(seed, name), dtype=torch.float64)
            if name.endswith("residual_scale"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("input_scale"):
                parameter.copy_(0.3 + 0.2 * noise)
            elif name.endswith(("embedding.weight", "readout.weight")):
                parameter.copy_(noise)
            else:
                parameter.copy_(scale * noise / parameter.shape[1] ** 0.5)


def small(recipe: str, *, scale: float = 1.0, dtype: torch.dtype = torch.float64, **settings: Any) -> Objective:
    """An objective of a few thousand parameters with random weights, float64 where nothing else is said."""
    shape = {"depth": 3, "width": 32, "heads": 4, "context": 24, "window": 8, "vocab_size": VOCAB} | settings
    objective = build(recipe, **shape).to(dtype)
    random_weights(objective, scale)
    return objective


def random_tokens(batch: int, length: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def batch_of(batch: int, length: int, seed: int = 0, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Tokens and the targets that follow them."""
    row = random_tokens(batch, length + 1, seed, vocab)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def step_through(decoder: Decoder, tokens: Tensor) -> Tensor:
    """The decoder's own memories, stepped. (B, T) -> (B, T, D)"""
    state = decoder.initial_state(tokens.shape[0])
    memories = []
    with torch.no_grad():
        for slot in range(tokens.shape[1]):
            memory, state = decoder.step(tokens[:, slot], state)
            memories.append(memory)
    return torch.stack(memories, dim=1)


def assert_parallel_is_stepped(decoder: Decoder, lengths: Sequence[int]) -> None:
    """The recurrence identity: a pass over the shifted stepped memories gives the same memories."""
    tokens = random_tokens(2, max(lengths))
    stepped = step_through(decoder, tokens)
    for length in lengths:
        with torch.no_grad():
            parallel = decoder(tokens[:, :length], shift_right(stepped[:, :length]))
        torch.testing.assert_close(parallel, stepped[:, :length], rtol=0, atol=1e-10)


def assert_same_state(got: DecoderState, expected: DecoderState, bound: float) -> None:
    assert torch.equal(got.position, expected.position)
    pairs = [(got.memory, expected.memory), (got.older, expected.older)]
    for mine, other in zip(got.caches, expected.caches, strict=True):
        pairs += [(mine.key, other.key), (mine.value, other.value)]
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)


def changed_positions(before: Tensor, after: Tensor) -> list[int]:
    """Positions whose outputs are not bit-equal. (B, T, D) twice -> positions"""
    return (before != after).any(-1).any(0).nonzero()[:, 0].tolist()


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    """Of every parameter; zeros where the loss does not reach one."""
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameter) if grad is None else grad
        for name, parameter, grad in zip(names, parameters, found, strict=True)
    }


def watched(steps: Decoder | FastDecoder, tokens: Tensor) -> Tensor | None:
    """How far the memory gates stand open in each step, where there are any. (B, T) -> (B, T)"""
    stepper, found = EagerStepper(steps), []
    stepper.begin(steps.initial_state(tokens.shape[0]), watched=True)
    for token in tokens.T:
        stepper.step(token, watched=True)
        gates = stepper.gates()
        if gates is None:
            return None
        found.append(gates)
    return torch.stack(found, dim=1)
