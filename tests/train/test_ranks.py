"""Several ranks train as one process does, and end together, whichever of them is in trouble."""

import json
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from maglev import checkpoint
from maglev.data.loader import Loader
from maglev.data.shards import open_data
from maglev.runs import read_metrics
from tests.processes import Process, Processes, free_ports, until
from tests.small_runs import FAST, assert_same_tensors, flip_byte, losses_of, tensors_of, train_arguments

# an all-reduce that waits in vain must not outlive the test
PATIENCE = 30


def place(rank: int, world: int, port: int) -> dict[str, Any]:
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def start_ranks(processes: Processes, arguments: list[list[str]], before: str = "") -> list[Process]:
    """One process per list of arguments."""
    port = free_ports(1)[0]
    return [
        processes.start(own, before=before, **place(rank, len(arguments), port)) for rank, own in enumerate(arguments)
    ]


def run_ranks(processes: Processes, arguments: list[str], world: int = 2, before: str = "") -> list[Process]:
    ranks = start_ranks(processes, [arguments] * world, before)
    for process in ranks:
        assert process.wait(PATIENCE) == 0, process.stderr
    return ranks


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "lrt-ssss"])
def test_two_ranks_give_the_losses_of_one_process(
    recipe: str, data: Path, tmp_path: Path, processes: Processes
) -> None:
    """With validation, and a checkpoint that goes on with one process."""
    settings = FAST | {"train.validate_every": 3, "train.steps": 6}
    processes.run(train_arguments(recipe, data, tmp_path / "one", settings))
    ranks = run_ranks(processes, train_arguments(recipe, data, tmp_path / "two", settings, "--json"))
    one, two = tmp_path / "one", tmp_path / "two"
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=0, atol=1e-5)
    for name in ("gradient_norm", "tokens", "bpb_recurrent"):
        ours, theirs = ([row[name] for row in read_metrics(run) if name in row] for run in (two, one))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    # rank 0 speaks for both
    assert json.loads(ranks[0].stdout)["finished"] is True and "bits per byte recurrent" in ranks[0].stderr
    assert (ranks[1].stdout, ranks[1].stderr) == ("", "")

    theirs = {name: tensor.shape for name, tensor in tensors_of(one).items()}
    assert {name: tensor.shape for name, tensor in tensors_of(two).items()} == theirs
    shutil.rmtree(two / "checkpoints" / "step-00000006")
    processes.run(train_arguments(recipe, data, two, settings, "--resume"))
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=0, atol=1e-5)
    assert [row["step"] for row in read_metrics(two) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_run_of_one_process_goes_on_with_two_ranks(data: Path, tmp_path: Path, processes: Processes) -> None:
    run, recipe = tmp_path / "run", "maglev-separate-0.1"
    processes.run(train_arguments(recipe, data, run, FAST))
    before = losses_of(run)
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    run_ranks(processes, train_arguments(recipe, data, run, FAST, "--resume"))
    np.testing.assert_allclose(losses_of(run), before, rtol=0, atol=1e-5)


def test_ranks_that_disagree_say_so_once(data: Path, tmp_path: Path, processes: Processes) -> None:
    other = tmp_path / "data"
    shutil.copytree(data, other)
    index = json.loads((other / "index.json").read_text())
    index["splits"]["validation"][0]["bytes"] += 1
    (other / "index.json").write_text(json.dumps(index))
    for number, (mine, theirs, what) in enumerate(
        (
            (
                (data, {}),
                (data, {"train.seed": 1}),
                "configuration: rank 1 differs from rank 0 in train.seed (1 and 0)",
            ),
            ((data, {}), (other, {}), "data: rank 1 differs from rank 0"),
        )
    ):
        run = tmp_path / f"run{number}"
        arguments = [train_arguments("swa-ssss", folder, run, settings) for folder, settings in (mine, theirs)]
        ranks = start_ranks(processes, arguments)
        assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
        assert f"ranks do not agree on the {what}; start all of them" in ranks[0].error
        assert ranks[1].stderr == "" and not run.exists()


def test_a_wrong_request_is_told_once(data: Path, tmp_path: Path, processes: Processes) -> None:
    run = tmp_path / "run"
    ranks = start_ranks(processes, [train_arguments("swa-ssss", data, run, {"model.window": 99})] * 2)
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "model.window is 99" in ranks[0].error and ranks[1].stderr == ""
    # on one of them alone: rank 0 says it, and does not wait for it
    right, wrong = (train_arguments("swa-ssss", folder, run) for folder in (data, tmp_path / "nowhere"))
    ranks = start_ranks(processes, [right, wrong])
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "rank 1: " in ranks[0].error and "not a data folder" in ranks[0].error and ranks[1].stderr == ""
    # rank 0 looks at the folder for all
    processes.run(train_arguments("swa-ssss", data, run))
    ranks = start_ranks(processes, [right] * 2)
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "holds a run already" in ranks[0].error and ranks[1].stderr == ""


def test_ranks_whose_devices_do_not_go_together_end_before_they_wait(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    """Rank 0 says which has none, whichever it is, and does not end too early, for it keeps the meeting place."""
    run = tmp_path / "run"
    right, wrong = (train_arguments("swa-ssss", data, run, {"train.device": device}) for device in ("cpu", "tpu"))
    for bad in (0, 1):
        ranks = start_ranks(processes, [right, wrong] if bad else [wrong, right])
        assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
        assert "train.device is 'tpu'" in ranks[0].error and ranks[1].stderr == ""
        assert ("rank 1: " in ranks[0].error) == bool(bad)
    found = (
        "import torch\nfrom maglev.train import distributed\ndistributed.take_device = lambda *_: torch.device('cuda')"
    )
    ranks = start_ranks(processes, [right] * 2, on_rank(1, found))
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "rank 0 found the device cpu, and rank 1 another kind; set train.device" in ranks[0].error
    assert ranks[1].stderr == "" and not run.exists()


def test_a_wrong_time_to_wait_is_told_when_the_ranks_have_met(data: Path, tmp_path: Path, processes: Processes) -> None:
    given = [train_arguments("swa-ssss", data, tmp_path / "run", {"train.timeout": seconds}) for seconds in (60, 0)]
    ranks = start_ranks(processes, given)
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "rank 1: train.timeout is 0" in ranks[0].error and ranks[1].stderr == ""


def test_a_run_folder_that_not_all_ranks_see_is_refused(data: Path, tmp_path: Path, processes: Processes) -> None:
    """As where each machine has a disk of its own under the same name."""
    ranks = start_ranks(processes, [train_arguments("swa-ssss", data, tmp_path / name) for name in ("a", "b")])
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "RUN must be a folder that all machines see" in ranks[0].error and ranks[1].stderr == ""
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def on_rank(rank: int, work: str) -> str:
    return f"import os\nif os.environ['RANK'] == '{rank}':\n    exec({work!r})\n"


FULL = """
def full(*arguments, **named):
    raise OSError(28, "No space left on device")
"""


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (FULL + "from maglev import checkpoint\ncheckpoint.write = full", "could not save checkpoint"),
        (FULL + "from maglev.train.metrics import Appender\nAppender.write = full", "No space left"),
        (FULL + "from maglev.train import task\ntask.bits_per_byte = full", "No space left"),
    ],
)
def test_trouble_of_rank_0_ends_the_others_at_once(
    work: str, says: str, data: Path, tmp_path: Path, processes: Processes
) -> None:
    arguments = train_arguments("swa-ssss", data, tmp_path / "run", {"train.validate_every": 2})
    ranks = start_ranks(processes, [arguments] * 2, on_rank(0, work))
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert says in ranks[0].error and ranks[1].stderr == ""


