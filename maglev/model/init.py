"""Initial weights. Each tensor draws from its own generator, keyed by seed and name: models that share a tensor's
name and shape start from the same numbers there, whatever else they hold."""

import hashlib

import torch
from torch import Tensor, nn


def generator_for(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def draw(name: str, like: Tensor, seed: int) -> Tensor:
    """Embedding N(0, 1), readout N(0, .001), gates and what writes to the residual stream 0, every other matrix uniform
    with standard deviation 1 / sqrt(inputs); residual scales 1, input scales 0.1."""
    leaf = name.rsplit(".", 2)[-2:]
    start = torch.empty(like.shape, dtype=torch.float32)
    generator = generator_for(seed, name)
    if leaf[-1] == "residual_scale":
        return start.fill_(1.0)
    if leaf[-1] == "input_scale":
        return start.fill_(0.1)
    if leaf[0] in ("local_gate", "memory_gate", "output_proj", "down_proj", "residual_proj"):
        return start.zero_()
    if leaf[0] == "embedding":
        return start.normal_(generator=generator)
    if leaf[0] == "readout":
        return start.normal_(std=0.001, generator=generator)
    bound = (3 / like.shape[1]) ** 0.5
    return start.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(draw(name, parameter, seed))
