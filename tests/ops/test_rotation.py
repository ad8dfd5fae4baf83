"""Rotary positions: the textbook's angles where floating point can still say them, exact differences beyond."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maglev.ops.inject import rotate
from maglev.ops.rotation import rotation, turn_frequencies

HEAD_DIM, BASE = 16, 10_000.0
FREQUENCIES = turn_frequencies(HEAD_DIM, BASE)


def textbook(x: Tensor, position: int, base: float = BASE) -> Tensor:
    """Pair i, (x_i, x_{i + half}), turns by -position * base^(-2i / head_dim)."""
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = position * base ** (-2 * i / x.shape[-1])
        cos, sin = math.cos(angle), math.sin(angle)
        out[..., i] = x[..., i] * cos + x[..., i + half] * sin
        out[..., i + half] = x[..., i + half] * cos - x[..., i] * sin
    return out


def at(positions: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return rotation(torch.tensor(positions), FREQUENCIES, dtype)


@pytest.mark.parametrize(
    ("head_dim", "base"), [(2, 10_000.0), (16, 10_000.0), (64, 100_000.0), (128, 10_000.0), (6, 1.5)]
)
def test_agrees_with_the_textbook_at_small_positions(head_dim: int, base: float) -> None:
    positions = [0, 1, 2, 3, 17, 500, 2047, 10_000]
    x = torch.randn(len(positions), 3, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, *rotation(torch.tensor(positions), turn_frequencies(head_dim, base), torch.float64))
    expected = torch.stack([textbook(row, position, base) for row, position in zip(x, positions, strict=True)])
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-10)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**15), st.integers(0, 4096))
def test_scores_depend_on_the_distance_alone(position: int, distance: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 1, 1, HEAD_DIM, dtype=torch.float64, generator=generator)

    def score(first: int) -> Tensor:
        return (rotate(query[None], *at([first + distance])) * rotate(key[None], *at([first]))).sum()

    torch.testing.assert_close(score(position), score(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", [10**7, 10**12, 10**15])
def test_far_positions_match_exact_arithmetic(position: int) -> None:
    """The frequency is a rounded number of turns; its product with the position is not rounded again."""
    cos, sin = at([position])
    for pair, frequency in enumerate(FREQUENCIES.tolist()):
        angle = 2 * math.pi * ((position * frequency) % 2**64) / 2**64
        assert float(cos[0, 0, pair]) == pytest.approx(math.cos(angle), abs=1e-12)
        assert float(sin[0, 0, pair]) == pytest.approx(math.sin(angle), abs=1e-12)


def test_the_frequencies_are_those_of_the_base() -> None:
    turns = [frequency / 2**64 for frequency in FREQUENCIES.tolist()]
    expected = [BASE ** (-2 * pair / HEAD_DIM) / (2 * math.pi) for pair in range(HEAD_DIM // 2)]
    assert turns == pytest.approx(expected, rel=1e-15)


def test_a_rotation_keeps_lengths_and_position_zero_changes_nothing() -> None:
    x = torch.randn(2, 3, HEAD_DIM, dtype=torch.float64)
    assert torch.equal(rotate(x, *at([0, 0])), x)
    turned = rotate(x, *at([12345, 10**14]))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "angles"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_angles_are_float32_or_better_and_features_keep_their_dtype(dtype: torch.dtype, angles: torch.dtype) -> None:
    cos, sin = at([5], dtype)
    assert cos.dtype == sin.dtype == angles
    assert rotate(torch.ones(1, 2, HEAD_DIM, dtype=dtype), cos, sin).dtype == dtype


def test_float32_angles_at_ten_million_are_as_good_as_at_zero() -> None:
    exact, rounded = at([10**7 + 3]), at([10**7 + 3], torch.float32)
    for a, b in zip(exact, rounded, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0, atol=1e-7)


def test_rows_of_positions_broadcast_over_heads() -> None:
    positions = torch.tensor([[0, 1], [7, 9]])
    cos, _ = rotation(positions, FREQUENCIES, torch.float64)
    assert cos.shape == (2, 2, 1, HEAD_DIM // 2)
    assert torch.equal(cos[1, 0], at([7])[0][0])
