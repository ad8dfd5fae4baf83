"""`maglev report`: a page about any runs."""

import json
import shutil
from pathlib import Path

import pytest

from maglev.__main__ import main
from maglev.train import launch
from tests.evaluate.table_runs import make_run
from tests.small_runs import FAST, SMALL, Train, Unwatched, one_line

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.usefixtures("without_speed")


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, dict[str, float]], str]:
    capsys.readouterr()
    assert main(["report", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    return told["runs"], Path(told["report"]).read_text()


def test_a_run_in_closed_loop_has_its_diagnostics_in_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = SMALL | FAST | {"train.validate_every": 3}
    launch.train("maglev-closed", data, run, Unwatched(), depth=2, settings=settings)
    found, page = report_of(capsys, str(run))
    titles = ("Training loss", "Consistency during training", "Whether the loop holds", "What closing the loop costs")
    for title in (*titles, "How much of attention is memory", "Size of the state against length"):
        assert f"<h3>{title}</h3>" in page
    assert "of the last validation in training, of 3 rows" in page and "Bits per byte by position" not in page
    assert set(found["Maglev (closed)"]) == {"bpb_recurrent", "bpb_lifted"}
    # what was measured on a whole text goes before that
    for memory in ("recurrent", "lifted"):
        assert main(["eval", "bpb", str(run), "--data", str(data), "--memory", memory, "--device", "cpu"]) == 0
    measured, page = report_of(capsys, str(run), "--out", str(tmp_path / "page.html"))
    assert measured.keys() == found.keys() and measured != found
    assert f"Bits per byte are of {data.name} (validation," in page and "<h3>Bits per byte by position</h3>" in page


def test_a_run_on_recall_tells_what_it_recalls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--depth", "1", "--window", "4", "--context", "32", "--steps", "2", "--rows", "8", "--pairs", "2"]
    words += ["--device", "cpu", "--set", "train.tokens_per_step=128", "--out", str(tmp_path / "run")]
    assert main(["eval", "recall", "maglev-closed", *words]) == 0
    _, page = report_of(capsys, str(tmp_path / "run"))
    assert "2 of 2 steps of 128 tokens; recall beyond the plain reach recurrent 0." in page
    assert "No bits per byte have been measured" in page and "<h3>Whether the loop holds</h3>" in page
    assert "<h3>What closing the loop costs in recall</h3>" in page and "recall, recurrent less lifted" in page
    assert "<h3>What closing the loop costs</h3>" not in page


def test_runs_are_compared_on_one_text_or_on_none(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swa, other = (
        shutil.copytree(trained("swa-ssss"), tmp_path / "swa"),
        shutil.copytree(trained("lrt-ssss"), tmp_path / "b"),
    )
    assert main(["eval", "bpb", str(swa), "--data", str(data), "--device", "cpu"]) == 0
    # one of two was measured, and neither validated
    found, page = report_of(capsys, str(swa), str(other))
    assert found == {"SWA (SSSS)": {}, "LRT (SSSS)": {}} and "No bits per byte have been measured" in page
    assert "On its own memory" not in page and "6 of 6 steps of 128 tokens" in page
    assert main(["eval", "bpb", str(other), "--data", str(data), "--device", "cpu"]) == 0
    found, page = report_of(capsys, str(swa), str(other))
    assert {len(values) for values in found.values()} == {1} and "bits per byte" in page
    assert "On its own memory (recurrent), LRT (SSSS) needs" in page
    assert (swa / "report.html").read_text() == page
    # two of a recipe go by the names of their folders
    assert set(report_of(capsys, str(swa), str(shutil.copytree(swa, tmp_path / "again")))[0]) == {"swa", "again"}


def test_wrong_requests_end_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = make_run(tmp_path, "swa-ssss")
    (empty / "metrics.jsonl").write_text("")
    for words, says in (
        ([str(tmp_path / "nowhere")], "is not a run folder"),
        ([str(empty)], "nothing to report"),
        ([str(empty), str(empty)], "is named twice; name every run once"),
        ([str(make_run(tmp_path, "swa-ssss", 1)), "--out", str(tmp_path)], "which is a folder; name a file in it"),
    ):
        capsys.readouterr()
        assert main(["report", *words]) == 2
        assert says in one_line(capsys)
