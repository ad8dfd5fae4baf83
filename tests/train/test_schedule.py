import pytest

from maglev.config import OptimizerConfig
from maglev.train.schedule import lr_scale, muon_momentum, weight_decay_scale


def test_defaults_are_constant_then_linear_to_zero_over_the_last_half() -> None:
    config = OptimizerConfig()
    assert [lr_scale(step, 100, config) for step in (0, 25, 50)] == [1.0, 1.0, 1.0]
    assert lr_scale(75, 100, config) == pytest.approx(0.5)
    assert 0 < lr_scale(99, 100, config) == pytest.approx(1 / 50)
    assert lr_scale(100, 100, config) == 0.0


def test_warm_up_is_linear_and_moves_from_the_first_step() -> None:
    config = OptimizerConfig(warmup_steps=4, cooldown_share=0.0)
    assert [lr_scale(step, 10, config) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cooldown_ends_at_the_final_share() -> None:
    config = OptimizerConfig(cooldown_share=0.2, final_lr_share=0.02)
    assert lr_scale(80, 100, config) == 1.0
    assert lr_scale(90, 100, config) == pytest.approx(0.51)
    assert lr_scale(100, 100, config) == pytest.approx(0.02)


@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_short_runs_with_a_long_warm_up_stay_within_bounds(total: int) -> None:
    config = OptimizerConfig(warmup_steps=5, cooldown_share=1.0)
    assert all(0 < lr_scale(step, total, config) <= 1 for step in range(total))


def test_momentum_rises_and_decay_falls() -> None:
    assert [muon_momentum(step) for step in (0, 150, 300, 5000)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert [weight_decay_scale(step, 200) for step in (0, 50, 200)] == [1.0, 0.75, 0.0]
