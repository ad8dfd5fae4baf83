"""Every value is checked where it enters, and the message names the key."""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maglev.config import (
    DataConfig,
    LRTConfig,
    NextTokenConfig,
    OptimizerConfig,
    RunConfig,
    SeparateMaglevConfig,
    SharedMaglevConfig,
    TrainConfig,
    prefiller_config,
)
from maglev.errors import RequestError
from maglev.model_config import ModelConfig, head_count, tile_windows
from maglev.recipes import RECIPES, run_config
from maglev.settings import parse_assignments, setting_keys, with_settings
from maglev.values import canonical_json, parse_value

MODEL = {
    "depth": 2,
    "width": 64,
    "heads": 2,
    "kv_heads": 2,
    "vocab_size": 100,
    "context": 32,
    "window": 8,
    "window_pattern": "SL",
    "memory": "kv",
}

# (recipe, key, a value that cannot be)
BAD_SETTINGS = [
    ("swa-ssss", "model.depth", "0"),
    ("swa-ssss", "model.depth", "-3"),
    ("swa-ssss", "model.depth", "two"),
    ("swa-ssss", "model.depth", "1.5"),
    ("swa-ssss", "model.width", "0"),
    ("swa-ssss", "model.width", "65"),
    ("swa-ssss", "model.heads", "0"),
    ("swa-ssss", "model.heads", "3"),
    ("swa-ssss", "model.kv_heads", "0"),
    ("swa-ssss", "model.kv_heads", "3"),
    ("swa-ssss", "model.kv_heads", "4"),
    ("swa-ssss", "model.vocab_size", "0"),
    ("swa-ssss", "model.context", "0"),
    ("swa-ssss", "model.context", "-5"),
    ("swa-ssss", "model.context", "nan"),
    ("swa-ssss", "model.window", "0"),
    ("swa-ssss", "model.window", "2049"),
    ("swa-ssss", "model.window", "inf"),
    ("swa-ssss", "model.window", ""),
    ("swa-ssss", "model.window_pattern", ""),
    ("swa-ssss", "model.window_pattern", "SXSL"),
    ("swa-ssss", "model.window_pattern", "ssss"),
    ("swa-ssss", "model.window_pattern", "S L"),
    ("swa-ssss", "model.memory", "kv"),
    ("swa-ssss", "model.memory", "tokens"),
    ("maglev-shared-0.1", "model.memory", "none"),
    ("maglev-shared-0.1", "model.injection", "none"),
    ("maglev-shared-0.1", "model.injection", ""),
    ("maglev-shared-0.1", "model.injection", "shared_kv+"),
    ("maglev-shared-0.1", "model.injection", "slots+slots"),
    ("maglev-shared-0.1", "model.injection", "shared_kv+tokens"),
    ("maglev-shared-0.1", "model.injection", "residual+cross_attention"),
    ("swa-ssss", "model.injection", "residual"),
    ("maglev-shared-0.1", "model.delay", "0"),
    ("maglev-shared-0.1", "model.delay", "513"),
    ("swa-ssss", "model.delay", "2"),
    ("lrt-ssss", "model.memory", "none"),
    ("swa-ssss", "model.rope_base", "1"),
    ("swa-ssss", "model.rope_base", "0"),
    ("swa-ssss", "model.rope_base", "-10000"),
    ("swa-ssss", "model.logit_softcap", "0"),
    ("swa-ssss", "model.logit_softcap", "nan"),
    ("maglev-shared-0.1", "objective.consistency_weight", "-0.1"),
    ("maglev-shared-0.1", "objective.consistency_weight", "nan"),
    ("maglev-shared-0.1", "objective.consistency_weight", "a lot"),
    ("maglev-shared-0.1", "objective.prefiller_pattern", "LX"),
    ("maglev-shared-0.1", "objective.prefiller_pattern", ""),
    ("maglev-separate-1", "objective.consistency_weight", "-1"),
    ("maglev-separate-1", "objective.prefiller_pattern", "XYZ"),
    ("maglev-closed", "objective.prefiller_weight", "-1"),
    ("maglev-closed", "objective.steady", "-1"),
    ("maglev-closed", "objective.noise", "-1"),
    ("maglev-closed", "objective.rollout", "0"),
    ("maglev-closed", "objective.rollout", "-4"),
    ("maglev-closed", "objective.rollout", "1.5"),
    ("maglev-closed", "objective.rollout_start", "1"),
    ("maglev-closed", "objective.rollout_start", "-0.1"),
    ("maglev-separate-1", "objective.prefiller_depth", "-1"),
    ("maglev-separate-1", "objective.prefiller_depth", "0.5"),
    ("maglev-separate-1", "objective.prefiller_width", "-64"),
    ("maglev-separate-1", "objective.prefiller_width", "65"),
    ("maglev-separate-1", "objective.prefiller_width", "200"),
    ("maglev-closed", "objective.sharing", "embedding,3-1"),
    ("maglev-closed", "objective.prefiller_width", "128"),
    ("maglev-separate-1", "objective.prefiller_from", "nowhere"),
    ("maglev-separate-1", "objective.sharing", ""),
    ("maglev-separate-1", "objective.sharing", "everything"),
    ("maglev-separate-1", "objective.sharing", "embedding,none"),
    ("maglev-separate-1", "objective.sharing", "4"),
    ("maglev-separate-1", "objective.sharing", "1-"),
    ("maglev-separate-1", "objective.sharing", "0-99999999999"),
    ("lrt-ssss", "objective.passes", "0"),
    ("lrt-ssss", "objective.passes", "2.5"),
    ("lrt-ssss", "objective.schedule", "sometimes"),
    ("swa-ssss", "optimizer.matrix_lr", "-0.02"),
    ("swa-ssss", "optimizer.embedding_lr", "nan"),
    ("swa-ssss", "optimizer.weight_decay", "-1"),
    ("swa-ssss", "optimizer.warmup_steps", "-1"),
    ("swa-ssss", "optimizer.warmup_steps", "0.5"),
    ("swa-ssss", "optimizer.cooldown_share", "1.5"),
    ("swa-ssss", "optimizer.final_lr_share", "2"),
    ("swa-ssss", "data.document_mask", "maybe"),
    ("swa-ssss", "data.memory_reset", "2"),
    ("swa-ssss", "train.steps", "-1"),
    ("swa-ssss", "train.tokens_per_parameter", "0"),
    ("swa-ssss", "train.tokens_per_step", "0"),
    ("swa-ssss", "train.rows_per_pass", "-1"),
    ("swa-ssss", "train.seed", "-1"),
    ("swa-ssss", "train.precision", "float8"),
    ("swa-ssss", "train.compile", "yes"),
    ("swa-ssss", "train.recompute", "some"),
    ("swa-ssss", "train.attention", "dense"),
    ("swa-ssss", "train.products", "fp4"),
    ("swa-ssss", "train.sharding", "some"),
    ("swa-ssss", "train.graphs", "some"),
    ("swa-ssss", "train.timeout", "0"),
    ("swa-ssss", "train.timeout", "1e9"),
    ("swa-ssss", "train.threads", "-2"),
    ("swa-ssss", "train.checkpoint_every", "0"),
    ("swa-ssss", "train.keep_checkpoints", "0"),
    ("swa-ssss", "train.validate_every", "-1"),
    ("swa-ssss", "train.validation_rows", "-1"),
    ("swa-ssss", "train.log_every", "0"),
    ("swa-ssss", "train.max_bad_steps", "0"),
    ("swa-ssss", "train.tensorboard", "nope"),
]


