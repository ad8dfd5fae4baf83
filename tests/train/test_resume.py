"""Killed, interrupted, damaged, out of space: after --resume a run ends as if nothing had happened."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maglev import checkpoint
from maglev.runs import read_metrics
from maglev.train import launch
from maglev.train.loop import Trainer
from tests.processes import Processes, until
from tests.small_runs import (
    FAST,
    SMALL,
    Unwatched,
    assert_same_tensors,
    flip_byte,
    losses_of,
    train_arguments,
)

RECIPE = "maglev-shared-0.1"
SETTINGS = FAST | {"train.steps": 12, "train.checkpoint_every": 2, "train.validate_every": 4}

# Dies at the n-th call that touches the run's files, from the claim of the folder to the last checkpoint.
DIE_AT_CALL = """
import os, signal, sys
left = {number}
def count_down(event, arguments):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree") and {mark!r} in str(arguments):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count_down)
"""
NEVER_SAVED = """
import time
from maglev import checkpoint
checkpoint.save = lambda *arguments: time.sleep(60)
"""
SLOW = """
import time
from maglev.train.loop import Trainer
quick = Trainer.one_step
Trainer.one_step = lambda self: (time.sleep(0.03), quick(self))
"""
# Waits before step 6 for a signal: for one that is noted, or for its end.
WAITING = """
import time
from maglev.train.loop import Trainer
from maglev.train.signals import Interruption
arrived, quick, note = [], Trainer.one_step, Interruption.note
def noted(self, number, frame):
    arrived.append(number)
    note(self, number, frame)
def one_step(self):
    while self.progress.step == 5 and not arrived:
        time.sleep(0.005)
    quick(self)
Interruption.note, Trainer.one_step = noted, one_step
"""


def undisturbed(data: Path, run: Path, settings: dict[str, Any]) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maglev.train.loop.matrix_rate", lambda device, dtype: 1e12)
        launch.train(RECIPE, data, run, Unwatched(), depth=1, settings=SMALL | settings)
    return run


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without any disturbance."""
    return undisturbed(data, tmp_path_factory.mktemp("plain") / "run", SETTINGS)


def assert_as_if_nothing_had_happened(run: Path, plain: Path) -> None:
    assert losses_of(run) == losses_of(plain)
    steps = [(row["kind"], row["step"]) for row in read_metrics(run)]
    assert len(set(steps)) == len(steps) and sorted(steps) == sorted(
        (row["kind"], row["step"]) for row in read_metrics(plain)
    )
    assert_same_tensors(run, plain)
    assert not list(run.rglob(".partial-*"))
    ours, theirs = (bits_per_byte(folder) for folder in (run, plain))
    assert ours == theirs


def bits_per_byte(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == "validation"]


def resume_arguments(data: Path, run: Path, settings: dict[str, Any] | None = None) -> list[str]:
    return train_arguments(RECIPE, data, run, SETTINGS | (settings or {}), "--resume", "--json")


@pytest.mark.parametrize("kills", [3, *(pytest.param(count, marks=pytest.mark.soak) for count in (10, 11, 12, 100))])
def test_killed_at_random_moments(kills: int, data: Path, tmp_path: Path, processes: Processes) -> None:
    """Every second time at a call that touches the checkpoints, so while saving; else by the clock."""
    run, chance = tmp_path / "run", random.Random(kills)
    settings = SETTINGS | {"train.steps": 20 * kills}
    plain = undisturbed(data, tmp_path / "plain", settings)
    arguments = resume_arguments(data, run, settings)
    killed = 0
    while killed < kills:
        if killed % 2:
            before = DIE_AT_CALL.format(number=chance.randint(1, 30), mark="checkpoints")
            process = processes.start(arguments, before=before)
        else:
            process = processes.start(arguments, before=SLOW)
            until((run / "config.json").exists)
            time.sleep(chance.uniform(0, 0.5))
            process.kill()
        # only a machine that stands still lets one get to the end
        status = process.wait()
        assert status == -signal.SIGKILL or (status == 0 and killed >= 2), process.stderr
        killed += 1
    done = processes.run(arguments)
    assert json.loads(done.stdout)["finished"] is True
    assert_as_if_nothing_had_happened(run, plain)


@pytest.mark.parametrize("mark", ["checkpoints", "metrics.jsonl", "config.json"])
def test_killed_at_each_call_that_touches(
    mark: str, data: Path, plain: Path, tmp_path: Path, processes: Processes
) -> None:
    """One process after another dies at a later call, until one gets through."""
    run = tmp_path / "run"
    deaths = 0
    for number in range(1, 200, 7 if mark == "checkpoints" else 1):
        before = DIE_AT_CALL.format(number=number, mark=mark)
        process = processes.start(resume_arguments(data, run), before=before)
        status = process.wait()
        assert status in (0, -signal.SIGKILL), process.stderr
        if status == 0:
            break
        deaths += 1
    assert deaths >= 1
    assert_as_if_nothing_had_happened(run, plain)


