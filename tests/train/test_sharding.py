"""Parameters divided over ranks: the losses of one process, checkpoints that go on on any number of ranks."""

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maglev import checkpoint
from maglev.runs import read_metrics
from tests.helpers import ALL_RECIPES
from tests.processes import Process, Processes, Server, free_ports, until
from tests.small_runs import FAST, assert_same_tensors, flip_byte, losses_of, tensors_of, train_arguments

RECIPE = "maglev-shared-0.1"
# one row per pass: two passes per step on two ranks, four in one process
SETTINGS = FAST | {"train.rows_per_pass": 1, "train.checkpoint_every": 3}
PATIENCE = 60


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


def start_jobs(processes: Processes, jobs: list[list[str]], world: int, before: str = "") -> list[Process]:
    """All jobs one after another in the same `world` processes."""
    ports = free_ports(len(jobs))
    before += ONE_AFTER_ANOTHER.format(jobs=list(zip(ports, jobs))[:-1], last=ports[-1])
    places: list[dict[str, Any]] = [
        {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"} for rank in range(world)
    ]
    return [processes.start(jobs[-1], before=before, **(place if world > 1 else {})) for place in places]


def run_jobs(processes: Processes, jobs: list[list[str]], world: int) -> None:
    for process in start_jobs(processes, jobs, world):
        assert process.wait(PATIENCE) == 0, process.stderr


def job(recipe: str, data: Path, run: Path, sharding: str = "none", *more: str, **settings: Any) -> list[str]:
    chosen = SETTINGS | {"train.sharding": sharding} | {f"train.{name}": value for name, value in settings.items()}
    return train_arguments(recipe, data, run, chosen, *more, depth=2)


FEW = {"steps": 4, "checkpoint_every": 4}


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory, fork_server: Server) -> Path:
    """Every recipe in one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "processes").mkdir()
    jobs = [job(recipe, data, folder / recipe, **FEW) for recipe in ALL_RECIPES]
    run_jobs(Processes(fork_server, folder / "processes"), jobs, 1)
    return folder


ONE_OF_EACH_KIND = ("swa-ssss", "lrt-ssss", "maglev-shared-0.1", "maglev-separate-0.1", "maglev-closed")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_every_recipe_has_the_losses_of_one_process(
    world: int, data: Path, alone: Path, tmp_path: Path, processes: Processes
) -> None:
    """Two layers: with one, nothing lies between the scales and the norm that does not see them."""
    modes = ("none", "full")
    recipes = ALL_RECIPES if world == 2 else ONE_OF_EACH_KIND
    jobs = [job(recipe, data, tmp_path / f"{recipe}-{mode}", mode, **FEW) for recipe in recipes for mode in modes]
    run_jobs(processes, jobs, world)
    for recipe in recipes:
        norms = [row["gradient_norm"] for row in read_metrics(alone / recipe)]
        shapes = {name: tensor.shape for name, tensor in tensors_of(alone / recipe).items()}
        for run in (tmp_path / f"{recipe}-{mode}" for mode in modes):
            np.testing.assert_allclose(losses_of(run), losses_of(alone / recipe), rtol=0, atol=1e-5, err_msg=run.name)
            np.testing.assert_allclose([row["gradient_norm"] for row in read_metrics(run)], norms, rtol=1e-3)
            assert {name: tensor.shape for name, tensor in tensors_of(run).items()} == shapes


OPTIONS = {
    "attention": ("maglev-separate-0.1", "objective.sharing=attention"),
    "cross_attention": (RECIPE, "model.injection=cross_attention"),
}


def test_options_have_the_losses_of_one_process(data: Path, tmp_path: Path, processes: Processes) -> None:
    """What is borrowed in part, and what lies in blocks beside the usual, is gathered in time."""

    def jobs(folder: str, mode: str) -> list[list[str]]:
        return [
            job(recipe, data, tmp_path / folder / name, mode, "--set", setting, **FEW)
            for name, (recipe, setting) in OPTIONS.items()
        ]

    run_jobs(processes, jobs("alone", "none"), 1)
    run_jobs(processes, jobs("divided", "full"), 2)
    for name in OPTIONS:
        expected = losses_of(tmp_path / "alone" / name)
        np.testing.assert_allclose(losses_of(tmp_path / "divided" / name), expected, rtol=0, atol=1e-5, err_msg=name)


def half_of(run: Path, copy: Path) -> Path:
    """The run as it was at its first checkpoint, in a folder of its own."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return copy


