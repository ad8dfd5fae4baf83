import pytest
import torch
from torch import nn

from maglev.config import OptimizerConfig
from maglev.train.param_groups import AdamWGroup, MuonGroup, ParamGroup, build_param_groups

SHAPES = {
    "decoder.embedding.weight": (32, 8),
    "decoder.readout.weight": (32, 8),
    "decoder.blocks.0.attention.query_proj.weight": (8, 8),
    "decoder.blocks.0.attention.local_gate.weight": (2, 8),
    "decoder.blocks.0.attention.memory_gate.weight": (2, 8),
    "decoder.blocks.0.mlp.up_proj.weight": (32, 8),
    "decoder.injection.memory_key_proj.weight": (8, 8),
    "decoder.residual_scale": (2,),
    "decoder.input_scale": (2,),
    "prefiller.residual_scale": (2,),
    "prefiller.blocks.0.attention.key_proj.weight": (8, 8),
}


def groups_by_name(width: int, depth: int, tokens_per_step: int) -> dict[str, ParamGroup]:
    parameters = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in SHAPES.items()]
    groups = build_param_groups(parameters, OptimizerConfig(), width, depth, tokens_per_step)
    assert sorted(name for group in groups for name, _ in group.members) == sorted(SHAPES)
    return {group.name: group for group in groups}


def test_every_name_finds_its_rule() -> None:
    groups = groups_by_name(768, 12, 524_288)
    names = {role: [name.removeprefix("decoder.") for name, _ in group.members] for role, group in groups.items()}
    assert names == {
        "embedding": ["embedding.weight"],
        "readout": ["readout.weight"],
        "matrix": [
            "blocks.0.attention.query_proj.weight",
            "blocks.0.mlp.up_proj.weight",
            "injection.memory_key_proj.weight",
            "prefiller.blocks.0.attention.key_proj.weight",
        ],
        "gate": ["blocks.0.attention.local_gate.weight", "blocks.0.attention.memory_gate.weight"],
        "residual_scale": ["residual_scale", "prefiller.residual_scale"],
        "input_scale": ["input_scale"],
    }
    assert isinstance(groups["matrix"], MuonGroup)
    adamw = {role: group for role, group in groups.items() if isinstance(group, AdamWGroup)}
    assert set(adamw) == set(groups) - {"matrix"}
    for name, group in adamw.items():
        assert group.eps == (1e-7 if name.endswith("scale") else 1e-10)
        assert group.moves_at == (2 if name.endswith("scale") else 1)
    betas = {role: group.betas for role, group in adamw.items()}
    assert betas.pop("input_scale") == (0.96, 0.95)
    assert set(betas.values()) == {(0.8, 0.95)}


def test_reference_size_has_the_plain_rates() -> None:
    rates = {role: group.lr for role, group in groups_by_name(768, 12, 524_288).items()}
    expected = {"matrix": 0.02, "embedding": 0.3, "readout": 0.004, "gate": 0.004}
    assert rates == expected | {"residual_scale": 0.005, "input_scale": 0.5}


def test_rates_scale_with_width_batch_and_depth() -> None:
    groups = groups_by_name(3072, 24, 131_072)
    rates = {role: group.lr for role, group in groups.items()}
    expected = {"matrix": 0.01, "embedding": 0.075, "readout": 0.001, "gate": 0.002}
    assert rates == pytest.approx(expected | {"residual_scale": 0.0025, "input_scale": 0.25})
    matrix = groups["matrix"]
    assert isinstance(matrix, MuonGroup) and matrix.weight_decay == pytest.approx(0.05)


def test_a_parameter_without_a_rule_is_named() -> None:
    stray = [("decoder.blocks.0.norm.bias", nn.Parameter(torch.zeros(3)))]
    with pytest.raises(AssertionError, match=r"decoder\.blocks\.0\.norm\.bias"):
        build_param_groups(stray, OptimizerConfig(), 768, 12, 524_288)