@pytest.mark.parametrize(("recipe", "key", "value"), BAD_SETTINGS)
def test_a_bad_value_is_refused_in_one_line_that_names_its_key(recipe: str, key: str, value: str) -> None:
    with pytest.raises(RequestError) as caught:
        run_config(recipe, 4, {key: value})
    message = str(caught.value)
    assert "\n" not in message
    # `depth` is also an argument of its own, so its bare name will do
    assert (key.split(".")[1] if key == "model.depth" else key) in message


def test_every_key_that_can_be_bad_is_tried_above() -> None:
    tried = {key for _, key, _ in BAD_SETTINGS}
    known = {key for recipe in RECIPES for key in setting_keys(run_config(recipe, 4))}
    same_rule = {key for key in known if key.startswith("optimizer.") and key.endswith("_lr")}
    any_text_goes = {"train.device", "train.init_from"}
    assert tried <= known
    assert known - tried - any_text_goes <= same_rule


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(OptimizerConfig)])
def test_no_optimizer_value_is_negative(key: str) -> None:
    with pytest.raises(RequestError, match=f"optimizer.{key}"):
        OptimizerConfig(**{key: -1})


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("model.windw", "model.window"),
        ("model.windows_pattern", "model.window_pattern"),
        ("Model.window", "model.window"),
        ("consistency_weight", "objective.consistency_weight"),
        ("train.step", "train.steps"),
        ("train.tokens_per_stp", "train.tokens_per_step"),
        ("optimiser.matrix_lr", "optimizer.matrix_lr"),
        ("objective.kind", None),
        ("recipe", None),
        ("model", None),
        ("", None),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, nearest: str | None) -> None:
    with pytest.raises(RequestError, match="unknown setting") as caught:
        run_config("maglev-shared-0.1", 4, {wrong: "1"})
    assert repr(wrong) in str(caught.value)
    assert nearest is None or repr(nearest) in str(caught.value)