def test_killed_before_anything_was_saved(data: Path, plain: Path, tmp_path: Path, processes: Processes) -> None:
    """--resume begins at step 0 where there is no checkpoint yet, and no row stands twice."""
    run = tmp_path / "run"
    process = processes.start(resume_arguments(data, run), before=NEVER_SAVED)
    until(lambda: len(read_metrics(run)) == 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert checkpoint.list_checkpoints(run) == []
    # a line cut short in the middle, as by a kill
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 3, "tot')
    processes.run(resume_arguments(data, run))
    assert_as_if_nothing_had_happened(run, plain)


def wait_for_step(run: Path, step: int) -> None:
    until(lambda: any(row["step"] >= step for row in read_metrics(run)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_and_leave(number: int, data: Path, plain: Path, tmp_path: Path, processes: Processes) -> None:
    run = tmp_path / "run"
    settings = {"train.checkpoint_every": 1000}
    process = processes.start(resume_arguments(data, run, settings), before=WAITING)
    wait_for_step(run, 5)
    process.kill(number)
    assert process.wait() == 128 + number
    summary = json.loads(process.stdout)
    assert summary["signal"] == number and summary["finished"] is False
    # it came after the row of step 5 was written, so before step 6 or in it
    step = summary["step"]
    assert step in (5, 6) and f"stopped at step {step} and saved" in process.stderr and "--resume" in process.stderr
    assert [own for own, _ in checkpoint.list_checkpoints(run)] == [step] and len(losses_of(run)) == step
    processes.run(resume_arguments(data, run, settings))
    assert_as_if_nothing_had_happened(run, plain)


def test_a_second_ctrl_c_leaves_at_once(data: Path, tmp_path: Path, processes: Processes) -> None:
    """The first one saves, which takes its time here."""
    run = tmp_path / "run"
    marker = tmp_path / "saving"
    slow = (
        f"import time, pathlib\nfrom maglev import checkpoint\n"
        f"checkpoint.save = lambda *a: (pathlib.Path({str(marker)!r}).touch(), time.sleep(60))\n"
    )
    process = processes.start(resume_arguments(data, run, {"train.checkpoint_every": 1000}), before=WAITING + slow)
    wait_for_step(run, 5)
    process.kill(signal.SIGINT)
    until(marker.exists)
    process.kill(signal.SIGINT)
    assert process.wait(seconds=10) == 130
    assert process.error == "maglev: interrupted" and process.stdout == ""


def test_resuming_a_finished_run_changes_nothing(data: Path, plain: Path, tmp_path: Path, processes: Processes) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    done = processes.run(resume_arguments(data, run))
    assert json.loads(done.stdout)["finished"] is True
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    assert after == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name"),
    [(cut, "optimizer.safetensors"), (flip_byte, "decoder.safetensors"), (flip_byte, "state.json")],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: Callable[[Path], None], name: str, data: Path, plain: Path, tmp_path: Path, processes: Processes
) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    damage(run / "checkpoints" / "step-00000012" / name)
    done = processes.run(resume_arguments(data, run))
    lines = [line for line in done.stderr.splitlines() if "damaged" in line]
    assert len(lines) == 1 and "step-00000012" in lines[0] and name in lines[0]
    assert "resumed at step 10 of 12" in done.stderr
    assert_as_if_nothing_had_happened(run, plain)


def test_where_no_checkpoint_is_whole_the_run_is_refused(
    data: Path, plain: Path, tmp_path: Path, processes: Processes
) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    for _, folder in checkpoint.list_checkpoints(run):
        flip_byte(folder / "decoder.safetensors")
    refused = processes.run(resume_arguments(data, run), status=1)
    assert "none of the 2 checkpoints" in refused.error
    assert losses_of(run) == losses_of(plain)


def test_a_flipped_shard_is_named_and_refused(data: Path, plain: Path, tmp_path: Path, processes: Processes) -> None:
    folder, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, folder)
    shutil.copytree(plain, run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    flip_byte(folder / "train-00000.tokens.npy")
    refused = processes.run(resume_arguments(folder, run), status=1)
    assert "train-00000.tokens.npy: damaged" in refused.error
    # nothing is lost: with the data restored it goes on
    shutil.copy(data / "train-00000.tokens.npy", folder)
    processes.run(resume_arguments(folder, run))
    assert_as_if_nothing_had_happened(run, plain)


def test_the_number_of_threads_is_stored_and_restored(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_speed: None
) -> None:
    before, seen = torch.get_num_threads(), []
    plain_step = Trainer.one_step

    def spy(self: Trainer) -> None:
        seen.append(torch.get_num_threads())
        plain_step(self)

    monkeypatch.setattr(Trainer, "one_step", spy)
    run = tmp_path / "run"

    def train(threads: int, resume: bool, **settings: Any) -> list[int]:
        seen.clear()
        torch.set_num_threads(threads)
        launch.train(RECIPE, data, run, Unwatched(), depth=1, settings=SMALL | settings, resume=resume)
        return sorted(set(seen))

    try:
        assert train(2, resume=False) == [2]
        assert json.loads((run / "checkpoints/step-00000006/state.json").read_text())["threads"] == 2
        shutil.rmtree(run / "checkpoints/step-00000006")
        assert train(1, resume=True) == [2]
        # unless the user says otherwise
        shutil.rmtree(run / "checkpoints/step-00000006")
        assert train(2, resume=True, **{"train.threads": 1}) == [1]
    finally:
        torch.set_num_threads(before)


def test_another_default_of_threads_does_not_change_a_bit(
    data: Path, plain: Path, tmp_path: Path, processes: Processes
) -> None:
    """The run began with one thread; the process that goes on starts with two."""
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    processes.run(resume_arguments(data, run), before="import torch; torch.set_num_threads(2)")
    assert_as_if_nothing_had_happened(run, plain)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_in_bfloat16_a_resumed_run_is_the_same_up_to_rounding(
    device: str, data: Path, tmp_path: Path, without_speed: None
) -> None:
    """A GPU's kernels may add up in another order each time. On a CPU another order moves these losses by 1e-4 of
    themselves, and a lost state of the optimizer by 2 to 7%: what bfloat16 rounds a number by lies between the two.
    """
    run, again = tmp_path / "run", tmp_path / "again"
    settings = SETTINGS | {"model.context": 128, "model.window": 32, "train.tokens_per_step": 512}
    settings |= {"train.precision": "bfloat16", "train.device": device, "train.checkpoint_every": 6}
    settings |= {"train.validate_every": 0}

    def train(run: Path, resume: bool) -> Path:
        launch.train(RECIPE, data, run, Unwatched(), depth=2, settings=SMALL | settings, resume=resume)
        return run

    train(run, resume=False)
    shutil.copytree(run, again)
    shutil.rmtree(again / "checkpoints" / "step-00000012")
    train(again, resume=True)
    states = [json.loads((each / "checkpoints/step-00000012/state.json").read_text()) for each in (run, again)]
    assert states[0]["rows_per_pass"] == states[1]["rows_per_pass"] > 0
    ours, theirs = (np.array(losses_of(each)) for each in (again, run))
    np.testing.assert_allclose(ours[:, :2], theirs[:, :2], rtol=2**-9)


def newest_step(run: Path) -> int:
    found = checkpoint.newest(run, pytest.fail)
    return 0 if found is None else found.step


def test_a_full_disk_ends_in_one_line_and_loses_nothing(
    data: Path, plain: Path, tmp_path: Path, processes: Processes
) -> None:
    """A limit on the size of a file stands for the disk. It strikes the weights, then what is written at every step."""
    run = tmp_path / "run"
    arguments = resume_arguments(data, run, {"train.tensorboard": "true"})
    weights = (plain / "checkpoints" / "step-00000012" / "decoder.safetensors").stat().st_size
    full = processes.run(arguments, status=1, file_limit=weights - 1)
    assert "could not save checkpoint" in full.error and "free some space" in full.error
    assert newest_step(run) == 0

    stopped = processes.start(arguments, before=WAITING)
    wait_for_step(run, 5)
    stopped.kill()
    stopped.wait()
    step = newest_step(run)
    assert step == 4
    full = processes.run(arguments, status=1, file_limit=weights - 1)
    assert "could not save checkpoint" in full.error
    assert newest_step(run) == step
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    size = sum(len(line) for line in lines if json.loads(line)["step"] <= step)
    for limit in (size + 100, size - 100):
        full = processes.run(arguments, status=1, file_limit=limit)
        assert "could not write" in full.error and ("metrics.jsonl" in full.error or "tensorboard" in full.error)
        assert newest_step(run) == step
    processes.run(arguments)
    assert_as_if_nothing_had_happened(run, plain)


def test_a_disk_that_is_full_from_the_start(data: Path, tmp_path: Path, processes: Processes) -> None:
    run = tmp_path / "run"
    full = processes.run(train_arguments(RECIPE, data, run), status=1, file_limit=3000)
    assert "could not write" in full.error and "free some space" in full.error
    # what was begun does not stand in the way
    processes.run(train_arguments(RECIPE, data, run))
    assert newest_step(run) == 6


def test_only_one_process_trains_a_run(data: Path, tmp_path: Path, processes: Processes) -> None:
    run = tmp_path / "run"
    first = processes.start(resume_arguments(data, run), before=WAITING)
    wait_for_step(run, 5)
    second = processes.run(resume_arguments(data, run), status=2)
    assert "is being trained by another process" in second.error
    first.kill(signal.SIGTERM)
    assert first.wait() == 143
    processes.run(resume_arguments(data, run))
