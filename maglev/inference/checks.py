"""What a caller hands in, checked before anything is read or written."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maglev.errors import RequestError


def is_whole(value: object) -> bool:
    """True is 1 to Python, and hardly what was meant where a number is asked for."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def items_of(name: str, values: Iterable[Any], what: str) -> list[Any]:
    """Those of any iterable but a text, whose items would be its characters."""
    if isinstance(values, str | bytes):
        raise RequestError(f"{name} is one {type(values).__name__}; give a list of {what}")
    try:
        return list(values)
    except TypeError:
        raise RequestError(f"{name} is a {type(values).__name__}; give a list of {what}") from None


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Ids (B, T) inside of the vocabulary. On a GPU a wrong one would be an assertion far from its cause."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise RequestError(
            f"tokens are {tokens.dtype} of shape {tuple(tokens.shape)}; they must be whole numbers of shape (B, T)"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise outside_of_vocabulary(int(outside[0]), vocab_size)


def outside_of_vocabulary(token: object, vocab_size: int) -> RequestError:
    return RequestError(f"token id {token} is outside of the vocabulary; ids go from 0 to {vocab_size - 1:,}")


def token_ids(tokens: Iterable[int], vocab_size: int) -> Tensor:
    """Ids inside of the vocabulary, (T,). They are looked at before PyTorch rounds them or finds them too large."""
    ids = items_of("tokens", tokens.tolist() if isinstance(tokens, Tensor) else tokens, "token ids")
    for token in ids:
        if not is_whole(token):
            raise RequestError(f"token id {token!r} is no whole number; ids go from 0 to {vocab_size - 1:,}")
        if not 0 <= token < vocab_size:
            raise outside_of_vocabulary(token, vocab_size)
    return torch.tensor(ids, dtype=torch.int64)


def check_max_tokens(max_tokens: int) -> None:
    if not is_whole(max_tokens) or max_tokens < 0:
        raise RequestError(f"max_tokens is {max_tokens!r}; it must be a whole number and not negative")


def check_text(name: str, text: str) -> None:
    """A text that UTF-8 can carry: a lone surrogate would be read as another character than the one given."""
    if not isinstance(text, str):
        raise RequestError(f"{name} is a {type(text).__name__}; it must be a text (str)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 text (character {error.start:,} is a lone surrogate); give text that UTF-8 can encode"
        ) from None
