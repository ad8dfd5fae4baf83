"""What changes from step to step, as functions of the step's index (the first step is 0)."""

from maglev.config import OptimizerConfig

MOMENTUM_START, MOMENTUM_END, MOMENTUM_STEPS = 0.85, 0.95, 300


def lr_scale(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then 1, then linear towards `final_lr_share` over the last `cooldown_share`.

    The final share belongs to index `total_steps`, so that the last step still moves when it is 0.
    """
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    cooldown_steps = round(config.cooldown_share * total_steps)
    left = min(1.0, (total_steps - step) / cooldown_steps) if cooldown_steps else 1.0
    return warmup * (left + (1.0 - left) * config.final_lr_share)


def muon_momentum(step: int) -> float:
    share = min(1.0, step / MOMENTUM_STEPS)
    return MOMENTUM_START + share * (MOMENTUM_END - MOMENTUM_START)


def weight_decay_scale(step: int, total_steps: int) -> float:
    """Linear from 1 to 0 at index `total_steps`."""
    return max(0.0, 1.0 - step / total_steps)
