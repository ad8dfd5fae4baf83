"""Muon for matrices and AdamW for the rest: plain update functions, and one class for any number of ranks.

The update functions hold no state: they change the tensors they are given and return nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from maglev.checkpoint import Part, Readable
from maglev.errors import RequestError
from maglev.train.distributed import gather_stack, rank_and_world
from maglev.train.param_groups import AdamWGroup, MuonGroup, ParamGroup
from maglev.train.sharding import RowExchange, is_sharded, local, own_rows, split_rows
from maglev.train.speed import no_collections

Scalar = float | Tensor
Coefficients = tuple[float, float, float]

# Amsel et al., "The Polar Express" (arXiv 2505.16932): five steps, safety factor 1.02, cushion 2.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_SAFETY = 1.02

# A graph per shape of stack; the default limit of the compiler is below what a separate prefiller needs.
COMPILED_SHAPES = 64


def apply_quintics(matrices: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """X <- aX + (bA + cA^2)X with A = XX^T for each (a, b, c), on the shorter side of (N, R, C)."""
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    for a, b, c in coefficients:
        gram = x @ x.mT  # (N, S, S), S the shorter side
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def frobenius_norm(matrices: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)  # (N, 1, 1)


def polar_express(matrix_stack: Tensor, steps: int = 5) -> Tensor:
    """Nearly the orthogonal factor of each matrix of an (N, R, C) stack, in the stack's dtype."""
    dtype = torch.promote_types(matrix_stack.dtype, torch.float32)
    if matrix_stack.is_cuda and dtype == torch.float32:
        dtype = torch.bfloat16
    x = matrix_stack.to(dtype)
    x = x / (frobenius_norm(x) * POLAR_EXPRESS_SAFETY + 1e-6)
    return apply_quintics(x, POLAR_EXPRESS[:steps]).to(matrix_stack.dtype)


def nesterov(gradient: Tensor, momentum_buffer: Tensor, momentum: Scalar) -> Tensor:
    momentum_buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp(momentum_buffer, momentum)


def second_moment_axis(rows: int, columns: int) -> int:
    """The axis averaged away: one second moment per row, or per column of a wide matrix."""
    return -1 if rows >= columns else -2


