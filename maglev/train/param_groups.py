"""Which rule and learning rate a parameter gets, by its name."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from maglev.config import OptimizerConfig

REFERENCE_WIDTH = 768
REFERENCE_DEPTH = 12
REFERENCE_TOKENS_PER_STEP = 524_288

ADAM_BETAS = (0.8, 0.95)
INPUT_SCALE_BETAS = (0.96, 0.95)
ADAM_EPS = 1e-10
# While output projections are zero the stream is one direction, and a norm does not see its length: the gradient of a
# scale is then rounding alone, some 1e-10 in float32 and 1e-5 in bfloat16, which AdamW would blow up to steps as large
# as the learning rate. From the second step on it is 1e-4 and more, so the first one leaves scales where they are.
SCALE_EPS = 1e-7
SCALES_MOVE_AT = 2
MUON_BETA2 = 0.95

# (end of the name, group); what ends in none of these is a matrix.
ROLES = (
    ("embedding.weight", "embedding"),
    ("readout.weight", "readout"),
    ("_gate.weight", "gate"),
    ("residual_scale", "residual_scale"),
    ("input_scale", "input_scale"),
)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a rule; `lr` is the peak, which the schedule scales."""

    name: str
    members: tuple[tuple[str, nn.Parameter], ...]
    lr: float


@dataclass(frozen=True)
class MuonGroup(ParamGroup):
    weight_decay: float
    beta2: float = MUON_BETA2


@dataclass(frozen=True)
class AdamWGroup(ParamGroup):
    """`moves_at` is the first step, counted from 1, that changes the parameters; moments begin with the first one."""

    betas: tuple[float, float] = ADAM_BETAS
    eps: float = ADAM_EPS
    moves_at: int = 1


def role_of(name: str, parameter: nn.Parameter) -> str:
    for ending, role in ROLES:
        if name.endswith(ending):
            return role
    assert parameter.ndim == 2, f"no optimizer rule for parameter {name} of shape {tuple(parameter.shape)}"
    return "matrix"


RoleOf = Callable[[str, nn.Parameter], str]


def build_param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    width: int,
    depth: int,
    tokens_per_step: int,
    role_of: RoleOf = role_of,
) -> list[ParamGroup]:
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named_parameters:
        members.setdefault(role_of(name, parameter), []).append((name, parameter))

    batch_factor = math.sqrt(tokens_per_step / REFERENCE_TOKENS_PER_STEP)
    width_factor = (width / REFERENCE_WIDTH) ** -0.5
    lr = {
        "matrix": config.matrix_lr,
        "embedding": config.embedding_lr * width_factor,
        "readout": config.readout_lr * width_factor,
        "gate": config.gate_lr,
        "residual_scale": config.residual_scale_lr,
        "input_scale": config.input_scale_lr,
    }
    groups: list[ParamGroup] = []
    for role, own in members.items():
        peak = lr[role] * batch_factor
        if role == "matrix":
            decay = config.weight_decay * (REFERENCE_DEPTH / depth) ** 2
            groups.append(MuonGroup(role, tuple(own), peak, decay))
        elif role == "input_scale":
            groups.append(AdamWGroup(role, tuple(own), peak, INPUT_SCALE_BETAS, SCALE_EPS, SCALES_MOVE_AT))
        elif role == "residual_scale":
            groups.append(AdamWGroup(role, tuple(own), peak, eps=SCALE_EPS, moves_at=SCALES_MOVE_AT))
        else:
            groups.append(AdamWGroup(role, tuple(own), peak))
    return groups
