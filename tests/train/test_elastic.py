"""Under torchrun: a rank is killed, the job starts again by itself and ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from maglev.runs import METRICS
from tests.processes import ROOT, Processes, free_ports, until
from tests.small_runs import FAST, assert_same_tensors, losses_of, train_arguments
from tests.train.test_sharding import run_jobs


@contextmanager
def torchrun(arguments: list[str], stderr: Path) -> Iterator[subprocess.Popen[str]]:
    with open(stderr, "w") as said:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True)
        try:
            yield job
        finally:
            # torchrun ends its ranks when it is asked to end
            job.terminate()
            job.wait(60)


def worker_of(torchrun: int, rank: int) -> int | None:
    """The process that torchrun started as that rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"PPid:\t(\d+)", (folder / "status").read_text())
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent is not None and int(parent[1]) == torchrun and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    return None


def kill_rank_1(torchrun: int, run: Path, at: int) -> None:
    """When step `at` is done."""
    until((run / METRICS).exists, 100)
    until(lambda: worker_of(torchrun, 1) is not None)
    worker = worker_of(torchrun, 1)
    assert worker is not None
    until(lambda: len(losses_of(run)) >= at, 100)
    os.kill(worker, signal.SIGKILL)
    until(lambda: worker_of(torchrun, 1) != worker)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")
@pytest.mark.parametrize(
    ("sharding", "kills"), [("full", 1), *(pytest.param(mode, 3, marks=pytest.mark.soak) for mode in ("none", "full"))]
)
def test_a_killed_rank_is_started_again(
    sharding: str, kills: int, data: Path, tmp_path: Path, processes: Processes
) -> None:
    """Two ranks have one order of every sum, so the result is the same to the bit."""
    settings = FAST | {"train.sharding": sharding, "train.steps": 60 * kills, "train.checkpoint_every": 10}
    plain, run, recipe = tmp_path / "plain", tmp_path / "run", "maglev-shared-0.1"
    run_jobs(processes, [train_arguments(recipe, data, plain, settings)], 2)

    arguments = train_arguments(recipe, data, run, settings, "--resume", "--json")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(kills)]
    with torchrun([*options, "-m", "maglev", *arguments], tmp_path / "stderr") as job:
        for kill in range(kills):
            kill_rank_1(job.pid, run, at=60 * kill + 25)
        output, _ = job.communicate(timeout=200)
    said = (tmp_path / "stderr").read_text()
    assert job.returncode == 0, said
    assert json.loads(output)["finished"] is True
    assert len(re.findall(r"resumed at step \d+0 of", said)) == kills
    assert losses_of(run) == losses_of(plain)
    assert_same_tensors(run, plain)


@pytest.mark.soak
def test_a_rank_killed_on_one_of_two_machines(data: Path, tmp_path: Path, processes: Processes) -> None:
    """Two torchruns, which count their restarts each for itself; the ranks still find each other."""
    settings = FAST | {"train.sharding": "full", "train.steps": 150, "train.checkpoint_every": 10}
    plain, run, recipe = tmp_path / "plain", tmp_path / "run", "maglev-shared-0.1"
    run_jobs(processes, [train_arguments(recipe, data, plain, settings)], 2)
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "test"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}"]
    arguments = [*options, "-m", "maglev", *train_arguments(recipe, data, run, settings, "--resume")]
    with torchrun(arguments, tmp_path / "first") as first, torchrun(arguments, tmp_path / "second") as second:
        until(lambda: any(worker_of(job.pid, 1) for job in (first, second)), 100)
        for at in (25, 80):
            holder = next(job for job in (first, second) if worker_of(job.pid, 1))
            kill_rank_1(holder.pid, run, at)
            until(lambda: any(worker_of(job.pid, 1) for job in (first, second)), 100)
        assert [job.wait(200) for job in (first, second)] == [0, 0]
    assert losses_of(run) == losses_of(plain)
    assert_same_tensors(run, plain)
