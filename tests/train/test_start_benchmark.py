"""`benchmarks/start.py`, on a machine without a GPU and with nothing to compile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT


def test_parts_add_up_to_the_start(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    settings = ["model.context=32", "model.window=8", "model.vocab_size=64", "train.compile=off"]
    command = [sys.executable, str(ROOT / "benchmarks/start.py"), "swa-ssss", "--depth", "1", "--device", "cpu"]
    command += ["--rows", "1", "--tokens", "64", "--out", str(out)]
    command += [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(out.read_text())
    parts = result["parts"]
    assert [*parts][-2:] == ["first step", "second step"] and min(parts.values()) >= 0
    assert abs(sum(parts.values()) - parts["second step"] - result["start_s"]) < 1e-6
    assert result["compiled"] == [] and "to the end of the first step" in done.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["swa-sss"], "start: unknown recipe 'swa-sss'; did you mean"),
        (["swa-ssss", "--set", "depth"], "start: --set 'depth'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/start.py"), *words, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
