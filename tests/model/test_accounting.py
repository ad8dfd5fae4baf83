"""Parameters, FLOPs, state bytes and token budget: from the configuration, checked against the modules themselves."""

import pytest

from maglev.config import RunConfig
from maglev.model.accounting import (
    attended_keys,
    decoder_flops,
    describe,
    objective_flops,
    pass_flops,
    plain_parameters,
    prefiller_parameters,
    training_steps,
)
from maglev.objectives import Objective, build_objective
from maglev.recipes import RECIPES, run_config
from tests.helpers import ALL_RECIPES

PAPER_COUNT = 435_159_040


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_at_depth_20_every_row_has_the_papers_count_and_budget(recipe: str) -> None:
    report = describe(run_config(recipe))
    assert report["parameters"]["plain"] == PAPER_COUNT == 20 * 12 * 1280**2 + 32_768 * 1280
    assert report["parameters"]["blocks"] + report["parameters"]["readout"] == PAPER_COUNT
    assert report["steps"] == 83_000
    assert report["tokens"] == 83_000 * 524_288 == pytest.approx(43.52e9, rel=1e-3)


VARIANTS = [
    {},
    {"model.kv_heads": 1},
    {"model.heads": 4, "model.kv_heads": 2},
    {"model.width": 96, "model.heads": 3, "model.vocab_size": 77},
]


def numel(objective: Objective, *parts: str) -> int:
    return sum(p.numel() for name, p in objective.named_parameters() if any(part in name for part in parts))


def check_parameters(config: RunConfig) -> None:
    objective = build_objective(config)
    told = describe(config)["parameters"]
    deployed = sum(p.numel() for p in objective.decoder.parameters())
    everything = sum(p.numel() for p in objective.parameters())
    assert told["deployed"] == deployed
    assert told["trained"] == everything
    assert told["prefiller"] == everything - deployed
    assert told["embedding"] == numel(objective, "decoder.embedding")
    assert told["readout"] == numel(objective, "decoder.readout")
    assert told["memory_projections"] == numel(objective, "decoder.injection")
    assert told["gates"] == numel(objective, "decoder.blocks.") - numel_of_matrices(objective)
    assert told["blocks"] == numel_of_matrices(objective)
    assert told["scales"] == numel(objective, "decoder.scales")
    parts = ("blocks", "readout", "embedding", "memory_projections", "gates", "scales", "prefiller")
    assert sum(told[part] for part in parts) == everything


def numel_of_matrices(objective: Objective) -> int:
    """Of the decoder's blocks, without the gates."""
    return sum(p.numel() for name, p in objective.decoder.blocks.named_parameters() if "_gate" not in name)


@pytest.mark.parametrize("settings", VARIANTS)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_parameter_counts_are_those_of_the_modules(recipe: str, settings: dict[str, int]) -> None:
    check_parameters(run_config(recipe, 2, {"model.vocab_size": 50} | settings))