def test_a_key_of_another_objective_is_unknown_here() -> None:
    for recipe, key in (
        ("swa-ssss", "objective.consistency_weight"),
        ("maglev-shared-0.1", "objective.prefiller_depth"),
        ("maglev-separate-1", "objective.passes"),
    ):
        with pytest.raises(RequestError, match="unknown setting"):
            run_config(recipe, 4, {key: "1"})


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("+3", int, 3),
        ("1e3", int, 1000),
        (" 7", int, 7),
        (7.0, int, 7),
        ("9007199254740993", int, 9007199254740993),
        ("0.5", float, 0.5),
        (1, float, 1.0),
        ("true", bool, True),
        ("False", bool, False),
        ("on", bool, True),
        (False, bool, False),
        ("cuda:1", str, "cuda:1"),
    ],
)
def test_values_are_read_as_the_type_of_their_field(text: Any, hint: type, value: Any) -> None:
    read = parse_value("section.key", text, hint)
    assert read == value and type(read) is hint


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=12), st.sampled_from([int, float, bool]))
def test_any_text_is_a_value_or_a_request_error(text: str, hint: type) -> None:
    try:
        value = parse_value("section.key", text, hint)
    except RequestError as error:
        assert "section.key" in str(error)
    else:
        assert isinstance(value, hint) and (hint is bool or math.isfinite(value))


def test_assignments_are_split_at_the_first_equals_sign() -> None:
    assert parse_assignments(["a.b=1", "c.d = x=y ", "e.f="]) == {"a.b": "1", "c.d": "x=y", "e.f": ""}
    assert parse_assignments([]) == {}
    for wrong in ("a.b", "=1", ""):
        with pytest.raises(RequestError, match="KEY=VALUE"):
            parse_assignments([wrong])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_configuration_survives_json(recipe: str) -> None:
    settings_ = {"model.window": 3, "train.seed": 5, "data.memory_reset": "true", "optimizer.matrix_lr": "0.1"}
    config = run_config(recipe, 3, settings_)
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert type(again.objective) is type(config.objective)
    assert canonical_json(again.to_dict()) == canonical_json(config.to_dict())


def stored() -> dict[str, Any]:
    return run_config("maglev-shared-0.1", 2).to_dict()


DROP = object()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("extra", {}, "extra"),
        ("model.flavour", 1, r"model\.flavour"),
        ("train.flavour", 1, r"train\.flavour"),
        ("objective.prefiller_depth", 1, r"objective\.prefiller_depth"),
        ("objective.kind", "alchemy", "alchemy"),
        ("objective", {}, "objective"),
        ("objective", None, "objective"),
        ("objective", DROP, "objective"),
        ("model", DROP, "model"),
        ("model", {"depth": 1}, "model"),
        ("model", None, "model"),
        ("model", [], "model"),
        ("train", 3, "train"),
        ("model.depth", DROP, "depth"),
        ("model.depth", "three", "depth"),
        ("model.depth", 2.5, "depth"),
        ("model.depth", None, "depth"),
        ("model.window", 10**9, "window"),
        ("model.memory", "tokens", "memory"),
        ("model.window_pattern", None, "window_pattern"),
        ("data.document_mask", "no", "document_mask"),
        ("objective.consistency_weight", math.inf, "consistency_weight"),
        ("train.precision", "float8", "precision"),
    ],
)
def test_a_stored_configuration_that_is_not_whole_is_refused(path: str, value: Any, named: str) -> None:
    """A run's file may come from a newer version or from a broken disk: never a half-understood run."""
    content = stored()
    *sections, name = path.split(".")
    place = content
    for section in sections:
        place = place[section]
    if value is DROP:
        del place[name]
    else:
        place[name] = value
    with pytest.raises(RequestError, match=named):
        RunConfig.from_dict(content)


@pytest.mark.parametrize("content", [None, [], 3, "text"])
def test_a_stored_configuration_that_is_no_table_is_refused(content: Any) -> None:
    with pytest.raises(RequestError):
        RunConfig.from_dict(content)


def test_a_stored_lrt_schedule_must_be_a_known_one() -> None:
    content = run_config("lrt-ssss", 2).to_dict()
    content["objective"]["schedule"] = "sometimes"
    with pytest.raises(RequestError, match="schedule"):
        RunConfig.from_dict(content)


