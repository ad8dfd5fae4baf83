"""The claim itself, at the smallest size that shows it: what was trained carries pairs beyond its windows by itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main

# plain reach 6; a value without its key is right in one of two, by chance in one of eight
TASK = ["--pairs", "2", "--keys", "8", "--values", "8", "--depth", "2", "--window", "4", "--context", "32"]
TRAINING = ["--steps", "400", "--set", "model.width=64", "--set", "train.tokens_per_step=1024", "--device", "cpu"]


def trained(recipe: str, run: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", "recall", recipe, *TASK, *TRAINING, "--out", str(run), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_maglev_closed_recalls_on_its_own_memories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = trained("maglev-closed", tmp_path / "run", capsys)
    assert found["reach"] == 6 and found["recall_lifted"] > 0.9
    assert found["recall_recurrent"] > 0.7


@pytest.mark.soak
def test_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained("swa-ssss", tmp_path / "swa", capsys)["recall_recurrent"] < 0.2
    assert trained("maglev-shared-0.1", tmp_path / "shared", capsys)["recall_recurrent"] < 0.6
