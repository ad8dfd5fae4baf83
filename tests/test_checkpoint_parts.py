"""Checkpoints that several ranks write: any rows of any tensor come back, and death leaves the one before."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maglev import checkpoint
from maglev.checkpoint import Part
from tests.test_checkpoint import STATE, assert_whole, crash, flip, no_report, some_tensors


def part_of(tensor: Tensor, rank: int, world: int) -> Part:
    """What a rank holds: every so many rows, or the whole of a number."""
    if tensor.ndim == 0:
        return Part(tensor if rank == 0 else tensor.new_empty(0), 0, ())
    share = -(-tensor.shape[0] // world)
    return Part(tensor[rank * share : (rank + 1) * share], rank * share, tuple(tensor.shape))


def save_parts(run: Path, step: int, world: int, keep: int = 3) -> None:
    if not checkpoint.begin_parts(run, step, keep):
        return
    tensors = some_tensors(step)
    written = [
        checkpoint.write_parts(
            run,
            step,
            rank,
            {stem: {name: part_of(t, rank, world) for name, t in named.items()} for stem, named in tensors.items()},
        )
        for rank in range(world)
    ]
    # as it arrives from other ranks
    checkpoint.finish_parts(run, step, json.loads(json.dumps(written)), STATE | {"step": step}, keep)


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_parts_make_the_same_tensors_as_one_file(tmp_path: Path, world: int) -> None:
    checkpoint.save(tmp_path / "whole", 5, some_tensors(5), STATE | {"step": 5}, 1)
    save_parts(tmp_path / "parts", 5, world)
    for run in (tmp_path / "whole", tmp_path / "parts"):
        found = checkpoint.newest(run, no_report)
        assert_whole(found, 5)
        assert found is not None
        for stem, named in some_tensors(5).items():
            stored = found.stored(stem)
            assert set(stored) == set(named)
            for name, tensor in named.items():
                assert stored[name].shape == tuple(tensor.shape)
                assert torch.equal(stored[name][...], tensor)
                for first in range(len(tensor) + 1 if tensor.ndim else 0):
                    for last in range(first, len(tensor) + 1):
                        rows = stored[name][first:last]
                        assert rows.dtype == tensor.dtype and torch.equal(rows, tensor[first:last])


def test_a_damaged_part_is_named_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    for name in ("decoder.00001.safetensors", "parts.json"):
        run = tmp_path / name
        save_parts(run, 1, 2)
        save_parts(run, 2, 2)
        flip(run / "checkpoints" / "step-00000002" / name)
        lines: list[str] = []
        assert_whole(checkpoint.newest(run, lines.append), 1)
        assert len(lines) == 1 and name in lines[0]
        # and saving that step again mends it
        save_parts(run, 2, 2)
        assert_whole(checkpoint.newest(run, no_report), 2)


def test_older_ones_go_and_a_whole_one_stays_as_it_is(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_parts(tmp_path, step, 2, keep=2)
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path)] == [2, 3]
    assert not checkpoint.begin_parts(tmp_path, 3, 2)


def test_a_part_that_vanishes_after_the_check_is_told(tmp_path: Path) -> None:
    save_parts(tmp_path, 1, 2)
    found = checkpoint.newest(tmp_path, no_report)
    assert found is not None
    (found.folder / "decoder.00001.safetensors").unlink()
    with pytest.raises(checkpoint.WorkError, match="cannot be read any more"):
        found.tensors("decoder")


def test_death_at_any_file_system_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    found = crash("parts", tmp_path / "run")
    assert set(found["steps"]) == {2, 3} and found["steps"][-1] == 3
    assert found["reports"] == []
