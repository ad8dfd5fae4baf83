"""Parameters divided over ranks: the losses of one process, checkpoints that go on on any number of ranks."""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maglev.runs import read_metrics
from tests.helpers import ALL_RECIPES
from tests.processes import Processes
from tests.small_runs import FAST, losses_of, tensors_of, train_arguments

# one row per pass: two passes per step on two ranks, four in one process
SETTINGS = FAST | {"train.rows_per_pass": 1, "train.steps": 6}
PATIENCE = 100


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


ONE_AFTER_ANOTHER = """
import os
from maglev.__main__ import main
for port, arguments in {jobs}:
    os.environ["MASTER_PORT"] = str(port)
    status = main(arguments)
    if status:
        os._exit(status)
os.environ["MASTER_PORT"] = "{last}"
"""


def run_jobs(processes: Processes, jobs: list[list[str]], world: int) -> None:
    """All jobs one after another in the same `world` processes."""
    ports = free_ports(len(jobs))
    before = ONE_AFTER_ANOTHER.format(jobs=list(zip(ports, jobs))[:-1], last=ports[-1])
    places: list[dict[str, Any]] = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"} for rank in range(world)
    ]
    started = [processes.start(jobs[-1], before=before, **(place if world > 1 else {})) for place in places]
    for process in started:
        assert process.wait(PATIENCE) == 0, process.stderr


def job(recipe: str, data: Path, run: Path, sharding: str = "none", *more: str, **settings: Any) -> list[str]:
    chosen = SETTINGS | {"train.sharding": sharding} | {f"train.{name}": value for name, value in settings.items()}
    return train_arguments(recipe, data, run, chosen, *more, depth=2)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory, fork_server: Any) -> Path:
    """Every recipe in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "processes").mkdir()
    jobs = [job(recipe, data, folder / recipe) for recipe in ALL_RECIPES]
    run_jobs(Processes(fork_server, folder / "processes"), jobs, 1)
    return folder


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_every_recipe_has_the_losses_of_one_process(
    world: int, sharding: str, data: Path, alone: Path, tmp_path: Path, processes: Processes
) -> None:
    run_jobs(processes, [job(recipe, data, tmp_path / recipe, sharding) for recipe in ALL_RECIPES], world)
    for recipe in ALL_RECIPES:
        run, other = tmp_path / recipe, alone / recipe
        np.testing.assert_allclose(losses_of(run), losses_of(other), rtol=0, atol=1e-5, err_msg=recipe)
        ours, theirs = ([row["gradient_norm"] for row in read_metrics(folder)] for folder in (run, other))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, err_msg=recipe)
        weights, expected = tensors_of(run), tensors_of(other)
        assert {name: tensor.shape for name, tensor in weights.items()} == {n: t.shape for n, t in expected.items()}
