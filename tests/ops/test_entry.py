"""How a block begins, and the gradients of its two scales."""

import torch

from maglev.ops.entry import enter


def test_values_and_gradients_are_those_of_the_formula() -> None:
    draw = torch.Generator().manual_seed(0)
    x, start = torch.randn(2, 2, 5, 7, dtype=torch.float64, generator=draw)
    given = [x, start, torch.tensor(0.7, dtype=torch.float64), torch.tensor(-0.3, dtype=torch.float64)]
    for tensor in given:
        tensor.requires_grad_()
    assert torch.equal(enter(x, start, (given[2], given[3])), given[2] * x + given[3] * start)
    assert torch.autograd.gradcheck(lambda *inputs: enter(inputs[0], inputs[1], inputs[2:]), given)


def test_gradients_of_scales_are_summed_in_float32() -> None:
    """A sum of many bfloat16 products, one of them large: added up in bfloat16, the others would be lost."""
    x = torch.full((1, 64, 64), 2.0**-6, dtype=torch.bfloat16)
    x[0, 0, 0] = 256
    scale = torch.ones((), requires_grad=True)
    enter(x, x, (scale, scale)).sum().backward()
    assert scale.grad is not None and scale.grad.dtype == torch.float32
    assert float(scale.grad) == 2 * (256 + (64 * 64 - 1) * 2.0**-6)