def test_reading_a_configuration_leaves_the_dictionary_alone() -> None:
    content = stored()
    RunConfig.from_dict(content)
    assert content == stored()


def test_configurations_are_frozen() -> None:
    config = run_config("swa-ssss", 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.window = 3  # type: ignore[misc]
    assert hash(config) == hash(run_config("swa-ssss", 2))


@pytest.mark.parametrize(
    ("pattern", "depth", "expected"),
    [
        ("S", 3, (4, 4, 4)),
        ("SL", 5, (4, 9, 4, 9, 4)),
        ("SSSL", 4, (4, 4, 4, 9)),
        ("SLSL", 2, (4, 9)),
        ("LLLLS", 3, (9, 9, 9)),
    ],
)
def test_patterns_are_tiled_over_the_layers(pattern: str, depth: int, expected: tuple[int, ...]) -> None:
    assert tile_windows(pattern, depth, window=4, context=9) == expected
    model = ModelConfig(**(MODEL | {"window_pattern": pattern, "depth": depth, "window": 4, "context": 9}))
    assert model.windows == expected
    assert model.plain_reach == sum(expected) - depth


def test_a_window_as_large_as_the_context_is_allowed_and_one_larger_is_not() -> None:
    assert ModelConfig(**(MODEL | {"window": 32})).windows == (32, 32)
    with pytest.raises(RequestError, match=r"model\.window is 33, larger than model\.context = 32"):
        ModelConfig(**(MODEL | {"window": 33}))


@pytest.mark.parametrize(
    ("width", "heads"), [(64, 1), (128, 1), (192, 3), (256, 2), (320, 5), (768, 6), (1280, 10), (32, 1), (96, 1)]
)
def test_heads_are_of_128_where_that_divides_the_width_else_of_64(width: int, heads: int) -> None:
    assert head_count(width) == heads


def test_the_prefiller_is_the_decoders_stack_where_nothing_else_is_said() -> None:
    model = ModelConfig(**(MODEL | {"kv_heads": 1, "window_pattern": "SSSS"}))
    same = prefiller_config(model, SeparateMaglevConfig())
    assert same == dataclasses.replace(model, window_pattern="SLSL", memory="none")
    other = prefiller_config(model, SeparateMaglevConfig(prefiller_depth=5, prefiller_width=256, prefiller_pattern="L"))
    assert (other.depth, other.width, other.heads, other.kv_heads) == (5, 256, 2, 2)
    assert other.windows == (32,) * 5 and other.memory == "none"


@pytest.mark.parametrize(
    ("memory", "objective", "fits"),
    [
        ("none", NextTokenConfig(), True),
        ("kv", NextTokenConfig(), False),
        ("none", LRTConfig(), False),
        ("kv", LRTConfig(), True),
        ("none", SharedMaglevConfig(), False),
        ("kv", SharedMaglevConfig(), True),
        ("none", SeparateMaglevConfig(), False),
        ("kv", SeparateMaglevConfig(), True),
    ],
)
def test_an_objective_that_learns_memory_needs_a_decoder_that_has_it(memory: str, objective: Any, fits: bool) -> None:
    model = ModelConfig(**(MODEL | {"memory": memory}))
    if fits:
        assert RunConfig("x", model, objective).objective is objective
    else:
        with pytest.raises(RequestError, match=r"model\.memory"):
            RunConfig("x", model, objective)


def test_settings_replace_what_they_name_and_nothing_else() -> None:
    config = run_config("lrt-ssss", 2)
    changed = with_settings(config, {"train.steps": "7", "objective.passes": "3", "train.device": "cpu"})
    assert (changed.train.steps, changed.train.device, changed.objective.passes) == (7, "cpu", 3)
    assert changed.model == config.model and changed.optimizer == config.optimizer
    assert dataclasses.replace(changed.train, steps=0, device="auto") == config.train
    assert with_settings(config, {}) == config


def test_the_defaults_are_those_of_the_paper() -> None:
    assert not DataConfig().document_mask and not DataConfig().memory_reset
    assert TrainConfig().tokens_per_step == 524_288 and TrainConfig().tokens_per_parameter == 100
    model = run_config("maglev-shared-0.1").model
    assert (model.rope_base, model.logit_softcap) == (10_000, 15)
    assert LRTConfig().schedule == "interleaved" and LRTConfig().passes == 2


def test_configuration_and_accounting_need_no_torch() -> None:
    code = (
        "import sys, maglev, maglev.config, maglev.recipes, maglev.model.accounting as a;"
        "a.describe(maglev.recipes.run_config('maglev-separate-1'));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
