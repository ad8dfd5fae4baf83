"""Norm, gates and the mix of local and memory features."""

import pytest
import torch

from maglev.ops import reference
from maglev.ops.inject import gate, mix, rms_norm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rms_norm_equals_its_definition(dtype: torch.dtype) -> None:
    x = (10 * torch.randn(4, 3, 33, dtype=torch.float64)).to(dtype)
    normed = rms_norm(x)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, reference.rms_norm(x))
    sizes = normed.double().square().mean(-1)
    torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=1e-2, atol=0)


def test_rms_norm_of_zeros_is_zero_with_finite_gradient() -> None:
    """The memory before the first token is 0, and its key goes through this norm."""
    x = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    normed = rms_norm(x)
    assert (normed == 0).all()
    assert torch.autograd.grad(normed.sum(), x)[0].isfinite().all()


def test_the_gate_is_exactly_one_at_zero_and_stays_between_zero_and_two() -> None:
    values = gate(torch.tensor([-50.0, -1.0, 0.0, 1.0, 50.0]))
    assert values[2] == 1
    assert (values >= 0).all() and (values <= 2).all() and (values.diff() > 0).all()
    assert values[1] + values[3] == pytest.approx(2)


def test_the_mix_has_one_pair_of_gates_per_kv_head() -> None:
    local, memory = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    local_gate, memory_gate = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    mixed = mix(local, memory, local_gate, memory_gate)
    for b, t, g in [(0, 0, 0), (1, 2, 3), (1, 0, 2)]:
        expected = local_gate[b, t, g] * local[b, t, g] + memory_gate[b, t, g] * memory[b, t, g]
        torch.testing.assert_close(mixed[b, t, g], expected)
