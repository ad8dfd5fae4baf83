"""The eight rows of the paper's table, by name, at any depth."""

import pytest

from maglev.config import LRTConfig, NextTokenConfig, SeparateMaglevConfig, SharedMaglevConfig
from maglev.errors import RequestError
from maglev.objectives import build
from maglev.recipes import RECIPES, run_config
from tests.helpers import ALL_RECIPES, random_tokens

PAPER = {
    "transformer-slsl": ("SLSL", "none", NextTokenConfig, None),
    "swa-ssss": ("SSSS", "none", NextTokenConfig, None),
    "lrt-slsl": ("SLSL", "kv", LRTConfig, None),
    "lrt-ssss": ("SSSS", "kv", LRTConfig, None),
    "maglev-shared-0.1": ("SSSS", "kv", SharedMaglevConfig, 0.1),
    "maglev-shared-1": ("SSSS", "kv", SharedMaglevConfig, 1.0),
    "maglev-separate-0.1": ("SSSS", "kv", SeparateMaglevConfig, 0.1),
    "maglev-separate-1": ("SSSS", "kv", SeparateMaglevConfig, 1.0),
}


def test_all_rows_of_the_paper_are_there() -> None:
    assert set(PAPER) <= set(RECIPES)


@pytest.mark.parametrize("recipe", PAPER)
def test_a_recipe_is_its_row_of_the_table(recipe: str) -> None:
    pattern, memory, objective, weight = PAPER[recipe]
    config = run_config(recipe)
    model = config.model
    assert (model.depth, model.width, model.heads, model.kv_heads, model.head_dim) == (20, 1280, 10, 10, 128)
    assert (model.context, model.window, model.vocab_size) == (2048, 512, 32_768)
    assert (model.window_pattern, model.memory) == (pattern, memory)
    assert type(config.objective) is objective and config.recipe == recipe
    if weight is not None:
        assert config.objective.consistency_weight == weight
        assert config.objective.prefiller_pattern == "SLSL"


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 7, 12, 26, 32])
@pytest.mark.parametrize("recipe", PAPER)
def test_any_depth_gives_a_valid_run_of_width_64_times_depth(recipe: str, depth: int) -> None:
    model = run_config(recipe, depth).model
    assert (model.depth, model.width) == (depth, 64 * depth)
    assert model.head_dim == (128 if depth % 2 == 0 else 64)
    assert len(model.windows) == depth and model.window == 512


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_below_one_is_refused(depth: int) -> None:
    with pytest.raises(RequestError, match=f"depth is {depth}"):
        run_config("swa-ssss", depth)


@pytest.mark.parametrize("depth", [2.5, "four", None])
def test_a_depth_that_is_no_whole_number_is_refused(depth: object) -> None:
    with pytest.raises(RequestError, match="depth"):
        run_config("swa-ssss", depth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("maglev-shard-0.1", "maglev-shared-0.1"),
        ("swa", "swa-ssss"),
        ("maglev-separate-1.0", "maglev-separate-1"),
        ("transformer", "transformer-slsl"),
        ("", None),
    ],
)
def test_an_unknown_recipe_names_the_nearest_and_all_others(wrong: str, nearest: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        run_config(wrong)
    message = str(caught.value)
    assert repr(wrong) in message and all(name in message for name in RECIPES)
    assert nearest is None or f"did you mean {nearest!r}" in message


def test_window_follows_context_and_heads_follow_width() -> None:
    assert run_config("swa-ssss", 4, {"model.context": 256}).model.window == 64
    assert run_config("swa-ssss", 4, {"model.context": 3}).model.window == 1
    assert run_config("swa-ssss", 4, {"model.context": 256, "model.window": 200}).model.window == 200
    wide = run_config("swa-ssss", 4, {"model.width": 320}).model
    assert (wide.heads, wide.kv_heads, wide.depth) == (5, 5, 4)
    assert run_config("swa-ssss", 4, {"model.width": 512}).model.heads == 4
    grouped = run_config("swa-ssss", 4, {"model.heads": 8, "model.kv_heads": 2}).model
    assert (grouped.heads, grouped.kv_heads, grouped.head_dim) == (8, 2, 32)
    assert run_config("swa-ssss", 4, {"model.heads": 8}).model.kv_heads == 8


def test_depth_as_a_setting_is_the_same_dial() -> None:
    assert run_config("swa-ssss", settings={"model.depth": "6"}) == run_config("swa-ssss", 6)


def test_two_depths_are_refused() -> None:
    with pytest.raises(RequestError, match=r"given twice.*model\.depth"):
        run_config("swa-ssss", 4, {"model.depth": "6"})


def test_a_window_larger_than_the_context_says_which_and_how_to_mend_it() -> None:
    with pytest.raises(RequestError, match=r"model.window is 300.*model.context = 256.*at most 256"):
        run_config("swa-ssss", 4, {"model.context": 256, "model.window": 300})


def test_prefiller_settings_reach_the_objective() -> None:
    settings = {
        "objective.prefiller_pattern": "LLS",
        "objective.prefiller_depth": "3",
        "objective.prefiller_width": "128",
        "objective.consistency_weight": "0.25",
    }
    objective = run_config("maglev-separate-1", 2, settings).objective
    assert objective == SeparateMaglevConfig(
        consistency_weight=0.25, prefiller_pattern="LLS", prefiller_depth=3, prefiller_width=128
    )


@pytest.mark.parametrize("width", [32, 96, 34, 192])
def test_odd_widths_build_and_run(width: int) -> None:
    objective = build("maglev-shared-0.1", depth=1, width=width, vocab_size=61, context=16)
    tokens = random_tokens(1, 12)
    assert objective(tokens, tokens).total.isfinite()


def test_a_width_that_no_head_size_divides_says_what_to_set() -> None:
    with pytest.raises(RequestError, match=r"model\.width.*model\.heads"):
        run_config("swa-ssss", 4, {"model.width": "200"})


def test_build_takes_model_keys_plainly_and_others_with_their_section() -> None:
    objective = build(
        "maglev-separate-1", depth=2, vocab_size=61, context=16, window=5, kv_heads=1,
        objective_consistency_weight=0.5, objective_prefiller_depth=1, train_seed=3, data_memory_reset=True,
    )  # fmt: skip
    assert objective.decoder.config.window == 5 and objective.decoder.config.kv_heads == 1
    assert objective.consistency_weight == 0.5 and len(objective.prefiller.blocks) == 1
    for wrong in ({"windw": 5}, {"objective_consistency": 1}, {"train_": 1}):
        with pytest.raises(RequestError, match="did you mean"):
            build("maglev-separate-1", depth=2, **wrong)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_every_recipe_builds_and_runs_one_step_as_it_stands(recipe: str) -> None:
    """The recipe itself at depth 1 with a short context: nothing else is set."""
    objective = build(recipe, depth=1, vocab_size=61, context=32)
    tokens = random_tokens(2, 32)
    losses = objective(tokens, tokens.roll(-1, 1))
    losses.total.backward()
    assert losses.total.isfinite()
    assert objective.decoder.readout.weight.grad.abs().max() > 0
