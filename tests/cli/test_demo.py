"""`maglev demo`, shortened: the whole way from text to a report that needs nothing beside itself."""

import json
import re
from pathlib import Path

import pytest

from maglev.__main__ import main
from maglev.cli import demo
from maglev.data import stdlib_text
from maglev.runs import read_metrics


def test_it_leaves_two_runs_their_numbers_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(stdlib_text.documents())
    # a tenth of the text, a quarter of the rows and less depth, to be quick
    monkeypatch.setattr(stdlib_text, "documents", lambda: iter(every[::10]))
    monkeypatch.setattr(demo, "DEPTH", 2)
    monkeypatch.setitem(demo.SETTINGS, "train.tokens_per_step", 1024)
    out = tmp_path / "a demo"
    assert main(["demo", "--steps", "4", "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    swa, maglev = result["models"]["swa-ssss"], result["models"]["maglev-shared-0.1"]
    assert 0 < swa["bpb_recurrent"] < 20 and "bpb_lifted" not in swa
    assert 0 < maglev["bpb_recurrent"] < 20 and 0 < maglev["bpb_lifted"] < 20
    assert swa["state_bytes"] == maglev["state_bytes"]
    assert len([row for row in read_metrics(out / "maglev-shared-0.1") if row["kind"] == "train"]) == 4
    page = Path(result["report"]).read_text(encoding="utf-8")
    # losses, consistency, what is left of a disturbance, what closing the loop costs, the memory's share, by position,
    # state against length
    assert page.count("<svg") == 7
    assert not re.search(r'(?:src|href)="(?!#)', page)
    for number in (swa["bpb_recurrent"], maglev["bpb_recurrent"], maglev["bpb_lifted"]):
        assert f"{number:.4f}" in page
    # each number is that of its own source
    for source in ("recurrent", "lifted"):
        run, data = str(out / "maglev-shared-0.1"), str(out / "data")
        assert main(["eval", "bpb", run, "--data", data, "--memory", source, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)[f"bpb_{source}"]
        assert found == pytest.approx(maglev[f"bpb_{source}"], abs=1e-7)
    assert maglev["bpb_recurrent"] != maglev["bpb_lifted"]
    # again in the same folder, and for people
    assert main(["demo", "--steps", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "recurrent" in shown and "lifted" in shown and "report.html" in shown


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "not a demo" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_no_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "0", "--out", str(tmp_path / "x")]) == 2
    assert "--steps" in capsys.readouterr().err
