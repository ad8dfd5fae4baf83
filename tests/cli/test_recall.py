"""`maglev eval recall` as a user meets it, at the smallest size."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.cli.recall import LOOP
from maglev.config import ClosedMaglevConfig
from maglev.evaluate.costs import start_costs
from maglev.evaluate.recall_results import add_rows, curves, read_rows
from maglev.runs import read_config, read_metrics
from tests.processes import ROOT
from tests.small_runs import Train, one_line

pytestmark = pytest.mark.usefixtures("without_speed")
RECIPE = "maglev-shared-0.1"
TINY = ["--depth", "1", "--window", "4", "--context", "32", "--steps", "2", "--rows", "8", "--pairs", "2"]
TINY += ["--device", "cpu", "--set", "train.tokens_per_step=128"]
SOURCES = ("recurrent", "lifted", "refined")


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["eval", "recall", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("context", "given", "rollout"), [(24, {}, 12), (64, {}, 16), (64, {"objective.rollout": 3}, 3)]
)
def test_rollouts_reach_far_here(
    context: int, given: dict[str, int], rollout: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four times layers x W, at most half of a row; what is asked for goes before, and is told."""
    # the last of two counts
    own = ["--context", str(context), "--set", f"train.tokens_per_step={4 * context}"]
    own += [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    found = run_json(["maglev-closed", *TINY, *own, "--out", str(tmp_path / "run")], capsys)
    objective = read_config(tmp_path / "run").objective
    assert isinstance(objective, ClosedMaglevConfig)
    assert (objective.rollout, objective.rollout_start) == (rollout, 0.6)
    assert all(row["settings"] == given | {"train.tokens_per_step": 4 * context} for row in found["rows"])


def test_a_recipe_is_trained_and_measured_a_run_only_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    run, results = tmp_path / "run", tmp_path / "recall.json"
    # how it runs is no other measure
    how = ["--set", "train.graphs=off"]
    first = run_json([RECIPE, *TINY, *how, "--out", str(run), "--results", str(results)], capsys)
    assert (first["recipe"], first["step"], first["reach"], first["chance"]) == (RECIPE, 2, 3, 1 / 32)
    assert {key for key in first if key.startswith("recall_")} == {f"recall_{source}" for source in SOURCES}
    rows = first["rows"]
    assert {row["memory"] for row in rows} == set(SOURCES)
    assert {row["distance"] for row in rows} == {"0-1", "1-2", "2-4", "4-8", "8-16"}
    assert all(row["settings"] == {"train.tokens_per_step": 128} and row["training_flops"] > 0 for row in rows)
    assert all(row["passes"] == (3 if row["memory"] == "refined" else None) for row in rows)
    # whether the loop holds is measured on the way
    on_the_way = [row for row in read_metrics(run) if row["kind"] == "validation"]
    assert [row["step"] for row in on_the_way] == [1, 2]
    for row in on_the_way:
        assert row["recall_recurrent_minus_lifted"] == row["recall_recurrent"] - row["recall_lifted"]
        assert row["contraction_step"] >= 0 and row["contraction_pass"] >= 0 and len(row["memory_share"]) == 1
    assert first["loop"] == {key: on_the_way[-1][key] for key in LOOP}
    assert [row["loop"] for row in rows if "loop" in row] == [first["loop"]]
    assert next(row for row in rows if row["memory"] == "recurrent")["loop"] == first["loop"]
    # of some rows alone, so it is not the run's figure
    assert Path(first["plot"]) == run / "recall-8-rows.svg" and "<svg" in (run / "recall-8-rows.svg").read_text()
    # the run is finished: the same again trains nothing and finds the same
    again = run_json([RECIPE, *TINY, *how, "--out", str(run), "--results", str(results)], capsys)
    assert again == first and json.loads(results.read_text()) == {"rows": rows}
    # the run by itself, asked otherwise
    arguments = [str(run), "--rows", "8", "--device", "cpu"]
    assert run_json(arguments, capsys)["rows"] == rows
    other = run_json([*arguments, "--variant", "overwrite", "--context", "64", "--passes", "2"], capsys)
    assert {row["variant"] for row in other["rows"]} == {"overwrite"} and other["context"] == 64
    assert {row["passes"] for row in other["rows"]} == {None, 2}
    # rows say what they were trained on, where that is something else
    assert all(row["trained"] == {"variant": "pairs", "context": 32} for row in other["rows"])
    assert not any("trained" in row or "keys" in row for row in rows)
    # every position is exact after as many passes as there are
    many = run_json([*arguments, "--passes", "1000000"], capsys)["rows"]
    assert {row["passes"] for row in many} == {None, 32}

    assert main(["eval", "recall", *arguments]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "plain reach 3, chance 0.031" in words and "refined (3 passes)" in words and "beyond 1" in words


def test_other_questions_take_no_others_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, results = tmp_path / "run", tmp_path / "recall.json"
    usual = [word for word in TINY if word not in ("--rows", "8")]
    first = run_json([RECIPE, *usual, "--out", str(run), "--results", str(results)], capsys)
    again = [str(run), "--device", "cpu", "--results", str(results)]
    kept = run / "eval" / "recall-pairs-2-32.json"
    assert json.loads(kept.read_text())["rows"] == first["rows"] and not any("rows" in row for row in first["rows"])
    # fewer rows are another measure, and none to keep in the run
    drawn = (run / "recall.svg").read_bytes() if (run / "recall.svg").exists() else b""
    fewer = run_json([*again, "--rows", "3"], capsys)
    assert all(row["rows"] == 3 for row in fewer["rows"])
    assert not drawn or (run / "recall.svg").read_bytes() == drawn
    # other questions are kept beside the usual ones
    sparse = run_json([*again, "--query-share", "0.1"], capsys)
    names = {path.name for path in (run / "eval").iterdir()}
    assert names == {kept.name, "recall-pairs-2-32-query_share-0.1.json"}
    assert json.loads(kept.read_text())["rows"] == first["rows"]
    run_json([str(run), "--device", "cpu", "--passes", "2"], capsys)
    assert (run / "eval" / "recall-pairs-2-32-passes-2.json").is_file()
    assert json.loads(kept.read_text())["rows"] == first["rows"]
    every = json.loads(results.read_text())["rows"]
    assert every == [*first["rows"], *fewer["rows"], *sparse["rows"]]
    labels = [name for name, *_ in curves(every)]
    assert len(set(labels)) == len(labels) / len(SOURCES) == 3


def test_an_export_without_its_prefiller_is_asked_for_needles_on_its_own_memories(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "export"
    assert main(["export", str(trained(RECIPE)), str(out), "--without-prefiller"]) == 0
    words = [str(out), "--variant", "needles", "--data", str(data), "--pairs", "1", "--keys", "4", "--values", "4"]
    found = run_json([*words, "--context", "128", "--rows", "2", "--device", "cpu"], capsys)
    assert {row["memory"] for row in found["rows"]} == {"recurrent", "refined"}


def test_what_a_run_began_from_is_in_its_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And of a run that is not finished only what it has cost so far."""
    first, second = tmp_path / "first", tmp_path / "second"
    began = run_json(["maglev-closed", *TINY, "--out", str(first)], capsys)["rows"][0]
    words = ["maglev-closed", *TINY, "--steps", "8", "--out", str(second), "--set", f"train.init_from={first}"]
    row = run_json(words, capsys)["rows"][0]
    assert "start_flops" not in began and row["start_flops"] == began["training_flops"]
    assert start_costs(read_config(second)) == (pytest.approx(row["start_flops"], rel=1e-9), 2 * 128)
    own = row["training_flops"] - row["start_flops"]
    assert own == pytest.approx(4 * began["training_flops"], rel=1e-6) and row["cost"] == began["cost"]
    # a checkpoint on the way, so that a machine that goes down does not cost everything
    shutil.rmtree(second / "checkpoints" / "step-00000008")
    (earlier,) = (second / "checkpoints").iterdir()
    lines = read_metrics(second)
    lines[-2:] = [line | ({"seconds": 1e6} if line["kind"] == "train" else {}) for line in lines[-2:]]
    (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = run_json([str(second), "--rows", "8", "--device", "cpu"], capsys)["rows"][0]
    assert earlier.name == "step-00000007" and before["steps"] == 7 and before["cost"] < row["cost"]
    # nor what came after it
    assert lines[-1]["step"] == lines[-2]["step"] == 8 and before["training_seconds"] < 1e6
    shutil.rmtree(first)
    # the same measure again, whatever it is known to have cost
    add_rows(tmp_path / "rows.json", [before])
    gone = run_json([str(second), "--rows", "8", "--device", "cpu"], capsys)["rows"][0]
    assert add_rows(tmp_path / "rows.json", [gone]) == [gone]
    assert gone["start_flops"] is None and gone["training_flops"] == before["training_flops"] - row["start_flops"]


def test_needles_of_other_texts_are_kept_beside_each_other(
    trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = shutil.copytree(trained("swa-ssss"), tmp_path / "run"), shutil.copytree(data, tmp_path / "other")
    words = [str(run), "--variant", "needles", "--pairs", "1", "--keys", "4", "--values", "4", "--context", "128"]
    for folder in (data, other):
        run_json([*words, "--data", str(folder), "--device", "cpu"], capsys)
    kept = {path.name for path in (run / "eval").glob("recall-needles-*")}
    assert {name.removesuffix(".json").rsplit("-", 1)[-1] for name in kept} == {data.name, "other"}


def test_another_runs_rows_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two runs that are asked the same, but were trained on other tasks."""
    results = tmp_path / "recall.json"
    for pairs in ("2", "3"):
        words = [*TINY, "--pairs", pairs, "--out", str(tmp_path / pairs), "--results", str(results)]
        own = run_json([RECIPE, *words], capsys)["rows"]
    before = json.loads(results.read_text())["rows"]
    asked = [str(tmp_path / "3"), "--pairs", "2", "--rows", "8", "--device", "cpu", "--results", str(results)]
    other = run_json(asked, capsys)["rows"]
    after = json.loads(results.read_text())["rows"]
    assert after == [*before, *other] and all(row["trained"] == {"pairs": 3} for row in other)
    assert {row["pairs"] for row in own} == {3}


def test_what_is_no_file_of_results_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, results = tmp_path / "run", tmp_path / "recall.json"
    # windows of one token reach nowhere, and the unit of distance is one token
    assert run_json([RECIPE, *TINY, "--window", "1", "--out", str(run)], capsys)["reach"] == 1
    for text in ('{"rows": [{"a": 1}]}', '{"rows": [3]}', "[]", "{"):
        results.write_text(text)
        assert main(["eval", "recall", str(run), "--device", "cpu", "--results", str(results)]) == 2
        assert "is not a file of recall results" in one_line(capsys) and results.read_text() == text
    (run / "recall.json").write_text('{"keys": 64}')
    assert main(["eval", "recall", str(run), "--device", "cpu"]) == 2
    assert "its recall.json is damaged" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["maglev-shard-0.1"], "did you mean 'maglev-shared-0.1'?"),
        ([RECIPE, "--pairs", "40"], "pairs is 40, more than the 32 keys there are; raise keys"),
        ([RECIPE, "--variant", "sorting"], "variant is 'sorting'; it must be one of pairs, overwrite, copy"),
        ([RECIPE, "--context", "16", "--pairs", "8"], "a context of 16 has no room for 8 pairs and a question"),
        ([RECIPE, "--context", "0"], "--context is 0; it must be at least 1"),
        ([RECIPE, "--steps", "0"], "--steps is 0; it must be at least 1"),
        ([RECIPE, "--rows", "0"], "--rows is 0; it must be at least 1"),
        ([RECIPE, "--passes", "0"], "--passes is 0; it must be at least 1"),
        ([RECIPE, "--window", "33", "--context", "32"], "model.window is 33, larger than model.context = 32"),
        ([RECIPE, "--set", "model.window=8"], "--set model.window is --window here; use that"),
        ([RECIPE, "--seed", "3", "--set", "train.seed=5"], "--set train.seed is --seed here; use that"),
        ([RECIPE, "--set", "train.steps=5"], "--set train.steps is --steps here; use that"),
        ([RECIPE, "--results", "/proc/a.json"], "--results /proc/a.json cannot be written"),
        ([RECIPE, "--plot", "/proc/a.svg"], "--plot /proc/a.svg cannot be written"),
        ([".", "--context", "0"], "--context is 0; it must be at least 1"),
        ([RECIPE, "--set", "optimizer.matrx_lr=1"], "did you mean 'optimizer.matrix_lr'?"),
        ([RECIPE, "--set", "train.tokens_per_step=-1"], "train.tokens_per_step is -1"),
        ([RECIPE, "--variant", "needles"], "needles are planted in text; add --data DIR"),
        ([RECIPE, "--variant", "needles", "--data", "nowhere"], "nowhere: not a data folder"),
        ([RECIPE, "--data", "nowhere"], "--data goes with --variant needles, not with pairs; leave it away"),
        ([RECIPE, "--rates", "0"], "--rates is 0.0; it must be above 0"),
        ([RECIPE, "--plot", "recall.txt"], "its name must end in one of .svg, .png, .pdf"),
        ([RECIPE, "--device", "tpu"], "it must be auto, cpu, cuda or cuda:N"),
        (["runs/nowhere"], "runs/nowhere is not a run folder"),
        (["."], ". is not a run folder"),
        ([".", "--steps", "3"], ". is a run and only measured; leave --steps away"),
        ([".", "--set", "a=b"], "leave --set away"),
    ],
)
def test_wrong_requests_end_in_one_line(
    more: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "recall", *more]) == 2
    assert says in one_line(capsys)
    assert not list(tmp_path.rglob("config.json"))


