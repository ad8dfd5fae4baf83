"""The kernel of the training loss against its definition; `test_fused_loss.py` runs this file."""

import pytest
import torch
from torch import Tensor

from maglev.ops import fused_loss, reference
from tests.kernel_cases import DEVICE, INTERPRETED, poisoned_memory, round_like_the_gpu

__all__ = ["poisoned_memory"]

if INTERPRETED:
    round_like_the_gpu()

CAP = 15.0
# rows, width, vocabulary, logits of a chunk: below, at and beyond a block of columns and a chunk of rows
SHAPES = [(1, 8, 1, 100), (7, 8, 33, 100), (12, 16, 64, 256), (5, 8, 4097, 9000), (30, 24, 100, 1000)]


def draw(rows: int, width: int, vocab: int, dtype: torch.dtype, scale: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """What bfloat16 holds, in whatever precision; some targets are padding, some unscored."""
    generator = torch.Generator().manual_seed(rows)
    memory = (scale * torch.randn(rows, width, generator=generator)).bfloat16().to(DEVICE, dtype)
    weight = torch.randn(vocab, width, generator=generator).bfloat16().to(DEVICE, torch.float32)
    targets = torch.randint(-2, vocab, (rows,), generator=generator)
    targets[0] = vocab - 1
    return memory.requires_grad_(), weight.requires_grad_(), targets.to(DEVICE)


def defined(memory: Tensor, weight: Tensor, targets: Tensor, cap: float = CAP) -> Tensor:
    return reference.cross_entropy(memory, weight, targets, cap).sum() / (targets >= 0).sum().clamp_min(1)


def with_gradients(loss: Tensor, memory: Tensor, weight: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(3 * loss, (memory, weight))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_equals_the_definition(shape: tuple[int, int, int, int]) -> None:
    *sizes, chunk = shape
    given = draw(*sizes, torch.float32)
    got = with_gradients(fused_loss.mean_nats(*given, CAP, chunk), *given[:2])
    for mine, theirs in zip(got, with_gradients(defined(*given), *given[:2]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_is_at_most_twice_as_far_as_plain_bfloat16(shape: tuple[int, int, int, int]) -> None:
    *sizes, chunk = shape
    narrow = draw(*sizes, torch.bfloat16)
    wide = draw(*sizes, torch.float32)
    got = with_gradients(fused_loss.mean_nats(*narrow, CAP, chunk), *narrow[:2])
    plain = with_gradients(defined(*narrow), *narrow[:2])
    truth = with_gradients(defined(*wide), *wide[:2])
    for mine, theirs, right in zip(got, plain, truth, strict=True):
        floor = 1e-6 + 2**-9 * right.abs().max()
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + floor


def test_no_target_costs_nothing_and_pulls_nothing() -> None:
    memory, weight, targets = draw(6, 8, 40, torch.bfloat16)
    loss, *slopes = with_gradients(
        fused_loss.mean_nats(memory, weight, targets.clamp_max(-1), CAP, 100), memory, weight
    )
    assert loss == 0 and all((slope == 0).all() for slope in slopes)


@pytest.mark.parametrize("cap", [0.5, fused_loss.LARGEST_CAP])
def test_logits_far_beyond_the_cap_stay_finite(cap: float) -> None:
    given = draw(9, 16, 50, torch.float32, scale=1e4)
    got = with_gradients(fused_loss.mean_nats(*given, cap, 200), *given[:2])
    for mine, theirs in zip(got, with_gradients(defined(*given, cap), *given[:2]), strict=True):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_all_logits_at_the_lower_cap() -> None:
    """The sum of exponentials is then as small as it gets."""
    memory, weight, targets = draw(4, 8, 64, torch.float32)
    weight = torch.full_like(weight, -1e3).requires_grad_()
    memory = memory.detach().abs().requires_grad_()
    got = fused_loss.mean_nats(memory, weight, targets, fused_loss.LARGEST_CAP, 100)
    torch.testing.assert_close(got, defined(memory, weight, targets, fused_loss.LARGEST_CAP), rtol=1e-4, atol=1e-4)


def test_what_is_not_a_number_shows() -> None:
    memory, weight, targets = draw(6, 8, 40, torch.float32)
    broken = memory.detach().clone()
    broken[0, 0] = float("nan")
    assert fused_loss.mean_nats(broken.requires_grad_(), weight, targets, CAP, 100).isnan()
