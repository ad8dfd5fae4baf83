"""Named runs: one function per row of the paper's table, and ours. `--depth` is the one dial; the rest follows."""

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from maglev.config import (
    ClosedMaglevConfig,
    LRTConfig,
    NextTokenConfig,
    ObjectiveConfig,
    RunConfig,
    SeparateMaglevConfig,
    SharedMaglevConfig,
    pretrained_shape,
)
from maglev.errors import RequestError
from maglev.model_config import Memory, ModelConfig, head_count
from maglev.settings import check_keys, parse_section, with_settings
from maglev.values import parse_value, require

PAPER_DEPTH = 20
PAPER_CONTEXT = 2048
PAPER_VOCAB = 32_768


class Recipe(NamedTuple):
    pattern: str
    memory: Memory
    objective: ObjectiveConfig
    injection: str = "shared_kv"


def model_config(depth: int, recipe: Recipe, given: dict[str, Any]) -> ModelConfig:
    """Width 64 x depth, heads of 128 where that divides the width, else of 64; W is a quarter of the context."""
    depth = parse_value("depth", given.get("depth", depth), int)
    require(depth >= 1, f"depth is {depth}; it must be at least 1")
    width = given.get("width", 64 * depth)
    heads = given.get("heads", head_count(width))
    context = given.get("context", PAPER_CONTEXT)
    derived = {
        "depth": depth,
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "vocab_size": PAPER_VOCAB,
        "context": context,
        "window": max(1, context // 4),
        "window_pattern": recipe.pattern,
        "memory": recipe.memory,
        "injection": recipe.injection,
    }
    return ModelConfig(**(derived | given))


def transformer_slsl() -> Recipe:
    return Recipe("SLSL", "none", NextTokenConfig())


def swa_ssss() -> Recipe:
    return Recipe("SSSS", "none", NextTokenConfig())


def lrt_slsl() -> Recipe:
    return Recipe("SLSL", "kv", LRTConfig())


def lrt_ssss() -> Recipe:
    return Recipe("SSSS", "kv", LRTConfig())


def maglev_shared_01() -> Recipe:
    return Recipe("SSSS", "kv", SharedMaglevConfig(consistency_weight=0.1))


def maglev_shared_1() -> Recipe:
    return Recipe("SSSS", "kv", SharedMaglevConfig(consistency_weight=1.0))


def maglev_separate_01() -> Recipe:
    return Recipe("SSSS", "kv", SeparateMaglevConfig(consistency_weight=0.1))


def maglev_separate_1() -> Recipe:
    return Recipe("SSSS", "kv", SeparateMaglevConfig(consistency_weight=1.0))


def maglev_closed() -> Recipe:
    return Recipe("SSSS", "kv", ClosedMaglevConfig(), "shared_kv+layer_residual")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "transformer-slsl": transformer_slsl,
    "swa-ssss": swa_ssss,
    "lrt-slsl": lrt_slsl,
    "lrt-ssss": lrt_ssss,
    "maglev-shared-0.1": maglev_shared_01,
    "maglev-shared-1": maglev_shared_1,
    "maglev-separate-0.1": maglev_separate_01,
    "maglev-separate-1": maglev_separate_1,
    "maglev-closed": maglev_closed,
}


def run_config(recipe: str, depth: int = PAPER_DEPTH, settings: dict[str, Any] | None = None) -> RunConfig:
    """The run of that name at that depth, with `--set` values applied before what follows from them is derived."""
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, n=1, cutoff=0.0)
        raise RequestError(f"unknown recipe {recipe!r}; did you mean {near[0]!r}? Known: {', '.join(RECIPES)}")
    row = RECIPES[recipe]()
    default = RunConfig(recipe, model_config(PAPER_DEPTH, row, {}), row.objective)
    check_keys(default, settings or {})
    require(
        depth == PAPER_DEPTH or "model.depth" not in (settings or {}),
        f"depth is given twice, as {depth} and by model.depth; give one of them",
    )
    given = {key: value for key, value in (settings or {}).items() if key.startswith("model.")}
    others = {key: value for key, value in (settings or {}).items() if key not in given}
    model = model_config(depth, row, parse_section(ModelConfig, given))
    config = with_settings(RunConfig(recipe, model, row.objective), others)
    taken = config.objective
    if isinstance(taken, SeparateMaglevConfig) and taken.prefiller_from:
        depth, width = pretrained_shape(taken.prefiller_from)
        for name, said, own in (("depth", taken.prefiller_depth, depth), ("width", taken.prefiller_width, width)):
            require(
                said in (0, own),
                f"objective.prefiller_{name} is {said}, and that of {taken.prefiller_from} is {own}; leave it away",
            )
        taken = replace(taken, prefiller_depth=depth, prefiller_width=width)
    return replace(config, objective=taken)