def test_a_checkpoint_goes_on_on_any_number_of_ranks_in_either_mode(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    """From one rank to two, from two to one, two and four; validation sees the weights of all ranks."""
    modes, more = ("none", "full"), {"validate_every": 3}
    runs = {"1-none": tmp_path / "1-none", "2-none": tmp_path / "2-none", "2-full": tmp_path / "2-full"}
    run_jobs(processes, [job(RECIPE, data, runs["1-none"], **more)], 1)
    run_jobs(processes, [job(RECIPE, data, runs[f"2-{mode}"], mode, **more) for mode in modes], 2)
    resumed = {}
    for world in (1, 2, 4):
        jobs = []
        for source, run in runs.items():
            if source.startswith("1") and world != 2:
                continue
            for mode in modes if world > 1 else ("none",):
                copy = half_of(run, tmp_path / f"{source}-to-{world}-{mode}")
                resumed[source, f"{world}-{mode}"] = copy
                jobs.append(job(RECIPE, data, copy, mode, "--resume", **more))
        run_jobs(processes, jobs, world)
    alone, keys = runs["1-none"], ("bpb_recurrent", "bpb_lifted")
    for (source, target), run in resumed.items():
        assert [row["step"] for row in read_metrics(run) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
        np.testing.assert_allclose(losses_of(run), losses_of(alone), rtol=0, atol=1e-5, err_msg=run.name)
        ours, theirs = ([row[key] for row in read_metrics(r) for key in keys if key in row] for r in (run, alone))
        assert len(ours) == 4
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4, err_msg=run.name)
        # the same ranks in the same mode: the same arithmetic, so the same bits
        if source == target:
            assert losses_of(run) == losses_of(runs[source])
            assert_same_tensors(run, runs[source])


NOT_CHECKED_HERE = """
from maglev import checkpoint
def find_damage(folder):
    raise AssertionError("read all of " + str(folder))
checkpoint.find_damage = find_damage
"""


def test_one_rank_checks_what_all_of_them_load(data: Path, tmp_path: Path, processes: Processes) -> None:
    """A damaged checkpoint is loaded by none, whichever file it is; the others read only what they need."""
    damaged = {"none": "decoder.safetensors", "full": "optimizer.00001.safetensors"}
    plain = {mode: tmp_path / f"plain-{mode}" for mode in damaged}
    run_jobs(processes, [job(RECIPE, data, run, mode) for mode, run in plain.items()], 2)
    for mode, name in damaged.items():
        shutil.copytree(plain[mode], tmp_path / mode)
        flip_byte(tmp_path / mode / "checkpoints" / "step-00000006" / name)
    jobs = [job(RECIPE, data, tmp_path / mode, mode, "--resume") for mode in damaged]
    ranks = start_jobs(processes, jobs, 2, on_rank(1, NOT_CHECKED_HERE))
    assert [process.wait(PATIENCE) for process in ranks] == [0, 0], [process.stderr for process in ranks]
    said = ranks[0].stderr
    assert all(f"is damaged: {name} does not match" in said for name in damaged.values()) and ranks[1].stderr == ""
    assert said.count("resumed at step 3 of 6") == 2
    for mode, run in plain.items():
        assert losses_of(tmp_path / mode) == losses_of(run)
        assert_same_tensors(tmp_path / mode, run)


def test_a_divided_run_starts_from_a_divided_decoder(data: Path, tmp_path: Path, processes: Processes) -> None:
    swa, more = tmp_path / "swa", {"init_from": tmp_path / "swa", "steps": 3}
    jobs = [job("swa-ssss", data, swa, "full"), job(RECIPE, data, tmp_path / "run", "full", **more)]
    run_jobs(processes, jobs, 2)
    run_jobs(processes, [job(RECIPE, data, tmp_path / "alone", **more)], 1)
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(tmp_path / "alone"), rtol=0, atol=1e-5)
    assert losses_of(tmp_path / "run")[0][1] < losses_of(swa)[0][1]


def on_rank(rank: int, work: str) -> str:
    return f"import os\nif os.environ.get('RANK', '0') == '{rank}':\n    exec({work!r}, {{}})\n"


NO_ROOM = """
import torch
from maglev.objectives.maglev import MaglevObjective
plain = MaglevObjective.forward
def forward(self, tokens, *others):
    if len(tokens) > {fits}:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return plain(self, tokens, *others)
MaglevObjective.forward = forward
"""


def assert_nothing_was_saved(run: Path, step: int = 0) -> None:
    found = checkpoint.newest(run, pytest.fail)
    assert (found.step if found else 0) == step
    assert not list(run.rglob(".partial-*"))


def test_out_of_memory_says_what_to_set(data: Path, tmp_path: Path, processes: Processes) -> None:
    """In one process; on one of two ranks, where the other learns of it at once; where nothing smaller is left."""
    run = tmp_path / "run"
    arguments = job(RECIPE, data, run, rows_per_pass=4)
    alone = processes.run(arguments, status=1, before=NO_ROOM.format(fits=2))
    assert "passes of 4 rows do not fit" in alone.error and "2 fit: set it to that, or leave it away" in alone.error
    assert_nothing_was_saved(run)
    processes.run(job(RECIPE, data, run, "none", "--resume", rows_per_pass=2), before=NO_ROOM.format(fits=2))

    for mode in ("none", "full"):
        run = tmp_path / mode
        ranks = start_jobs(processes, [job(RECIPE, data, run, mode)], 2, on_rank(1, NO_ROOM.format(fits=0)))
        assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
        # divided parameters travel inside of a pass: there rank 0 learns that rank 1 is gone, and finds what it left
        whose = "rank 1: " if mode == "full" else ""
        assert f"maglev: {whose}out of memory on cpu: not even a micro-batch of one row fits" in ranks[0].error
        assert_nothing_was_saved(run)


