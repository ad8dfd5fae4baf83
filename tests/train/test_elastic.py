"""Under torchrun: a rank is killed, the job starts again by itself and ends as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maglev.runs import METRICS
from tests.processes import ROOT, Processes, until
from tests.small_runs import FAST, assert_same_tensors, losses_of, train_arguments
from tests.train.test_sharding import run_jobs

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


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
    command = [*TORCHRUN, "--max-restarts", str(kills), "-m", "maglev", *arguments]
    with open(tmp_path / "stderr", "w") as stderr:
        job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            for kill in range(kills):
                until((run / METRICS).exists, 100)
                until(lambda: worker_of(job.pid, 1) is not None)
                worker = worker_of(job.pid, 1)
                assert worker is not None
                until(lambda kill=kill: len(losses_of(run)) >= 60 * kill + 25, 100)
                os.kill(worker, signal.SIGKILL)
                until(lambda worker=worker: worker_of(job.pid, 1) != worker)
            output, _ = job.communicate(timeout=200)
        finally:
            # torchrun ends its ranks when it is asked to end
            job.terminate()
            job.wait(60)
    said = (tmp_path / "stderr").read_text()
    assert job.returncode == 0, said
    assert json.loads(output)["finished"] is True
    assert len(re.findall(r"resumed at step \d+0 of", said)) == kills
    assert losses_of(run) == losses_of(plain)
    assert_same_tensors(run, plain)
