"""metrics.jsonl over resumes, kills and full disks."""

import math
from pathlib import Path

import pytest

from maglev.errors import WorkError
from maglev.runs import read_metrics
from maglev.train.metrics import Appender, MetricsLog


def rows(run: Path) -> list[tuple[str, int]]:
    return [(row["kind"], row["step"]) for row in read_metrics(run)]


def open_log(run: Path, step: int) -> MetricsLog:
    return MetricsLog(run, step, tensorboard=False, say=pytest.fail)


def test_a_resume_drops_what_came_after_its_step(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    for step in (1, 2, 3):
        log.append({"kind": "train", "step": step, "loss": 0.1})
        log.append({"kind": "validation", "step": step, "bpb_recurrent": math.inf})
    log.close()
    assert read_metrics(tmp_path)[1]["bpb_recurrent"] is None
    log = open_log(tmp_path, 2)
    assert rows(tmp_path) == [("train", 1), ("validation", 1), ("train", 2), ("validation", 2)]
    assert log.validated == {1, 2}
    log.append({"kind": "train", "step": 3})
    log.sync()
    log.close()
    assert rows(tmp_path)[-1] == ("train", 3)


def test_what_a_crash_leaves_is_no_row(tmp_path: Path) -> None:
    """Cut lines, zeros, bytes that are no text: the rows around them stay."""
    content = (
        b'{"kind": "train", "step": 1}\n\x00\x00\x00\n\xff\xfe\n[1]\n{"step": "x"}\n{"kind": "train", "step": 2}\n{"kin'
    )
    (tmp_path / "metrics.jsonl").write_bytes(content)
    open_log(tmp_path, 9).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n'


def test_a_file_that_needs_no_change_is_left_alone(tmp_path: Path) -> None:
    log = open_log(tmp_path, 0)
    log.append({"kind": "train", "step": 1, "loss": 1 / 3})
    log.close()
    before = (tmp_path / "metrics.jsonl").stat()
    open_log(tmp_path, 1).close()
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named() -> None:
    full = Appender(Path("/dev/full"))
    with pytest.raises(WorkError, match=r"could not write /dev/full: .*No space left on device.*free some space"):
        full.write(b"row\n")
    full.close()
