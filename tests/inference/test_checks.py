"""What a caller hands in is refused before anything is read, with the value and the limit."""

import pytest
import torch

from maglev.errors import RequestError
from maglev.inference.checks import check_max_tokens, check_tokens


def test_ids_inside_of_the_vocabulary_pass() -> None:
    for dtype in (torch.int32, torch.int64):
        check_tokens(torch.tensor([[0, 60]], dtype=dtype), 61)
    check_tokens(torch.zeros(2, 0, dtype=torch.int64), 61)


@pytest.mark.parametrize("wrong", [-1, 61, 1 << 40])
def test_ids_outside_of_the_vocabulary_are_named(wrong: int) -> None:
    with pytest.raises(RequestError, match=f"token id {wrong} is outside of the vocabulary; ids go from 0 to 60"):
        check_tokens(torch.tensor([[3, 4], [5, wrong]]), 61)


@pytest.mark.parametrize("tokens", [torch.zeros(1, 2), torch.zeros(3, dtype=torch.int64), torch.ones(1, 2).bool()])
def test_what_is_no_batch_of_ids_is_refused(tokens: torch.Tensor) -> None:
    with pytest.raises(RequestError, match=r"whole numbers of shape \(B, T\)"):
        check_tokens(tokens, 61)


@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), "many", True, None])
def test_max_tokens_is_a_whole_number(value: object) -> None:
    with pytest.raises(RequestError, match=f"max_tokens is {value!r}"):
        check_max_tokens(value)  # type: ignore[arg-type]


def test_any_whole_number_of_tokens_passes() -> None:
    for value in (0, 1, 10**30):
        check_max_tokens(value)
