import gc
from pathlib import Path

import pytest
import torch

from maglev.bench.lines import Lines
from maglev.bench.train_worker import RandomTask
from maglev.recipes import run_config
from maglev.train.distributed import Ranks
from maglev.train.loop import Trainer
from maglev.train.speed import no_collections


def test_the_collector_rests_and_comes_back_whatever_happens() -> None:
    with no_collections():
        assert not gc.isenabled()
    with pytest.raises(ValueError), no_collections():
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled(), "who turned it off wants it so"
    finally:
        gc.enable()


def test_the_collector_rests_while_the_first_pass_compiles_and_then_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of two steps, two in each: what a pass leaves behind must not add up."""
    settings = {"model.context": 32, "model.window": 8, "model.vocab_size": 64, "train.steps": 2}
    settings |= {"train.tokens_per_step": 64, "train.rows_per_pass": 1, "train.validate_every": 0}
    config = run_config("swa-ssss", 1, settings)
    trainer = Trainer(config, RandomTask(64), Path(), Ranks(0, 1, 0, torch.device("cpu")), Lines())
    forward, seen = trainer.objective.forward, []

    def watched(*inputs: object) -> object:
        seen.append(gc.isenabled())
        return forward(*inputs)

    monkeypatch.setattr(trainer.objective, "forward", watched)
    trainer.one_step()
    trainer.one_step()
    assert seen == [False, True, True, True] and gc.isenabled()
