"""Chunked, soft-capped cross-entropy and the consistency of two memories."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maglev.ops import reference
from maglev.ops.loss import IGNORED, cross_entropy
from maglev.ops.reference import consistency, softcap


def draw(count: int, width: int, vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    memory = scale * torch.randn(count, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, vocab, (count,), generator=generator)
    return memory.requires_grad_(), weight.requires_grad_(), targets


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 400))
def test_chunks_equal_the_definition_forward_and_gradients(count: int, vocab: int, chunk_logits: int) -> None:
    memory, weight, targets = draw(count, 5, vocab)
    nats = cross_entropy(memory, weight, targets, 15.0, chunk_logits)
    expected = reference.cross_entropy(memory, weight, targets, 15.0)
    torch.testing.assert_close(nats, expected, rtol=0, atol=1e-12)
    pull = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mine = torch.autograd.grad(nats, (memory, weight), pull)
    theirs = torch.autograd.grad(expected, (memory, weight), pull)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_the_definition_is_softmax_of_capped_logits() -> None:
    """Equation 3 of the paper, written with nothing but exp and log."""
    memory, weight, _ = draw(6, 5, 9)
    targets = torch.tensor([0, 8, 3, 3, 1, 7])
    logits = (memory @ weight.T).tolist()
    nats = reference.cross_entropy(memory, weight, targets, 15.0).tolist()
    for value, row, y in zip(nats, logits, targets.tolist(), strict=True):
        capped = [15 * math.tanh(o / 15) for o in row]
        assert value == pytest.approx(math.log(sum(map(math.exp, capped))) - capped[y], abs=1e-12)


def test_ignored_targets_cost_nothing_and_pull_nothing() -> None:
    memory, weight, targets = draw(12, 5, 9)
    targets[::2] = IGNORED
    nats = cross_entropy(memory, weight, targets, 15.0, 20)
    assert (nats[::2] == 0).all() and (nats[targets != IGNORED] > 0).all()
    pull = torch.autograd.grad(nats.sum(), memory)[0]
    assert (pull[::2] == 0).all() and (pull[targets != IGNORED] != 0).all()


def test_a_batch_keeps_its_shape() -> None:
    memory, weight, targets = draw(12, 5, 9)
    nats = cross_entropy(memory.view(3, 4, 5), weight, targets.view(3, 4), 15.0, 9)
    assert torch.equal(nats, cross_entropy(memory, weight, targets, 15.0, 9).view(3, 4))


def test_chunks_are_recomputed_rather_than_kept() -> None:
    """What autograd keeps for the backward pass is less than one tensor of all logits."""
    memory, weight, targets = draw(64, 4, 50)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        nats = cross_entropy(memory, weight, targets, 15.0, chunk_logits=100)
    assert nats.requires_grad and sum(kept.values()) < 64 * 50


def test_chunks_do_not_ask_for_the_state_of_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is recorded, that is refused."""

    def refuse() -> None:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(torch, "get_rng_state", refuse)
    memory, weight, targets = draw(12, 4, 7)
    cross_entropy(memory, weight, targets, 15.0, chunk_logits=14).sum().backward()


def test_without_gradients_the_chunks_give_the_same_numbers() -> None:
    memory, weight, targets = draw(33, 5, 9)
    with torch.no_grad():
        nats = cross_entropy(memory, weight, targets, 15.0, chunk_logits=30)
    torch.testing.assert_close(nats, reference.cross_entropy(memory, weight, targets, 15.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_soft_cap_bounds_logits_by_15_in_float32_or_better(dtype: torch.dtype) -> None:
    logits = torch.tensor([-1e4, -40.0, -1.0, 0.0, 1.0, 40.0, 1e4], dtype=dtype)
    capped = softcap(logits, 15.0)
    assert capped.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert capped.abs().max() <= 15
    assert capped[3] == 0 and (capped.diff() >= 0).all()
    torch.testing.assert_close(capped, 15 * torch.tanh(logits.to(capped.dtype) / 15), rtol=0, atol=0)


def test_low_precision_memories_give_float32_nats() -> None:
    memory, weight, targets = draw(7, 5, 9)
    assert cross_entropy(memory.bfloat16(), weight.float(), targets, 15.0).dtype == torch.float32


def memories(equal: list[int], count: int = 4, width: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    memory = torch.randn(count, width, generator=generator, dtype=torch.float64)
    target = torch.randn(count, width, generator=generator, dtype=torch.float64)
    target[equal] = memory[equal]
    return memory.requires_grad_(), target.requires_grad_()


@pytest.mark.parametrize("equal", [[], [1, 3], [0, 1, 2, 3]])
def test_consistency_gradients_agree_with_finite_differences(equal: list[int]) -> None:
    """Also where m = m' exactly: the norm is symmetric there, so its central difference is 0."""
    assert torch.autograd.gradcheck(consistency, memories(equal))


def test_consistency_is_the_scaled_norm() -> None:
    memory, target = memories([2])
    for value, m, t in zip(consistency(memory, target).tolist(), memory.tolist(), target.tolist(), strict=True):
        assert value == pytest.approx(math.dist(m, t) / math.sqrt(5), abs=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_consistency_of_equal_memories_is_zero_with_zero_gradient(dtype: torch.dtype) -> None:
    memory = torch.randn(3, 8, dtype=dtype).requires_grad_()
    target = memory.detach().clone().requires_grad_()
    value = consistency(memory, target)
    assert (value == 0).all() and value.dtype == torch.promote_types(dtype, torch.float32)
    for pull in torch.autograd.grad(value.sum(), (memory, target)):
        assert (pull == 0).all()


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-30, 1e6))
def test_consistency_gradients_are_finite_at_any_distance(distance: float) -> None:
    memory = torch.full((1, 4), distance, dtype=torch.float32).requires_grad_()
    (pull,) = torch.autograd.grad(consistency(memory, torch.zeros(1, 4)).sum(), memory)
    assert pull.isfinite().all() and pull.abs().max() <= 1


def test_consistency_in_bfloat16_is_taken_in_float32() -> None:
    memory, target = (tensor.bfloat16() for tensor in memories([]))
    expected = F.mse_loss(memory.float(), target.float(), reduction="none").mean(-1).sqrt()
    torch.testing.assert_close(consistency(memory, target), expected, rtol=1e-6, atol=0)
