"""The way through all verbs, as a README would show it, and data preparation on a full disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

from maglev.model.accounting import state_nbytes
from maglev.runs import read_config
from tests.processes import ROOT, Processes
from tests.small_runs import texts, train_arguments, write_texts


def test_from_text_to_text_in_processes_of_their_own(tmp_path: Path) -> None:
    write_texts(tmp_path / "books.jsonl", texts())

    def maglev(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "maglev", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
        return done.stdout

    assert "tokens" in maglev("data", "prepare", "books.jsonl", "--out", "data", "--vocab-size", "300")
    arguments = train_arguments("maglev-shared-0.1", Path("data"), Path("runs/a"), {"train.tensorboard": "true"})
    assert maglev(*arguments).startswith("runs/a: step 6 of 6")
    value = json.loads(
        maglev("eval", "bpb", "runs/a", "--data", "data", "--memory", "recurrent", "--rows", "2", "--json")
    )
    assert value["bpb_recurrent"] > 0
    assert maglev("generate", "runs/a", "--prompt", "Once", "--max-tokens", "5").startswith("Once")
    info = json.loads(maglev("info", "runs/a", "--json"))
    assert info["state_bytes"]["float32"] == state_nbytes(read_config(tmp_path / "runs/a").model, 4)


def test_preparing_data_on_a_full_disk(tmp_path: Path, processes: Processes) -> None:
    """Exit 1 and one line; what was there stays, and with more room it works."""
    source = write_texts(tmp_path / "a.jsonl", texts())
    prepare = ["data", "prepare", str(source), "--out", str(tmp_path / "data"), "--vocab-size", "300"]
    full = processes.run(prepare, status=1, file_limit=5000)
    assert "could not be written" in full.error and "free space" in full.error
    assert not (tmp_path / "data").exists() and not list(tmp_path.glob(".partial-*"))
    processes.run(prepare)
    before = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    assert "could not be written" in processes.run([*prepare, "--overwrite"], status=1, file_limit=5000).error
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == before
    done = processes.run([*prepare, "--overwrite", "--json"])
    assert json.loads(done.stdout)["splits"]["train"]["tokens"] > 1000
