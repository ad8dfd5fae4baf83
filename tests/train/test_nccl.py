"""What several GPUs run, on one: NCCL with a single rank, kernels and compiled blocks under FSDP2 and under DDP."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from maglev.bench.lines import Lines
from maglev.bench.train_worker import RandomTask
from maglev.recipes import run_config
from maglev.train.distributed import Ranks
from maglev.train.loop import Trainer
from maglev.train.passes import StepLosses, replicate

pytestmark = pytest.mark.gpu
STEPS = 4
SETTINGS = {
    "model.width": 128,
    "model.context": 256,
    "model.window": 64,
    "model.vocab_size": 256,
    "train.steps": 100,
    "train.tokens_per_step": 8 * 256,
    "train.rows_per_pass": 4,
    "train.validate_every": 0,
}


@pytest.fixture
def group() -> Iterator[None]:
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


def losses_of(recipe: str, sharding: str = "alone") -> list[float]:
    device = torch.device("cuda", 0)
    config = run_config(recipe, 2, SETTINGS | {"train.sharding": "full" if sharding == "full" else "none"})
    mesh = init_device_mesh("cuda", (1,)) if sharding == "full" else None
    trainer = Trainer(config, RandomTask(256), Path(), Ranks(0, 1, 0, device), Lines(), mesh)
    if sharding == "none":
        trainer.passes.replicas = replicate(trainer.objective)
    found: list[float] = []

    def record(losses: StepLosses, skipped: bool, seconds: float) -> None:
        assert not skipped
        found.append(losses.next_token)

    trainer.record = record  # type: ignore[method-assign]
    for _ in range(STEPS):
        trainer.one_step()
    trainer.close()
    return found


@cache
def losses_alone(recipe: str) -> list[float]:
    return losses_of(recipe)


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-closed"])
def test_a_rank_under_nccl_trains_as_one_alone(recipe: str, sharding: str, group: None) -> None:
    """Up to rounding: divided parameters travel, and their gradients are reduced, in another order."""
    torch.testing.assert_close(losses_of(recipe, sharding), losses_alone(recipe), rtol=0, atol=0.01)
