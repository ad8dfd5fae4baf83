"""Run by test_checkpoint.py: processes that die while they save, each checked by the one that outlives them.

`crash_worker.py kill RUN COUNT` kills a saving process with SIGKILL at random moments;
`crash_worker.py fresh|replace|parts RUN` lets one die at each of its file-system calls in turn, where the step is
new, has a damaged checkpoint or is written in the parts of two ranks. Each prints one JSON line.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from maglev import checkpoint

KEEP = 2
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def content(step: int, size: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    names = {"decoder": ("a", "b"), "optimizer": ("c",)}
    return {stem: {name: torch.randn(size, generator=generator) for name in own} for stem, own in names.items()}


def newest_step(run: Path, size: int, reports: list[str]) -> int:
    """The step of the newest checkpoint, 0 for none; its content is compared bit by bit."""
    found = checkpoint.newest(run, reports.append)
    if found is None:
        return 0
    assert found.state == {"step": found.step}
    for stem, expected in content(found.step, size).items():
        tensors = found.tensors(stem)
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    return found.step


def in_fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(2)
        os._exit(0)
    return child


def kill_at_random(run: Path, count: int) -> dict[str, object]:
    size, reports, steps = 200_000, list[str](), [0]
    delays = random.Random(count)

    def save_on() -> None:
        step = steps[-1]
        while True:
            step += 1
            save_step(run, step, size)

    for _ in range(count):
        child = in_fork(save_on)
        time.sleep(delays.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        steps.append(newest_step(run, size, reports))
    return {"reports": reports, "steps": steps}


def die_at_call(number: int) -> None:
    left = number

    def count_down(event: str, _: object) -> None:
        nonlocal left
        if event in CALLS:
            left -= 1
            if left == 0:
                os._exit(9)

    sys.addaudithook(count_down)


def save_step(run: Path, step: int, size: int) -> Path:
    return checkpoint.save(run, step, content(step, size), {"step": step}, KEEP)


def save_parts(run: Path, step: int, size: int) -> None:
    """Both ranks in this process; the second half of every tensor is the second rank's."""
    if not checkpoint.begin_parts(run, step, KEEP):
        return
    written = []
    for rank, start in enumerate((0, size // 2)):
        rows = slice(start, start + size // 2)
        parts = {
            stem: {name: checkpoint.Part(tensor[rows], start, (size,)) for name, tensor in named.items()}
            for stem, named in content(step, size).items()
        }
        written.append(checkpoint.write_parts(run, step, rank, parts))
    checkpoint.finish_parts(run, step, written, {"step": step}, KEEP)


def die_at_every_call(run: Path, damaged: bool, save: Callable[[Path, int, int], object]) -> dict[str, object]:
    """Step 3 is saved over 1 and 2 (so 1 is removed), in place of nothing or of a damaged one."""
    size, reports, steps, number, status = 10, list[str](), list[int](), 0, 9
    while status != 0:
        number += 1
        shutil.rmtree(run, ignore_errors=True)
        for step in (1, 2):
            save_step(run, step, size)
        if damaged:
            (save_step(run, 3, size) / "decoder.safetensors").write_bytes(b"damaged")

        def attempt(number: int = number) -> None:
            die_at_call(number)
            save(run, 3, size)

        status = os.waitstatus_to_exitcode(os.waitpid(in_fork(attempt), 0)[1])
        assert status in (0, 9)
        steps.append(newest_step(run, size, reports))
        save(run, 3, size)
        assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000003"]
        assert newest_step(run, size, []) == 3
    return {"reports": reports, "steps": steps}


if __name__ == "__main__":
    torch.set_num_threads(1)
    verb, folder, *rest = sys.argv[1:]
    if verb == "kill":
        print(json.dumps(kill_at_random(Path(folder), int(rest[0]))))
    else:
        save = save_parts if verb == "parts" else save_step
        print(json.dumps(die_at_every_call(Path(folder), verb == "replace", save)))
