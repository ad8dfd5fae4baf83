"""How memory is learned; training only. `build` makes the objective of a recipe."""

from collections.abc import Callable
from typing import Any

from maglev.config import ClosedMaglevConfig, LRTConfig, NextTokenConfig, RunConfig
from maglev.model.decoder import Decoder
from maglev.model.init import initialise
from maglev.objectives.closed_loop import ClosedLoopObjective
from maglev.objectives.losses import Losses, Objective
from maglev.objectives.lrt import LRTObjective
from maglev.objectives.maglev import MaglevObjective
from maglev.objectives.next_token import NextTokenObjective
from maglev.objectives.prefiller import build_prefiller
from maglev.recipes import PAPER_DEPTH, run_config

__all__ = ["Losses", "Objective", "build", "build_objective"]

# objectives that are tried outside of the package, by the type of their configuration
OTHERS: dict[type, Callable[[RunConfig], Objective]] = {}


def build(recipe: str, depth: int = PAPER_DEPTH, *, seed: int = 0, **settings: Any) -> Objective:
    """The objective of a recipe, initialised. A setting is a model key (`window=32`) or, with its dots as
    underscores, another one (`objective_consistency_weight=0.5`)."""
    sections = ("objective", "optimizer", "data", "train")
    dotted = {}
    for key, value in settings.items():
        section, _, name = key.partition("_")
        dotted[f"{section}.{name}" if section in sections else f"model.{key}"] = value
    config = run_config(recipe, depth, dotted)
    objective = build_objective(config)
    initialise(objective, seed)
    return objective


def build_objective(config: RunConfig) -> Objective:
    """The modules of a run with their weights unset: `initialise` or a checkpoint fills them."""
    objective = config.objective
    if type(objective) in OTHERS:
        return OTHERS[type(objective)](config)
    decoder = Decoder(config.model)
    if isinstance(objective, NextTokenConfig):
        return NextTokenObjective(decoder)
    if isinstance(objective, LRTConfig):
        return LRTObjective(decoder, objective)
    prefiller = build_prefiller(config.model, objective)
    if isinstance(objective, ClosedMaglevConfig):
        return ClosedLoopObjective(decoder, prefiller, objective)
    return MaglevObjective(decoder, prefiller, objective.consistency_weight)
