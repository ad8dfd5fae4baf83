from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from maglev.config import OptimizerConfig
from maglev.errors import RequestError
from maglev.train.optimizer import (
    POLAR_EXPRESS,
    POLAR_EXPRESS_SAFETY,
    Optimizer,
    adamw_update,
    apply_quintics,
    cautious_decay,
    even_out,
    frobenius_norm,
    gradient_of,
    muon_update,
    plain_decay,
    polar_express,
    shape_factor,
)
from maglev.train.param_groups import AdamWGroup, MuonGroup, ParamGroup, build_param_groups

SHAPES = [(6, 4), (4, 6), (5, 5), (16, 3)]


def newton_schulz(stack: Tensor) -> Tensor:
    """torch.optim.Muon's iteration."""
    return apply_quintics(stack / frobenius_norm(stack).clamp_min(1e-7), [(3.4445, -4.7750, 2.0315)] * 5)


def follow_torch_muon(start: Tensor, gradients: list[Tensor], orthogonalise: partial[Tensor]) -> tuple[Tensor, Tensor]:
    """A few steps of torch.optim.Muon and of ours, under the rules that both have."""
    theirs = nn.Parameter(start.clone())
    oracle = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.3, momentum=0.9)
    ours, momentum_buffer = start.clone()[None], torch.zeros_like(start)[None]
    for gradient in gradients:
        theirs.grad = gradient.clone()
        oracle.step()
        muon_update(
            ours,
            gradient[None],
            momentum_buffer,
            None,
            lr=0.05,
            momentum=0.9,
            # torch decays by the rate before the factor for the shape, we by the one after it.
            weight_decay=0.3 / shape_factor(*start.shape),
            beta2=None,
            orthogonalise=orthogonalise,
            decay=plain_decay,
        )
    return ours[0], theirs.detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_muon_agrees_with_torch(
    shape: tuple[int, int], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch iterates in bfloat16 always; its own code in full precision is the sharper oracle.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    torch.manual_seed(1)
    start, *gradients = torch.randn(6, *shape, dtype=dtype)
    ours, theirs = follow_torch_muon(start, gradients, partial(newton_schulz))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_agrees_with_torch_as_it_is_to_bfloat16(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    start, *gradients = torch.randn(6, *shape)
    ours, theirs = follow_torch_muon(start, gradients, partial(lambda stack: newton_schulz(stack.bfloat16()).float()))
    # Five steps of 0.05, each within a few percent of an entry of order one.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * 0.05 * 0.05)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar_express_is_nearly_orthogonal(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stack = torch.randn(7, *shape, dtype=dtype)
    result = polar_express(stack)
    assert result.dtype == dtype
    left, singular, right = torch.linalg.svd(stack, full_matrices=False)
    # Directions far below the largest are not brought to 1 by five steps.
    assert (singular.amin(1) / singular.amax(1)).min() > 1e-3
    torch.testing.assert_close(result, left @ right, rtol=0, atol=0.15)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.85 and values.max() < 1.15


def test_polar_express_of_zeros_is_zeros() -> None:
    assert polar_express(torch.zeros(2, 3, 4)).count_nonzero() == 0


def run_muon(parameter: Tensor, gradients: Tensor) -> Tensor:
    parameter = parameter.clone()
    momentum = torch.zeros_like(parameter)
    tall = parameter.size(1) >= parameter.size(2)
    second_moment = torch.zeros_like(parameter[:, :, :1] if tall else parameter[:, :1, :])
    for gradient in gradients:
        muon_update(parameter, gradient, momentum, second_moment, lr=0.02, momentum=0.9, weight_decay=0.1, beta2=0.95)
    return parameter


@pytest.mark.parametrize("shape", SHAPES)
def test_a_stack_is_updated_like_its_matrices_one_by_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    parameter, gradients = torch.randn(5, *shape), torch.randn(4, 5, *shape)
    alone = [run_muon(parameter[i : i + 1], gradients[:, i : i + 1]) for i in range(5)]
    torch.testing.assert_close(run_muon(parameter, gradients), torch.cat(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_second_moment_evens_out_and_keeps_the_norm(shape: tuple[int, int]) -> None:
    torch.manual_seed(3)
    tall = shape[0] >= shape[1]
    uneven = torch.logspace(-2, 0, shape[0])[:, None] if tall else torch.logspace(-2, 0, shape[1])
    second_moment = torch.zeros(2, shape[0], 1) if tall else torch.zeros(2, 1, shape[1])
    spread = []
    for _ in range(3):
        update = torch.randn(2, *shape) * uneven
        result = even_out(update, second_moment, beta2=0.5)
        torch.testing.assert_close(frobenius_norm(result), frobenius_norm(update))
        lengths = result.norm(dim=-1 if tall else -2)
        spread.append(lengths.amax() / lengths.amin())
    assert all(value < 10 for value in spread)


def test_cautious_decay_shrinks_only_where_the_update_does() -> None:
    parameter = torch.tensor([[[2.0, 2.0, -2.0, -2.0]]])
    update = torch.tensor([[[0.5, -0.5, -0.5, 0.5]]])
    assert cautious_decay(parameter, update).tolist() == [[[2.0, 0.0, -2.0, 0.0]]]

    stack = parameter.clone()
    zeros = torch.zeros_like(stack)
    muon_update(
        stack,
        zeros,
        zeros.clone(),
        None,
        lr=0.1,
        momentum=0.0,
        weight_decay=0.25,
        beta2=None,
        orthogonalise=lambda _: update,
    )
    expected = parameter - 0.1 * update - 0.1 * 0.25 * torch.tensor([[[2.0, 0.0, -2.0, 0.0]]])
    torch.testing.assert_close(stack, expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_agrees_with_torch(weight_decay: float, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    shapes = [(3, 4), (7,), ()]
    theirs = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    ours = [parameter.detach().clone() for parameter in theirs]
    means, squares = [torch.zeros_like(x) for x in ours], [torch.zeros_like(x) for x in ours]
    betas = (0.8, 0.95)
    oracle = torch.optim.AdamW(theirs, lr=0.01, betas=betas, eps=1e-10, weight_decay=weight_decay)
    for step in range(1, 8):
        gradients = [torch.randn(shape, dtype=dtype) for shape in shapes]
        for parameter, gradient in zip(theirs, gradients):
            parameter.grad = gradient.clone()
        oracle.step()
        adamw_update(
            ours,
            gradients,
            means,
            squares,
            step=step,
            lr=0.01,
            betas=betas,
            eps=1e-10,
            weight_decay=weight_decay,
        )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(ours, [x.detach() for x in theirs], rtol=0, atol=tolerance)


def toy_groups(device: str = "cpu") -> list[ParamGroup]:
    torch.manual_seed(5)
    shapes = {
        "embedding.weight": (10, 4),
        "blocks.0.up_proj.weight": (8, 4),
        "blocks.1.up_proj.weight": (8, 4),
        "blocks.0.down_proj.weight": (4, 8),
        "input_scale": (2,),
    }
    parameters = [(name, nn.Parameter(torch.randn(shape).to(device))) for name, shape in shapes.items()]
    return build_param_groups(parameters, OptimizerConfig(), 768, 12, 524_288)


def give_gradients(optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in optimizer.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


def take_steps(optimizer: Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        give_gradients(optimizer, step)
        optimizer.step(1.0 / (1 + step), 0.85 + 0.01 * step, 1.0 - 0.1 * step)
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in optimizer.parameters]


def test_optimizer_applies_the_update_functions() -> None:
    groups = toy_groups()
    matrix, embedding = groups[1], groups[0]
    assert isinstance(matrix, MuonGroup) and isinstance(embedding, AdamWGroup)
    stack = torch.stack([parameter.detach() for _, parameter in matrix.members[:2]])
    table = [embedding.members[0][1].detach().clone()]
    optimizer = Optimizer(groups)
    give_gradients(optimizer, 0)
    gradients = {id(parameter): gradient_of(parameter) for parameter in optimizer.parameters}
    stacked = torch.stack([gradients[id(parameter)] for _, parameter in matrix.members[:2]])
    optimizer.step(0.5, 0.9, 0.25)

    muon_update(
        stack,
        stacked,
        torch.zeros_like(stack),
        torch.zeros(2, 8, 1),
        lr=matrix.lr * 0.5,
        momentum=0.9,
        weight_decay=matrix.weight_decay * 0.25,
        beta2=0.95,
    )
    torch.testing.assert_close(
        stack, torch.stack([parameter.detach() for _, parameter in matrix.members[:2]]), rtol=0, atol=1e-7
    )
    gradient = [gradients[id(embedding.members[0][1])]]
    zeros = [[torch.zeros_like(table[0])] for _ in range(2)]
    adamw_update(table, gradient, *zeros, step=1, lr=embedding.lr * 0.5, betas=(0.8, 0.95), eps=1e-10)
    torch.testing.assert_close(table[0], embedding.members[0][1].detach(), rtol=0, atol=1e-7)


def test_a_group_may_begin_to_move_later() -> None:
    """Its moments begin at once: the second step is that of AdamW with both gradients."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = Optimizer([AdamWGroup("input_scale", (("scale", parameter),), 0.1, moves_at=2)])
    gradients = [torch.tensor([1e-6, -1e-6, 0.0]), torch.tensor([1e-3, 1e-3, -2e-3])]
    parameter.grad = gradients[0].clone()
    optimizer.step(1.0, 0.9, 0.0)
    assert torch.equal(parameter.detach(), torch.ones(3))
    parameter.grad = gradients[1].clone()
    optimizer.step(1.0, 0.9, 0.0)
    expected, zeros = [torch.ones(3)], [[torch.zeros(3)] for _ in range(2)]
    for step, lr in ((1, 0.0), (2, 0.1)):
        adamw_update(expected, [gradients[step - 1]], *zeros, step=step, lr=lr, betas=(0.8, 0.95), eps=1e-10)
    assert torch.equal(parameter.detach(), expected[0]) and (expected[0] != 1).all()


def test_same_gradients_give_the_same_bits() -> None:
    first, second = (take_steps(Optimizer(toy_groups()), range(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_state_goes_on_bit_for_bit() -> None:
    whole = take_steps(Optimizer(toy_groups()), range(6))

    groups = toy_groups()
    first = Optimizer(groups)
    take_steps(first, range(3))
    state = first.state_tensors()
    second = Optimizer(groups)
    second.load_state_tensors(state)
    assert second.steps == 3
    assert all(torch.equal(a, b) for a, b in zip(take_steps(second, range(3, 6)), whole))

    kinds = {name.split("/")[0] for name in state}
    assert kinds == {"step", "momentum", "second_moment", "adam_mean", "adam_square"}
    assert state["second_moment/blocks.0.up_proj.weight"].shape == (8, 1)
    assert state["second_moment/blocks.0.down_proj.weight"].shape == (1, 8)
    storages = [tensor.untyped_storage() for tensor in state.values()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert all(tensor.nbytes == tensor.untyped_storage().nbytes() for tensor in state.values())


def test_state_of_another_model_is_refused() -> None:
    optimizer = Optimizer(toy_groups())
    state = optimizer.state_tensors()
    with pytest.raises(RequestError, match=r"lacks 'adam_mean/embedding\.weight' \(1 names"):
        optimizer.load_state_tensors({k: v for k, v in state.items() if k != "adam_mean/embedding.weight"})
    with pytest.raises(RequestError, match="holds 'momentum/other'"):
        optimizer.load_state_tensors(state | {"momentum/other": torch.zeros(1)})
    with pytest.raises(RequestError, match=r"shape \(9, 4\) and this model needs \(8, 4\)"):
        optimizer.load_state_tensors(state | {"momentum/blocks.0.up_proj.weight": torch.zeros(9, 4)})


def test_a_parameter_that_never_had_a_gradient_stays() -> None:
    groups = toy_groups()
    optimizer = Optimizer(groups)
    before = [parameter.detach().clone() for parameter in optimizer.parameters]
    optimizer.step(1.0, 0.9, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.parameters))


def test_zero_grad() -> None:
    optimizer = Optimizer(toy_groups())
    give_gradients(optimizer, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in optimizer.parameters)
    optimizer.zero_grad()
    assert all(p.grad is None for p in optimizer.parameters)


def test_a_parameter_in_two_groups_is_refused() -> None:
    groups = toy_groups()
    with pytest.raises(AssertionError, match="two places"):
        Optimizer([*groups, groups[0]])


def test_compiled_rule_is_traced_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled = take_steps(Optimizer(toy_groups(), compiled=True), range(4))
    assert counter.frame_count == 2
    plain = take_steps(Optimizer(toy_groups()), range(4))
    torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-6)


def polar_express_in_bfloat16(matrix_stack: Tensor) -> Tensor:
    x = matrix_stack.bfloat16()
    x = x / (frobenius_norm(x) * POLAR_EXPRESS_SAFETY + 1e-6)
    return apply_quintics(x, POLAR_EXPRESS).to(matrix_stack.dtype)


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a.cpu() - b.cpu()).square().sum()) for a, b in zip(one, other, strict=True)) ** 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_is_as_close_to_float32_as_plain_bfloat16(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orthogonalising in bfloat16 moves the weights a little elsewhere; at most twice as far as on the CPU."""
    exact = take_steps(Optimizer(toy_groups()), range(4))
    cuda = take_steps(Optimizer(toy_groups("cuda"), compiled=compiled), range(4))
    assert muon_update.__kwdefaults__ is not None
    monkeypatch.setitem(muon_update.__kwdefaults__, "orthogonalise", polar_express_in_bfloat16)
    plain = take_steps(Optimizer(toy_groups()), range(4))
    assert distance(plain, exact) > 0
    assert distance(cuda, exact) <= 2 * distance(plain, exact)
