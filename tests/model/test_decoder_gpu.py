"""The decoder on CUDA: the same function as on the CPU, parallel and stepped."""

import pytest
import torch

from maglev.model.memory import shift_right
from tests.helpers import batch_of, random_tokens, small, step_through

pytestmark = pytest.mark.gpu

SHAPE = {"depth": 2, "width": 128, "heads": 2, "kv_heads": 1, "window": 24, "context": 96}


@pytest.mark.parametrize("recipe", ["swa-ssss", "lrt-slsl", "maglev-shared-0.1", "maglev-separate-1"])
def test_losses_and_gradients_are_those_of_the_cpu(recipe: str) -> None:
    tokens, targets = batch_of(2, 96)
    here, there = (small(recipe, scale=0.5, dtype=torch.float32, **SHAPE) for _ in range(2))
    there.cuda()
    expected, got = here(tokens, targets), there(tokens.cuda(), targets.cuda())
    torch.testing.assert_close(got.total.cpu(), expected.total, rtol=1e-4, atol=1e-4)
    expected.total.backward()
    got.total.backward()
    for (name, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        if a.grad is not None:
            distance = (b.grad.cpu() - a.grad).norm() / (a.grad.norm() + 1e-6)
            assert distance < 1e-2, name


def test_the_recurrence_identity_holds_in_float32() -> None:
    decoder = small("maglev-shared-0.1", scale=0.5, dtype=torch.float32, **SHAPE).decoder.cuda()
    tokens = random_tokens(2, 90).cuda()
    stepped = step_through(decoder, tokens)
    with torch.no_grad():
        parallel = decoder(tokens, shift_right(stepped))
    torch.testing.assert_close(parallel, stepped, rtol=0, atol=2e-3)


def test_the_recurrence_identity_holds_in_float64() -> None:
    decoder = small("maglev-shared-0.1", **SHAPE).decoder.cuda()
    tokens = random_tokens(2, 90).cuda()
    stepped = step_through(decoder, tokens)
    with torch.no_grad():
        parallel = decoder(tokens, shift_right(stepped))
    torch.testing.assert_close(parallel, stepped, rtol=0, atol=1e-10)


@pytest.mark.parametrize("head_dim", [2, 8, 24, 96])
def test_small_and_odd_heads_work(head_dim: int) -> None:
    shape = SHAPE | {"width": 2 * head_dim, "kv_heads": 2}
    decoder = small("maglev-shared-0.1", scale=0.5, dtype=torch.float32, **shape).decoder
    tokens = random_tokens(1, 70)
    previous = torch.randn(1, 70, 2 * head_dim)
    expected = decoder(tokens, previous)
    got = decoder.cuda()(tokens.cuda(), previous.cuda())
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("offset", [10**7, 10**12])
def test_position_is_unbounded_here_too(offset: int) -> None:
    decoder = small("swa-ssss", dtype=torch.float32, **SHAPE).decoder.cuda()
    tokens = random_tokens(1, 100).cuda()

    def final(position: int) -> torch.Tensor:
        state = decoder.initial_state(1)
        state.position = state.position + position
        with torch.no_grad():
            for slot in range(100):
                memory = decoder.step_(tokens[:, slot], state)
        return memory

    torch.testing.assert_close(final(offset), final(0), rtol=0, atol=1e-5)
