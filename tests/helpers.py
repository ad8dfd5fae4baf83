"""What several test files share: small models whose weights are not those of the start, and batches of tokens."""

from typing import Any

import torch
from torch import Tensor, nn

from maglev.model.decoder import Decoder
from maglev.model.init import generator_for
from maglev.objectives import Objective, build
from maglev.recipes import RECIPES

ALL_RECIPES = list(RECIPES)
MEMORY_RECIPES = [name for name in ALL_RECIPES if name.startswith(("lrt", "maglev"))]
PLAIN_RECIPES = [name for name in ALL_RECIPES if name not in MEMORY_RECIPES]
MAGLEV_RECIPES = [name for name in ALL_RECIPES if name.startswith("maglev")]
VOCAB = 61


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
