"""What training took up to the step that was measured."""

from dataclasses import replace
from pathlib import Path

from maglev.config import ClosedMaglevConfig, RunConfig
from maglev.errors import RequestError, WorkError
from maglev.model.accounting import objective_flops, training_steps
from maglev.runs import read_config

# rollouts that were never begun
BEFORE_THE_END = 1 - 1e-9


def until(config: RunConfig, step: int) -> RunConfig:
    """As it costs up to that step: rollouts begin late, and what was stopped before has made none."""
    if not isinstance(config.objective, ClosedMaglevConfig):
        return config
    start = config.objective.rollout_start * training_steps(config)
    return replace(config, objective=replace(config.objective, rollout_start=min(start / max(1, step), BEFORE_THE_END)))


def training_flops(config: RunConfig, step: int) -> float:
    """Of that many steps, without what the run began from."""
    return 3 * objective_flops(until(config, step)) * config.train.tokens_per_step * step


def start_costs(config: RunConfig) -> tuple[float, int] | None:
    """FLOPs and tokens of the weights that the run began from (`train.init_from`), and of those that these began from;
    None where that cannot be read any more, or not from here."""
    total, tokens, seen = 0.0, 0, set[Path]()
    while config.train.init_from:
        folder = Path(config.train.init_from)
        if folder.resolve() in seen:
            return None
        seen.add(folder.resolve())
        from maglev.checkpoint import newest

        try:
            config = read_config(folder)
            checkpoint = newest(folder, lambda line: None)
        except (RequestError, WorkError):
            return None
        if checkpoint is None:
            return None
        total += training_flops(config, checkpoint.step)
        tokens += config.train.tokens_per_step * checkpoint.step
    return total, tokens
