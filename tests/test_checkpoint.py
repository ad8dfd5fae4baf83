import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from maglev import checkpoint
from maglev.errors import WorkError

ROOT = Path(__file__).parents[1]
STATE = {"seed": 3, "loss": 0.1 + 0.2, "list": [1, None, "ä"]}


def some_tensors(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {
        "decoder": {
            "embedding.weight": torch.randn(6, 4, generator=generator),
            "half": torch.randn(3, 5, generator=generator).bfloat16(),
            "turned": torch.randn(3, 2, generator=generator).mT,
        },
        "prefiller": {},
        "optimizer": {
            "step": torch.tensor(step),
            "momentum/embedding.weight": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        },
    }


def save(run: Path, step: int, keep: int = 3) -> Path:
    return checkpoint.save(run, step, some_tensors(step), STATE | {"step": step}, keep)


def no_report(line: str) -> None:
    raise AssertionError(line)


def steps_of(run: Path) -> list[int]:
    return [step for step, _ in checkpoint.list_checkpoints(run)]


def assert_whole(found: checkpoint.Checkpoint | None, step: int) -> None:
    assert found is not None and found.step == step
    assert found.state == STATE | {"step": step}
    for stem, expected in some_tensors(step).items():
        tensors = found.tensors(stem)
        assert set(tensors) == set(expected)
        for name, tensor in expected.items():
            assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def run_python(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    folder = save(tmp_path, 100)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    files = {"decoder.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}
    assert {path.name for path in folder.iterdir()} == files
    assert_whole(checkpoint.newest(tmp_path, no_report), 100)


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none", no_report) is None
    (tmp_path / "checkpoints" / ".partial-x").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-7").mkdir()
    assert checkpoint.newest(tmp_path, no_report) is None


def test_what_another_rank_found_is_opened_without_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 3)
    monkeypatch.setattr(checkpoint, "find_damage", pytest.fail)
    assert_whole(checkpoint.found_whole(tmp_path, 3), 3)
    with pytest.raises(WorkError, match="step-00000004 is whole for another rank and absent for this one"):
        checkpoint.found_whole(tmp_path, 4)


def test_newest_goes_by_number(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 5):
        save(tmp_path, step)
    assert_whole(checkpoint.newest(tmp_path, no_report), 100_000_000)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
        assert steps_of(tmp_path) == [own for own in (step - 1, step) if own]
    save(tmp_path, 5, keep=1)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000005"]


def test_a_later_checkpoint_never_pushes_out_the_one_just_saved(tmp_path: Path) -> None:
    (save(tmp_path, 300) / "state.json").unlink()
    for step in (200, 250):
        save(tmp_path, step, keep=1)
    assert steps_of(tmp_path) == [250, 300]
    assert_whole(checkpoint.newest(tmp_path, lambda line: None), 250)


def test_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "checkpoints" / ".partial-abc"
    leftover.mkdir(parents=True)
    (leftover / "decoder.safetensors").write_bytes(b"half")
    save(tmp_path, 1)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["decoder.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_damage_is_named_and_the_previous_is_used(tmp_path: Path, name: str, damage: Any) -> None:
    save(tmp_path, 100)
    folder = save(tmp_path, 200)
    damage(folder / name)
    if name == "manifest.json" and damage is truncate:
        # Only the line's end is gone; what is left says the same.
        assert_whole(checkpoint.newest(tmp_path, no_report), 200)
        damage(folder / name)
    lines: list[str] = []
    assert_whole(checkpoint.newest(tmp_path, lines.append), 100)
    assert len(lines) == 1 and str(folder) in lines[0]
    # A flipped checksum in the manifest shows as a file that does not match.
    assert name in lines[0] or (name == "manifest.json" and damage is flip)


def test_any_flipped_byte_of_the_manifest_is_seen_or_harmless(tmp_path: Path) -> None:
    save(tmp_path, 100)
    folder = save(tmp_path, 200)
    path = folder / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        content = bytearray(whole)
        content[position] ^= 1 << (position % 8)
        path.write_bytes(content)
        found = checkpoint.newest(tmp_path, lambda line: None)
        assert_whole(found, 200 if found is not None and found.step == 200 else 100)


def test_when_none_is_whole_the_run_is_refused(tmp_path: Path) -> None:
    lines: list[str] = []
    for step in (1, 2):
        truncate(save(tmp_path, step) / "decoder.safetensors")
    with pytest.raises(WorkError, match="none of the 2 checkpoints"):
        checkpoint.newest(tmp_path, lines.append)
    assert ["step-00000002" in lines[0], "step-00000001" in lines[1]] == [True, True]


def test_saving_a_step_again_changes_nothing_unless_it_is_damaged(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = (folder / "state.json").stat()
    save(tmp_path, 1)
    after = (folder / "state.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    flip(folder / "decoder.safetensors")
    save(tmp_path, 1)
    assert_whole(checkpoint.newest(tmp_path, no_report), 1)


def test_shared_storage_is_refused(tmp_path: Path) -> None:
    table = torch.zeros(4, 2)
    tied = {"decoder": {"embedding.weight": table}, "prefiller": {"embedding.weight": table.view(2, 4)}}
    with pytest.raises(AssertionError, match=r"prefiller/embedding.weight and decoder/embedding.weight share"):
        checkpoint.save(tmp_path, 1, tied, {}, 1)
    assert checkpoint.newest(tmp_path, no_report) is None


FULL_DISK = """
import resource, sys
from pathlib import Path
import torch
from maglev.errors import WorkError
from maglev import checkpoint

torch.set_num_threads(1)
cases = [(100_000, 100_000, 1), (9_000, 1, 10_000), (200, 1, 1), (0, 1, 1)]
for step, (limit, elements, letters) in enumerate(cases):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
    try:
        tensors, state = {"decoder": {"a": torch.zeros(elements)}}, {"text": "x" * letters}
        checkpoint.save(Path(sys.argv[1]), 2 + step, tensors, state, 1)
    except WorkError as error:
        print(error)
"""


def test_a_full_disk_costs_only_the_new_checkpoint(tmp_path: Path) -> None:
    """A limit on a file's size stands for the disk: it hits the weights, the state, the manifest, all."""
    save(tmp_path, 1)
    lines = run_python(["-c", FULL_DISK, str(tmp_path)]).splitlines()
    assert len(lines) == 4
    for step, line in enumerate(lines, 2):
        assert "could not save checkpoint" in line and f"step-{step:08d}" in line
        assert "File too large" in line and "free some space" in line
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    assert_whole(checkpoint.newest(tmp_path, no_report), 1)


def test_a_run_folder_that_is_a_file_is_a_work_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(WorkError, match="could not save"):
        save(tmp_path, 1)


def crash(verb: str, run: Path, *rest: str) -> dict[str, list[Any]]:
    return json.loads(run_python([str(Path(__file__).parent / "crash_worker.py"), verb, str(run), *rest]))


@pytest.mark.parametrize("kills", [8, pytest.param(300, marks=pytest.mark.soak)])
def test_sigkill_while_saving_never_breaks_the_newest(tmp_path: Path, kills: int) -> None:
    found = crash("kill", tmp_path / "run", str(kills))
    assert found["reports"] == []
    assert found["steps"] == sorted(found["steps"]) and len(found["steps"]) == kills + 1
    assert found["steps"][-1] > 0


@pytest.mark.parametrize("verb", ["fresh", "replace"])
def test_death_at_any_file_system_call_leaves_a_whole_checkpoint(tmp_path: Path, verb: str) -> None:
    found = crash(verb, tmp_path / "run")
    assert set(found["steps"]) == {2, 3} and found["steps"][-1] == 3
    assert bool(found["reports"]) == (verb == "replace")
    assert all("step-00000003 is damaged: decoder.safetensors" in line for line in found["reports"])


def test_a_file_that_vanishes_after_the_check_is_not_an_empty_model(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    found = checkpoint.newest(tmp_path, no_report)
    assert found is not None
    shutil.rmtree(folder)
    with pytest.raises(WorkError, match="cannot be read any more"):
        found.tensors("decoder")