def test_a_run_on_text_and_a_foreign_results_file_are_refused(
    trained: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("swa-ssss")
    capsys.readouterr()
    assert main(["eval", "recall", str(run)]) == 2
    assert "was not trained on the recall task" in one_line(capsys)
    (tmp_path / "r.json").write_text("{}")
    assert main(["eval", "recall", str(run), "--results", str(tmp_path / "r.json")]) == 2
    assert "is not a file of recall results" in one_line(capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("distance", "abc"),
        ("accuracy", None),
        ("accuracy", math.nan),
        ("memory", "foo"),
        ("window", None),
        ("depth", 0),
        ("settings", []),
        ("seed", "0"),
        ("training_flops", None),
        ("training_flops", 0),
        ("items", 0),
        ("chance", math.nan),
        ("accuracy", True),
    ],
)
def test_rows_that_were_damaged_are_refused_before_anything_is_trained(
    key: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads((ROOT / "results" / "recall.json").read_text())["rows"][:2]
    file, whole = tmp_path / "r.json", {"rows": rows}
    file.write_text(json.dumps(whole))
    assert read_rows(file) == rows
    file.write_text(damaged := json.dumps({"rows": [rows[0], rows[1] | {key: value}]}))
    assert main(["eval", "recall", RECIPE, *TINY, "--out", str(tmp_path / "run"), "--results", str(file)]) == 2
    assert "is not a file of recall results" in one_line(capsys)
    assert file.read_text() == damaged and not (tmp_path / "run").exists()


NEEDLES = ["--variant", "needles", "--keys", "4", "--values", "4"]


def test_needles_are_asked_of_a_run_on_them_and_of_a_run_on_text(
    trained: Train, data: Path, other_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, results = tmp_path / "run", tmp_path / "recall.json"
    text = ["--data", str(data)]
    # the last of two options counts
    tiny = [*TINY, *NEEDLES, "--context", "160", "--rows", "4", "--set", "train.tokens_per_step=320"]
    first = run_json([RECIPE, *tiny, *text, "--out", str(run), "--results", str(results)], capsys)
    assert first["chance"] == 1 / 4 and {row["memory"] for row in first["rows"]} == set(SOURCES)
    assert all(row["trained_on"] == "needles" and row["data"] == "data" for row in first["rows"])
    assert all(math.isfinite(row["nats"]) and math.isfinite(row["gain"]) for row in first["rows"])
    # trained on is measured on the other split, and again on the same
    arguments = [str(run), *text, "--rows", "4", "--device", "cpu"]
    assert run_json(arguments, capsys)["rows"] == first["rows"]

    plain = [str(trained("swa-ssss")), *NEEDLES, *text, "--pairs", "2", "--context", "160", "--rows", "4"]
    found = run_json([*plain, "--results", str(results)], capsys)
    assert (found["recipe"], found["reach"], found["task"]["pairs"]) == ("swa-ssss", 7, 2)
    assert {row["trained_on"] for row in found["rows"]} == {"text"}
    # a plain window has kept nothing of what lies beyond it
    assert all(row["gain"] == 0 for row in found["rows"] if row["distance"] != "0-1")
    assert len(json.loads(results.read_text())["rows"]) == len(first["rows"]) + len(found["rows"])

    assert main(["eval", "recall", *plain]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "needles, 2 pairs, context 160" in words and "gain, recurrent" in words
    for more, says in (
        ([str(run)], "needles are planted in text; add --data DIR"),
        ([str(run), "--data", str(other_data)], "does not match the data"),
        ([str(run), *text, "--variant", "pairs"], "was trained on needles and does not know the tokens of pairs"),
        ([str(run), *text, "--values", "3"], "leave --values away"),
    ):
        assert main(["eval", "recall", *more]) == 2
        assert says in one_line(capsys)


def test_the_benchmark_refuses_what_it_cannot_add_to_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"rows": [{}]}')
    script = str(ROOT / "benchmarks" / "recall.py")
    for words, says in (
        (["--out", "r.json"], "r.json is not a file of recall results; choose another --out"),
        (["--out", "."], "--out is ., which is a folder"),
        (["--plot", "a.foo"], "--plot is a.foo; its name must end in"),
        (["--cost-plot", "/proc/a.svg"], "--cost-plot /proc/a.svg cannot be written"),
    ):
        command = [sys.executable, script, "swa-ssss", *words, "--keep", "runs"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 2 and says in done.stderr.splitlines()[-1] and not done.stdout
    assert (tmp_path / "r.json").read_text() == '{"rows": [{}]}' and not (tmp_path / "runs").exists()


def test_the_benchmark_trains_several_at_a_time_and_ends_with_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = ROOT / "benchmarks" / "recall.py"
    command = [
        sys.executable,
        str(script),
        "swa-sss",
        "lrt-ssss objective.passes=3 --pairs=3",
        "--seeds",
        "1",
        "--jobs",
        "2",
    ]
    command += [*TINY[:-2], "--settings", "train.tokens_per_step=128", "--out", str(tmp_path / "r.json")]
    command += ["--cost-plot", str(tmp_path / "cost.svg")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert [(run["experiment"], run["seed"], run["status"]) for run in result["runs"]] == [
        ("swa-sss", 1, 2),
        ("lrt-ssss objective.passes=3 --pairs=3", 1, 0),
    ]
    assert "did you mean 'swa-ssss'?" in result["runs"][0]["error"]
    assert {row["pairs"] for row in result["rows"]} == {3}
    (settings,) = {json.dumps(row["settings"]) for row in result["rows"]}
    assert json.loads(settings) == {"train.tokens_per_step": 128, "objective.passes": 3}
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == result["rows"]
    assert "recurrent" in done.stdout and "cost" in done.stdout
    assert "FLOPs of training" in (tmp_path / "cost.svg").read_text()