@pytest.mark.parametrize(("depth", "width"), [(1, 0), (5, 0), (0, 64), (3, 192)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_parameter_counts_with_another_prefiller(depth: int, width: int, kv_heads: int) -> None:
    settings = {
        "model.heads": 2,
        "model.kv_heads": kv_heads,
        "model.vocab_size": 50,
        "objective.prefiller_depth": depth,
        "objective.prefiller_width": width,
    }
    check_parameters(run_config("maglev-separate-1", 2, settings))


def visible_pairs(windows: tuple[int, ...], context: int) -> int:
    """Counted one by one."""
    return sum(1 for w in windows for t in range(context) for j in range(context) if j <= t and j > t - w)


@pytest.mark.parametrize("window", [1, 2, 7, 16])
@pytest.mark.parametrize("pattern", ["S", "SL", "LLS"])
def test_attended_keys_are_the_visible_pairs(pattern: str, window: int) -> None:
    settings = {"model.context": 16, "model.window": window, "model.window_pattern": pattern}
    windows = run_config("swa-ssss", 4, settings).model.windows
    assert attended_keys(windows, 16) * 16 == pytest.approx(visible_pairs(windows, 16))


def test_a_window_longer_than_the_rows_counts_what_is_there() -> None:
    assert attended_keys((50,), 10) * 10 == pytest.approx(visible_pairs((50,), 10))


def brute_force_forward(config: RunConfig) -> float:
    """2 per weight of every matrix that a token meets, 4 * width per visible pair, over one context, per token."""
    objective, model = build_objective(config), config.model
    matrices = [
        parameter.numel()
        for name, parameter in objective.decoder.named_parameters()
        if parameter.dim() == 2 and "embedding" not in name
    ]
    pairs = visible_pairs(model.windows, model.context)
    return 2 * sum(matrices) + 4 * model.width * pairs / model.context


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_forward_flops_of_the_decoder_are_counted_in_full(recipe: str) -> None:
    settings = {"model.context": 16, "model.window": 5, "model.vocab_size": 50, "model.kv_heads": 1}
    config = run_config(recipe, 2, settings)
    assert decoder_flops(config.model) == pytest.approx(brute_force_forward(config))


@pytest.mark.parametrize("settings", [{}, {"objective.prefiller_depth": 3, "objective.prefiller_width": 64}])
def test_training_flops_of_a_separate_prefiller_are_those_of_its_matrices_and_pairs(settings: dict[str, int]) -> None:
    shape = {"model.context": 16, "model.window": 5, "model.vocab_size": 50}
    config = run_config("maglev-separate-1", 2, shape | settings)
    objective = build_objective(config)
    matrices = sum(p.numel() for p in objective.prefiller.parameters() if p.dim() == 2)
    width = objective.prefiller.blocks[0].mlp.up_proj.weight.shape[1]
    extra = 2 * matrices + 4 * width * visible_pairs(objective.prefiller.windows, 16) / 16
    assert objective_flops(config) == pytest.approx(brute_force_forward(config) + extra)


def test_training_flops_of_a_closed_loop_are_those_of_its_q_and_of_what_the_loop_adds() -> None:
    shape = {"model.context": 16, "model.window": 5, "model.vocab_size": 50, "model.injection": "shared_kv"}
    shape |= {"objective.sharing": "embedding", "objective.prefiller_depth": 3}
    closed = run_config("maglev-closed", 2, shape | {"objective.rollout_start": 0.25})
    separate = run_config("maglev-separate-1", 2, shape)
    more = objective_flops(closed) - objective_flops(separate)
    assert more == pytest.approx(0.75 * brute_force_forward(closed) + 2 * 50 * 128)
    assert prefiller_parameters(closed) == prefiller_parameters(separate)
    shared, borrowing = run_config("maglev-shared-1", 2), run_config("maglev-closed", 2)
    assert prefiller_parameters(borrowing) == prefiller_parameters(shared)


def test_training_flops_of_a_shared_prefiller_are_a_second_pass_over_the_blocks() -> None:
    config = run_config("maglev-shared-0.1", 2, {"model.context": 16, "model.window": 5, "model.vocab_size": 50})
    objective = build_objective(config)
    second = 2 * numel_of_matrices(objective) + 4 * 128 * visible_pairs(objective.prefiller.windows, 16) / 16
    assert objective_flops(config) == pytest.approx(brute_force_forward(config) + second)


@pytest.mark.parametrize(
    ("schedule", "passes", "times"), [("interleaved", 2, 2), ("interleaved", 3, 2), ("full", 3, 3)]
)
def test_training_flops_of_lrt_are_one_forward_per_full_set_of_positions(
    schedule: str, passes: int, times: int
) -> None:
    config = run_config("lrt-ssss", 2, {"objective.schedule": schedule, "objective.passes": passes})
    assert objective_flops(config) == pytest.approx(times * decoder_flops(config.model))
    assert describe(config)["flops_per_token"]["training"] == pytest.approx(3 * times * decoder_flops(config.model))


def test_the_budget_follows_from_the_plain_count_alone() -> None:
    """Memory, gates and prefillers add parameters and no tokens, so that every row sees the same data."""
    settings = {"model.vocab_size": 512, "train.tokens_per_step": 4096}
    steps = {training_steps(run_config(recipe, 4, settings)) for recipe in RECIPES}
    plain = plain_parameters(run_config("swa-ssss", 4, settings).model)
    assert steps == {round(100 * plain / 4096)}
    deep = {"objective.prefiller_depth": 8, "objective.prefiller_width": 512} | settings
    assert {training_steps(run_config("maglev-separate-1", 4, deep))} == steps


def test_given_steps_go_before_the_budget_and_there_is_always_one() -> None:
    assert training_steps(run_config("swa-ssss", 4, {"train.steps": 7})) == 7
    assert training_steps(run_config("swa-ssss", 1, {"model.vocab_size": 2, "train.tokens_per_parameter": 1e-9})) == 1


def test_state_bytes_are_told_for_both_precisions() -> None:
    """d20: K and V of 20 windows of 512, one memory vector, one position."""
    told = describe(run_config("maglev-shared-0.1"))["state_bytes"]
    assert told["bfloat16"] == (2 * 20 * 512 * 1280 + 1280) * 2 + 8
    assert told["float32"] == (2 * 20 * 512 * 1280 + 1280) * 4 + 8
    assert describe(run_config("swa-ssss"))["state_bytes"] == told


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_pass_over_a_context_costs_what_the_decoder_does_without_its_readout(recipe: str) -> None:
    model = run_config(recipe, 2, {"model.context": 64}).model
    whole = model.context * (decoder_flops(model) - 2 * model.vocab_size * model.width)
    assert pass_flops(model, 0, model.context) == pytest.approx(whole)
    parts = [(0, 1), (1, 30), (31, 33)]
    assert sum(pass_flops(model, *part) for part in parts) == pytest.approx(whole)
    # beyond the windows every position costs the same
    assert pass_flops(model, 1000, 10) == pytest.approx(10 * pass_flops(model, 10**6, 1))