def test_trouble_of_another_rank_is_told_by_rank_0(data: Path, tmp_path: Path, processes: Processes) -> None:
    """Its shard is damaged, as on a machine with its own copy of the data."""
    mine = tmp_path / "data"
    shutil.copytree(data, mine)
    content = bytearray((mine / "train-00000.tokens.npy").read_bytes())
    content[-1] ^= 1
    (mine / "train-00000.tokens.npy").write_bytes(content)
    ranks = start_ranks(processes, [train_arguments("swa-ssss", folder, tmp_path / "run") for folder in (data, mine)])
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "rank 1: " in ranks[0].error and "train-00000.tokens.npy: damaged" in ranks[0].error
    assert "maglev:" not in ranks[1].stderr


MEASURED = """
from maglev.train import fitting, passes
class Memory(fitting.CudaMemory):
    usable = held = lambda self: 0
    peak_of = lambda self, work: work()
passes.memory_of = Memory
"""
FAILING = """
import torch
from maglev.objectives.next_token import NextTokenObjective
def forward(self, *arguments):
    raise torch.AcceleratorError("CUDA error: invalid argument")
NextTokenObjective.forward = forward
"""


def test_a_kernel_that_fails_on_one_rank_while_passes_are_tried_ends_both(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    arguments = train_arguments("swa-ssss", data, tmp_path / "run")
    ranks = start_ranks(processes, [arguments] * 2, MEASURED + on_rank(1, FAILING))
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "rank 1: a kernel failed on cpu: AcceleratorError: CUDA error: invalid argument" in ranks[0].error
    assert ranks[1].stderr == ""


LATE = """
import torch
from maglev.train import passes
plain, count = passes.distributed.dist.all_reduce, []
def all_reduce(*arguments, **named):
    count.append(1)
    if len(count) > 14:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    return plain(*arguments, **named)
passes.distributed.dist.all_reduce = all_reduce
"""


def test_a_kernel_whose_failure_comes_up_in_a_message_is_told_by_its_own_rank(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    ranks = start_ranks(processes, [train_arguments("swa-ssss", data, tmp_path / "run")] * 2, on_rank(0, LATE))
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "a kernel failed on cpu" in ranks[0].error and "illegal memory access" in ranks[0].error
    assert "rank 1 lost another rank" in ranks[1].error


SLOW = """
import time
from maglev.train.loop import Trainer
quick = Trainer.one_step
Trainer.one_step = lambda self: (time.sleep(0.03), quick(self))
"""


def test_a_rank_that_is_gone_ends_the_other(data: Path, tmp_path: Path, processes: Processes) -> None:
    run = tmp_path / "run"
    ranks = start_ranks(processes, [train_arguments("swa-ssss", data, run, {"train.steps": 1000})] * 2, SLOW)
    until(lambda: len(losses_of(run)) > 2)
    ranks[1].kill()
    assert ranks[1].wait() == -signal.SIGKILL
    assert ranks[0].wait(PATIENCE) == 1
    assert "rank 0 lost another rank" in ranks[0].error and "--resume" in ranks[0].error


def test_a_signal_to_one_rank_stops_both_after_the_same_step(data: Path, tmp_path: Path, processes: Processes) -> None:
    run, settings = tmp_path / "run", {"train.steps": 1000, "train.checkpoint_every": 1000}
    ranks = start_ranks(processes, [train_arguments("swa-ssss", data, run, settings, "--json")] * 2, SLOW)
    until(lambda: len(losses_of(run)) > 2)
    ranks[1].kill(signal.SIGTERM)
    assert [process.wait(PATIENCE) for process in ranks] == [143, 143]
    step = json.loads(ranks[0].stdout)["step"]
    assert [own for own, _ in checkpoint.list_checkpoints(run)] == [step] and len(losses_of(run)) == step


NOT_A_NUMBER = """
import math
from dataclasses import replace
from maglev.objectives.next_token import NextTokenObjective
plain, count = NextTokenObjective.forward, [0]
def forward(self, *arguments):
    count[0] += 1
    losses = plain(self, *arguments)
    return replace(losses, total=losses.total * math.nan) if count[0] in {steps} else losses
NextTokenObjective.forward = forward
"""


def test_a_bad_step_of_one_rank_is_skipped_by_both(data: Path, tmp_path: Path, processes: Processes) -> None:
    """Each keeps its own rows; then one rank alone spoils every step until the run gives up."""
    run = tmp_path / "run"
    arguments = train_arguments("swa-ssss", data, run, {"train.max_bad_steps": 2})
    poison = on_rank(1, NOT_A_NUMBER.format(steps="(2,)"))
    for process in start_ranks(processes, [arguments] * 2, poison):
        assert process.wait(PATIENCE) == 0, process.stderr
    assert [row["skipped"] for row in read_metrics(run)] == [False, True, False, False, False, False]
    loader = Loader(open_data(data), "train", 32, seed=0)
    for rank in (0, 1):
        kept = load_file(run / "bad-batches" / f"step-00000002-rank-{rank}.safetensors")
        np.testing.assert_array_equal(kept["tokens"], loader.batch(range(4 + 2 * rank, 6 + 2 * rank)).tokens)

    arguments = train_arguments("swa-ssss", data, tmp_path / "hopeless", {"train.max_bad_steps": 2})
    poison = on_rank(1, NOT_A_NUMBER.format(steps="range(3, 99)"))
    ranks = start_ranks(processes, [arguments] * 2, poison)
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "not finite 2 steps in a row, up to step 4" in ranks[0].error and ranks[1].stderr == ""


SHORT = """
import torch
from maglev.objectives.maglev import MaglevObjective
from maglev.train.passes import Passes
plain, rows = {owner}.forward, []
def forward(self, part, *rest):
    rows.append(len(getattr(part, "tokens", part)))
    if rows == [{rows}]:
        {when}
    return plain(self, part, *rest)
def fail():
    raise torch.OutOfMemoryError("CUDA out of memory.")
{owner}.forward = forward
"""


TWO_ROWS = "from maglev.train import passes\npasses.rows_per_pass = lambda *given: 2\n"


@pytest.mark.parametrize(("tokens", "rows"), [(128, "2, 2, 2"), (256, "2, 2, 2, 2, 2")], ids=["last", "before"])
def test_memory_that_one_rank_lacks_makes_both_take_smaller_passes(
    tokens: int, rows: str, data: Path, tmp_path: Path, processes: Processes
) -> None:
    """In the third step, in its last pass while the other rank is through it, or in the one before."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = FAST | {"train.tokens_per_step": tokens}
    short = TWO_ROWS + on_rank(1, SHORT.format(owner="MaglevObjective", rows=rows, when="fail()"))
    processes.run(train_arguments("maglev-shared-0.1", data, one, settings))
    ranks = run_ranks(processes, train_arguments("maglev-shared-0.1", data, two, settings), before=short)
    assert "out of memory with 2 rows per pass; the step begins anew with 1" in ranks[0].stderr
    np.testing.assert_allclose(losses_of(two), losses_of(one), rtol=0, atol=1e-5)


def test_a_fixed_micro_batch_that_one_rank_lacks_memory_for_ends_both(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    """The first rank says what fits."""
    arguments = train_arguments("maglev-shared-0.1", data, tmp_path / "fixed", FAST | {"train.rows_per_pass": 2})
    short = on_rank(1, SHORT.format(owner="MaglevObjective", rows="2, 2, 2", when="fail()"))
    ranks = start_ranks(processes, [arguments] * 2, short)
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "passes of 2 rows do not fit into the memory of cpu; 1 fit" in ranks[0].error and ranks[1].stderr == ""


def test_memory_that_one_rank_lacks_where_both_meet_ends_them(data: Path, tmp_path: Path, processes: Processes) -> None:
    """In the backward that sums gradients: the other one waits for them already."""
    arguments = train_arguments("maglev-shared-0.1", data, tmp_path / "run", FAST)
    short = on_rank(1, SHORT.format(owner="Passes", rows="2, 2, 2", when="return fail"))
    ranks = start_ranks(processes, [arguments] * 2, short)
    assert [process.wait(PATIENCE) for process in ranks] == [1, 1]
    assert "out of memory on cpu with 2 rows" in ranks[1].error and "train.rows_per_pass=1" in ranks[1].error
    assert "maglev: rank 1: out of memory on cpu with 2 rows" in ranks[0].error
    found = checkpoint.newest(tmp_path / "run", pytest.fail)
    assert found is not None and found.step == 2


def test_trouble_in_what_one_rank_alone_opens_ends_both_at_once(
    data: Path, tmp_path: Path, processes: Processes
) -> None:
    """What is held back for validation is read by rank 0 alone."""
    shutil.copytree(data, tmp_path / "data")
    (shard,) = (tmp_path / "data").glob("validation-*.tokens.npy")
    flip_byte(shard)
    settings = FAST | {"train.validate_every": 3, "train.timeout": 600}
    arguments = train_arguments("swa-ssss", tmp_path / "data", tmp_path / "run", settings)
    ranks = start_ranks(processes, [arguments] * 2)
    assert {process.wait(PATIENCE) for process in ranks} <= {1, 2}
    assert shard.name in ranks[0].error and ranks[1].stderr == ""


def test_ranks_need_a_meeting_place(data: Path, tmp_path: Path, processes: Processes) -> None:
    arguments = train_arguments("swa-ssss", data, tmp_path / "run")
    alone = processes.run(arguments, status=2, RANK=0, LOCAL_RANK=0, WORLD_SIZE=2)
    assert "MASTER_ADDR" in alone.error and "torchrun" in alone.error
    odd = processes.run(arguments, status=2, RANK=5, LOCAL_RANK=0, WORLD_SIZE=2)
    assert "RANK is 5" in odd.error


def test_ranks_share_the_tokens_of_a_step(data: Path, tmp_path: Path, processes: Processes) -> None:
    arguments = train_arguments("swa-ssss", data, tmp_path / "run", {"train.tokens_per_step": 96})
    ranks = start_ranks(processes, [arguments] * 2)
    assert [process.wait(PATIENCE) for process in ranks] == [2, 2]
    assert "not a multiple of the context 32 x 2 ranks; set it to 128" in ranks[0].error


@pytest.mark.soak
def test_ranks_killed_at_random_moments_end_as_if_undisturbed(data: Path, tmp_path: Path, processes: Processes) -> None:
    """Now the one, now the other; with two ranks every sum has one order, so the result is the same to the bit."""
    recipe, chance = "maglev-shared-0.1", random.Random(0)
    settings = FAST | {"train.steps": 120, "train.checkpoint_every": 3, "train.validate_every": 40}
    plain, run = tmp_path / "plain", tmp_path / "run"
    run_ranks(processes, train_arguments(recipe, data, plain, settings))
    arguments = train_arguments(recipe, data, run, settings, "--resume")
    for kill in range(10):
        ranks = start_ranks(processes, [arguments] * 2, SLOW)
        until((run / "config.json").exists)
        time.sleep(chance.uniform(0.2, 0.8))
        ranks[kill % 2].kill()
        assert ranks[kill % 2].wait() == -signal.SIGKILL and ranks[1 - kill % 2].wait(PATIENCE) == 1
    run_ranks(processes, arguments)
    assert losses_of(run) == losses_of(plain)
    assert_same_tensors(run, plain)