def even_out(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Divide each row (column) by the root of its second moment, then restore the norm of each matrix."""
    axis = second_moment_axis(*update.shape[-2:])
    power = update.square().mean(axis, keepdim=True)  # (N, R, 1) or (N, 1, C)
    second_moment.lerp_(power, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm_ratio = power.sum((-2, -1), keepdim=True).sqrt() / (
        (power * scale.square()).sum((-2, -1), keepdim=True).sqrt().clamp_min(1e-10)
    )
    return update * (scale * norm_ratio)


def plain_decay(parameter: Tensor, update: Tensor) -> Tensor:
    return parameter


def cautious_decay(parameter: Tensor, update: Tensor) -> Tensor:
    """The part of the parameter that decays: where the update shrinks it already (same sign)."""
    return parameter * (update * parameter >= 0)


def shape_factor(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))


def muon_update(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor,
    second_moment: Tensor | None,
    *,
    lr: Scalar,
    momentum: Scalar,
    weight_decay: Scalar,
    beta2: float | None,
    orthogonalise: Callable[[Tensor], Tensor] = polar_express,
    decay: Callable[[Tensor, Tensor], Tensor] = cautious_decay,
) -> None:
    """One Muon step for a stack of matrices (N, R, C); `beta2=None` leaves the second moment out."""
    update = muon_direction(
        gradient, momentum_buffer, second_moment, momentum=momentum, beta2=beta2, orthogonalise=orthogonalise
    )
    lr = lr * shape_factor(*parameter.shape[-2:])
    descend(parameter, update, lr=lr, weight_decay=weight_decay, decay=decay)


def muon_direction(
    gradient: Tensor,
    momentum_buffer: Tensor,
    second_moment: Tensor | None,
    *,
    momentum: Scalar,
    beta2: float | None,
    orthogonalise: Callable[[Tensor], Tensor] = polar_express,
) -> Tensor:
    """The part of a step that needs whole matrices (N, R, C)."""
    update = orthogonalise(nesterov(gradient, momentum_buffer, momentum))
    if beta2 is None:
        return update
    assert second_moment is not None
    return even_out(update, second_moment, beta2)


def descend(
    parameter: Tensor,
    update: Tensor,
    *,
    lr: Scalar,
    weight_decay: Scalar,
    decay: Callable[[Tensor, Tensor], Tensor] = cautious_decay,
) -> None:
    """The part of a step that takes any rows of the matrices."""
    parameter.sub_(lr * (update + weight_decay * decay(parameter, update)))


def adamw_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
) -> None:
    """One AdamW step for a list of tensors; `step` counts from 1."""
    beta1, beta2 = betas
    if weight_decay:
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, math.sqrt(1 - beta2**step))
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(parameters, means, denominators, -lr / (1 - beta1**step))


class Rules:
    """What a Muon step computes, compiled or not."""

    def __init__(self, compiled: bool) -> None:
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = compile_rule if compiled else lambda rule: rule
        self.update, self.direction, self.descend = wrap(muon_update), wrap(muon_direction), wrap(descend)


class MuonStack:
    """Matrices of one shape; rank r updates the r-th share of them and keeps the state of no other."""

    def __init__(self, group: MuonGroup, members: Sequence[tuple[str, Tensor]]) -> None:
        rank, world = rank_and_world()
        self.group = group
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        count = len(members)
        self.share = -(-count // world)
        owned = split_rows(count, world)
        self.owned = slice(owned[rank].start, owned[rank].stop)

        first = self.parameters[0]
        rows, columns = first.shape
        reduced = (rows, 1) if second_moment_axis(rows, columns) == -1 else (1, columns)
        self.momentum = local(first).new_zeros(len(owned[rank]), rows, columns)
        self.second_moment = local(first).new_zeros(len(owned[rank]), *reduced)
        self.exchange = RowExchange(rows, columns, owned) if is_sharded(first) else None

    def update(self, rules: Rules, lr: float, momentum: float, weight_decay: float) -> None:
        # 0-d tensors: a compiled rule takes their values as they come
        rates = {"lr": self.momentum.new_full((), lr), "weight_decay": self.momentum.new_full((), weight_decay)}
        changing = {"momentum": self.momentum.new_full((), momentum), "beta2": self.group.beta2}
        if self.exchange is not None:
            self.update_rows(self.exchange, rules, rates, changing)
            return
        owned = self.parameters[self.owned]
        stacked = torch.empty_like(self.momentum)  # (owned, R, C)
        if owned:
            torch.stack(owned, out=stacked)
            gradients = torch.stack([gradient_of(parameter) for parameter in owned])
            rules.update(stacked, gradients, self.momentum, self.second_moment, **rates, **changing)
        torch._foreach_copy_(self.parameters, list(self.gather(stacked)))

    def update_rows(self, exchange: RowExchange, rules: Rules, rates: dict[str, Any], changing: dict[str, Any]) -> None:
        """Gradients go to the owners of the matrices, directions come back; weights stay where their rows are."""
        direction = exchange.to_owners([local(gradient_of(parameter)) for parameter in self.parameters])
        if len(direction):
            direction = rules.direction(direction, self.momentum, self.second_moment, **changing)
        rows = exchange.from_owners(direction)  # (N, rows, C)
        if rows.numel():
            weights = [local(parameter) for parameter in self.parameters]
            stacked = torch.stack(weights)
            rates["lr"] *= shape_factor(*self.parameters[0].shape)
            rules.descend(stacked, rows, **rates)
            torch._foreach_copy_(weights, list(stacked))

    def gather(self, owned: Tensor) -> Tensor:
        """This rank's part (owned, ...) to the whole (N, ...)."""
        missing = self.share - owned.size(0)
        padded = torch.cat([owned, owned.new_zeros(missing, *owned.shape[1:])]) if missing else owned
        return gather_stack(padded)[: len(self.parameters)]

    def state(self) -> dict[str, Part]:
        """This rank's part of the state, by name: views to copy from or into."""
        own = self.names[self.owned]
        tensors = {f"momentum/{name}": tensor for name, tensor in zip(own, self.momentum)}
        tensors |= {f"second_moment/{name}": tensor for name, tensor in zip(own, self.second_moment)}
        return {name: Part(tensor, 0, tuple(tensor.shape)) for name, tensor in tensors.items()}

    def whole_state(self) -> dict[str, Tensor]:
        """The state of all ranks, by name."""
        momentum, second_moment = self.gather(self.momentum), self.gather(self.second_moment)
        tensors = {f"momentum/{name}": tensor for name, tensor in zip(self.names, momentum)}
        return tensors | {f"second_moment/{name}": tensor for name, tensor in zip(self.names, second_moment)}


class AdamWTensors:
    """Parameters of one AdamW group; every rank updates what it holds: all of them alike, or its rows of them."""

    def __init__(self, group: AdamWGroup) -> None:
        self.group = group
        self.names = [name for name, _ in group.members]
        self.parameters: list[Tensor] = [parameter for _, parameter in group.members]
        self.means = [torch.zeros_like(local(parameter), requires_grad=False) for parameter in self.parameters]
        self.squares = [torch.zeros_like(local(parameter), requires_grad=False) for parameter in self.parameters]

    def update(self, step: int, lr: float) -> None:
        gradients = [local(gradient_of(parameter)) for parameter in self.parameters]
        adamw_update(
            [local(parameter) for parameter in self.parameters],
            gradients,
            self.means,
            self.squares,
            step=step,
            lr=lr if step >= self.group.moves_at else 0.0,
            betas=self.group.betas,
            eps=self.group.eps,
        )

    def state(self) -> dict[str, Part]:
        parts = {}
        for kind, tensors in (("adam_mean", self.means), ("adam_square", self.squares)):
            for name, parameter, tensor in zip(self.names, self.parameters, tensors):
                parts[f"{kind}/{name}"] = Part(tensor, own_rows(parameter).start, tuple(parameter.shape))
        return parts

    def whole_state(self) -> dict[str, Tensor]:
        return {name: part.tensor for name, part in self.state().items()}


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def stacks_by_shape(group: MuonGroup) -> list[MuonStack]:
    members: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, parameter in group.members:
        assert parameter.ndim == 2, f"Muon takes matrices; {name} has shape {tuple(parameter.shape)}"
        key = (parameter.shape, parameter.dtype, parameter.device)
        members.setdefault(key, []).append((name, parameter))
    return [MuonStack(group, alike) for alike in members.values()]


class Optimizer:
    """Muon and AdamW over parameter groups, the same code on one rank and on many.

    Gradients arrive summed over the ranks. One that is None counts as zeros.
    """

    def __init__(self, groups: Sequence[ParamGroup], compiled: bool = False) -> None:
        names = [name for group in groups for name, _ in group.members]
        parameters = [parameter for group in groups for _, parameter in group.members]
        assert len(set(names)) == len(set(map(id, parameters))) == len(names), "a parameter is in two places"
        self.parameters: list[Tensor] = list(parameters)
        self.steps = 0
        self.stacks: list[MuonStack] = []
        self.adamw: list[AdamWTensors] = []
        for group in groups:
            if isinstance(group, MuonGroup):
                self.stacks += stacks_by_shape(group)
            else:
                assert isinstance(group, AdamWGroup)
                self.adamw.append(AdamWTensors(group))
        self.holders: list[MuonStack | AdamWTensors] = [*self.stacks, *self.adamw]
        self.rules = Rules(compiled)
        # the next step does
        self.compiles = compiled

    @torch.no_grad()
    def step(self, lr_scale: float, muon_momentum: float, weight_decay_scale: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.steps += 1
        with no_collections() if self.compiles else nullcontext():
            for stack in self.stacks:
                group = stack.group
                stack.update(self.rules, group.lr * lr_scale, muon_momentum, group.weight_decay * weight_decay_scale)
            for tensors in self.adamw:
                tensors.update(self.steps, tensors.group.lr * lr_scale)
        self.compiles = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            torch._foreach_zero_([each.grad for each in self.parameters if each.grad is not None])
            return
        for parameter in self.parameters:
            parameter.grad = None

    def parts(self) -> dict[str, Part]:
        """What this rank holds of the state, by name: views to copy from or into."""
        return {name: part for holder in self.holders for name, part in holder.state().items()}

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """The whole state by parameter name, on the CPU of rank 0; all ranks call it together, the others get none.

        Of parameters that are whole on every rank: the state of divided ones stays divided, in `parts`.
        """
        keeps = rank_and_world()[0] == 0
        tensors = {"step": torch.tensor(self.steps)}
        for holder in self.holders:
            whole = holder.whole_state()
            if keeps:
                tensors |= {name: copy_to_cpu(tensor) for name, tensor in whole.items()}
        return tensors if keeps else {}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Readable]) -> None:
        """Take over what `state_tensors` or `parts` gave, on whatever number of ranks they did."""
        self.check_names(set(tensors))
        self.steps = int(tensors["step"][...])
        for name, part in self.parts().items():
            given = tensors[name]
            if tuple(given.shape) != part.shape:
                raise RequestError(
                    f"optimizer state {name} has shape {tuple(given.shape)} and this model needs "
                    f"{part.shape}; resume with the settings that the run was started with"
                )
            part.tensor.copy_(given[part.rows])

    def check_names(self, names: set[str]) -> None:
        expected = {"step"}
        for stack in self.stacks:
            expected |= {f"{kind}/{name}" for kind in ("momentum", "second_moment") for name in stack.names}
        for adamw in self.adamw:
            expected |= set(adamw.state())
        differing = sorted(expected ^ names)
        if differing:
            verb = "lacks" if differing[0] in expected else "holds"
            raise RequestError(
                f"the optimizer state {verb} {differing[0]!r} ({len(differing)} names differ from "
                "this model's); resume with the settings that the run was started with"
            )


def copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def compile_rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Compile once per shape: what changes from step to step arrives in 0-d tensors."""
    compiled: Callable[..., Any] = torch.compile(rule, dynamic=False, fullgraph=True)

    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            return compiled(*arguments, **keywords)

    return call