GUESS = """
import os
from maglev.train import passes
passes.rows_per_pass = lambda *given: 2 - int(os.environ["RANK"])
"""


def test_ranks_that_guess_differently_take_the_smallest(
    data: Path, alone: Path, tmp_path: Path, processes: Processes
) -> None:
    """By the memory that is free: other numbers of passes would wait for each other in vain."""
    jobs = [job(RECIPE, data, tmp_path / mode, mode, **FEW) for mode in ("none", "full")]
    for process in start_jobs(processes, jobs, 2, GUESS):
        assert process.wait(PATIENCE) == 0, process.stderr
    for mode in ("none", "full"):
        np.testing.assert_allclose(losses_of(tmp_path / mode), losses_of(alone / RECIPE), rtol=0, atol=1e-5)


TOO_SMALL = """
from maglev.train import passes
class Memory:
    def usable(self): return 150
    def held(self): return 0
    def peak_of(self, work):
        work()
        return {peak}
def forward(self, part, *rest, plain=passes.Passes.forward):
    passes.TRIED = len(part.tokens)
    return plain(self, part, *rest)
passes.Passes.forward = forward
passes.memory_of = lambda device: Memory()
"""


def test_a_micro_batch_that_ranks_cannot_take_back_is_tried_first(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    """One that is fixed and runs is taken, be it ever so near to the limit."""
    lacking = TOO_SMALL.format(peak="None if passes.TRIED > 1 else 100")
    ranks = start_jobs(processes, [job(RECIPE, data, tmp_path / "run", rows_per_pass=2)], 2, lacking)
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "passes of 2 rows do not fit into the memory of cpu; 1 fit: set it to that" in ranks[0].error
    assert ranks[1].stderr == "" and losses_of(tmp_path / "run") == []
    tight = TOO_SMALL.format(peak="100 * passes.TRIED")
    for process in start_jobs(processes, [job(RECIPE, data, tmp_path / "tight", rows_per_pass=2, **FEW)], 2, tight):
        assert process.wait(PATIENCE) == 0, process.stderr


FULL = """
from maglev import checkpoint
def full(*arguments):
    raise OSError(28, "No space left on device")
plain, count = checkpoint.write_tensors, [0]
def write_tensors(path, named):
    if path.name.startswith("optimizer"):
        count[0] += 1
        if count[0] == 2:
            {work}
    plain(path, named)
checkpoint.write_tensors = write_tensors
"""


@pytest.mark.parametrize(
    ("work", "status"),
    [("full()", 1), ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
    ids=["full disk", "killed"],
)
def test_a_rank_that_cannot_write_its_part_leaves_the_checkpoint_before(
    work: str, status: int, data: Path, tmp_path: Path, processes: Processes
) -> None:
    plain, run = tmp_path / "plain", tmp_path / "run"
    run_jobs(processes, [job(RECIPE, data, plain, "full")], 2)
    ranks = start_jobs(processes, [job(RECIPE, data, run, "full")], 2, on_rank(1, FULL.format(work=work)))
    assert [process.wait(PATIENCE) for process in ranks] == [1, status]
    if status == 1:
        assert "rank 1: could not save checkpoint" in ranks[0].error and "maglev:" not in ranks[1].stderr
    else:
        assert "rank 0 lost another rank" in ranks[0].error
    assert_nothing_was_saved(run, step=3)
    run_jobs(processes, [job(RECIPE, data, run, "full", "--resume")], 2)
    assert losses_of(run) == losses_of(plain)
    assert_same_tensors(run, plain)


def test_a_rank_that_stands_still_is_not_waited_for_without_end(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    run = tmp_path / "run"
    ranks = start_jobs(processes, [job(RECIPE, data, run, "full", steps=100_000, timeout=5)], 2)
    until(lambda: len(losses_of(run)) > 2)
    ranks[1].kill(signal.SIGSTOP)
    assert ranks[0].wait(PATIENCE) == 1
    assert "rank 0 lost another rank, which did not answer within train.timeout" in ranks[0].error
    assert "--resume" in ranks[0].error
    ranks[1].kill()
    ranks[1].wait()


def test_ranks_that_disagree_on_sharding_say_so_once(data: Path, tmp_path: Path, processes: Processes) -> None:
    port = free_ports(1)[0]
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        processes.start(job(RECIPE, data, tmp_path / "run", mode), RANK=rank, LOCAL_RANK=rank, **place)
        for rank, mode in enumerate(("none", "full"))
    ]
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "ranks do not agree on the configuration: rank 1 differs from rank 0" in ranks[0].error
    assert ranks[1].stderr == "" and not (tmp_path / "run").exists()


@pytest.mark.soak
def test_compiled_blocks_are_divided_too(data: Path, tmp_path: Path, processes: Processes) -> None:
    run_jobs(processes, [job(RECIPE, data, tmp_path / "alone")], 1)
    ranks = start_jobs(processes, [job(RECIPE, data, tmp_path / "run", "full", compile="on")], 2)
    assert [process.wait(600) for process in ranks] == [0, 0]
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(tmp_path / "alone"), rtol=0, atol=1e-5)
