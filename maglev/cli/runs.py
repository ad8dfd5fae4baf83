"""RUN_OR_RECIPE on the command line, as a configuration."""

import os
from pathlib import Path
from typing import Any

from maglev.config import RunConfig
from maglev.errors import RequestError
from maglev.recipes import PAPER_DEPTH, RECIPES, run_config
from maglev.runs import read_config, run_folder, shipped_names
from maglev.settings import parse_assignments


def is_recipe(run_or_recipe: str) -> bool:
    """A word that is neither a path nor there is taken for a recipe, so that an error names the nearest one."""
    if run_or_recipe in shipped_names():
        return False
    return run_or_recipe in RECIPES or not (Path(run_or_recipe).exists() or os.sep in run_or_recipe)


def config_of(run_or_recipe: str, depth: int | None, assignments: list[str]) -> RunConfig:
    """A recipe takes `--depth` and `--set`; the configuration of a run is fixed."""
    folder = run_folder(run_or_recipe)
    if is_recipe(str(folder)):
        settings: dict[str, Any] = dict(parse_assignments(assignments))
        return run_config(run_or_recipe, PAPER_DEPTH if depth is None else depth, settings)
    if depth is not None or assignments:
        raise RequestError(f"{run_or_recipe} is a run, its settings are fixed; leave --depth and --set away")
    return read_config(folder)
