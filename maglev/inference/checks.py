"""What a caller hands in, checked before anything is read or written."""

import torch
from torch import Tensor

from maglev.errors import RequestError


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Ids (B, T) inside of the vocabulary. On a GPU a wrong one would be an assertion far from its cause."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise RequestError(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; they must be whole numbers of shape (B, T)"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise RequestError(
            f"token id {int(outside[0])} is outside of the vocabulary; ids go from 0 to {vocab_size - 1:,}"
        )


def check_max_tokens(max_tokens: int) -> None:
    if not isinstance(max_tokens, int) or max_tokens < 0:
        raise RequestError(f"max_tokens is {max_tokens}; it must be a whole number and not negative")
