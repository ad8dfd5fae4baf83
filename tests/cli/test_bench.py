"""`maglev bench` as a user meets it: a table or one JSON document, files that are whole, wrong requests in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maglev.__main__ import main
from maglev.bench import train_worker
from maglev.cli.bench import held_out_prompt
from maglev.data.shards import open_data
from maglev.errors import WorkError
from maglev.recipes import run_config
from tests.small_runs import Train, one_line


def test_decode_prints_a_table_and_writes_what_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "new" / "decode.json", tmp_path / "decode.svg"
    arguments = ["--quick", "--device", "cpu", "--batches", "2", "--positions", "5,50", "--weights", "int8,fp8"]
    assert main(["bench", "decode", *arguments, "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "maglev" in printed and "Random weights" in printed and "5, 50" in printed
    assert "fast, int8" in printed and "fast, fp8" in printed
    result = json.loads(out.read_text())
    assert {row["weight_format"] for row in result["rows"] if row["step"] == "fast"} == {"int8", "fp8"}
    assert {(row["batch"], row["position"]) for row in result["rows"]} == {(2, 5), (2, 50)}
    assert plot.read_text().startswith("<?xml") and sorted(path.name for path in tmp_path.iterdir()) == [
        "decode.svg",
        "new",
    ]


def test_a_recipe_reads_with_fixed_passes_and_says_that_its_weights_are_random(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "read.png"
    arguments = ["bench", "read", "--quick", "--device", "cpu", "--tokens", "40", "--json", "--plot", str(plot)]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["weights"]) for row in result["rows"]] == [
        ("swa", "random"),
        ("maglev-shared-0.1", "random"),
    ]
    assert result["passes_are"] == "fixed" and set(result["rows"][1]["passes"]) == {4}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_run_reads_text_until_it_settles(trained: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(trained("maglev-shared-0.1"))
    capsys.readouterr()
    (tmp_path / "a.txt").write_text("Some text of its own, which is short.")
    assert main(["bench", "read", run, "--quick", "--json", "--prompt-file", str(tmp_path / "a.txt")]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert "fewer than the 100 asked for" in err and 10 < result["rows"][1]["tokens"] < 40
    assert result["passes_are"] == "until settled" and result["rows"][1]["weights"] == "trained"
    assert main(["bench", "read", run, "--quick", "--tokens", "30"]) == 0
    printed = capsys.readouterr().out
    assert "Python's own documentation" in printed
    # of the run alone: the SWA beside it has random weights and no memory
    assert printed.count("from the memories of single steps") == 1


def test_a_run_reads_what_was_held_out(
    trained: Train, data: Path, other_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("maglev-shared-0.1"))
    capsys.readouterr()
    words = ["bench", "read", run, "--quick", "--tokens", "30", "--data"]
    assert main([*words, str(data), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] == f"held-out text of {data.name}" and result["rows"][1]["tokens"] == 30
    # documents one after another, over the ends of shards
    split = open_data(data).splits["validation"]
    tokens = np.concatenate([shard.tokens for shard in split.shards])
    assert np.array_equal(held_out_prompt(Path(run), data, split.tokens)[0], tokens)
    assert np.array_equal(held_out_prompt(Path(run), data, 30)[0], tokens[:30])
    for more, line in (
        ([str(data), "--tokens", "1000000"], f"the held-out text of {data} has {split.tokens:,}; ask for fewer"),
        ([str(other_data)], "does not match the data"),
        ([str(tmp_path)], "not a data folder"),
        ([str(data), "--prompt-file", "a.txt"], "exclude each other"),
    ):
        assert main([*words, *more]) == 2
        assert line in one_line(capsys)


def test_train_sets_models_beside_swa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "train.json", tmp_path / "train.svg"
    arguments = ["--quick", "--device", "cpu", "--depth", "1", "--recipes", "swa-ssss,maglev-shared-0.1"]
    assert main(["bench", "train", *arguments, "--out", str(out), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "recomputation not counted" in printed and "optimizer" in printed and "maglev-shared-0.1" in printed
    assert "of 1 timed" in printed
    assert "swa-ssss, maglev-shared-0.1: attention on cpu: blockwise (plain PyTorch)." in printed
    result = json.loads(out.read_text())
    assert result["benchmark"] == "train" and result["quick"] and plot.read_text().startswith("<?xml")
    swa, maglev = result["summary"]
    assert swa["of_allowed"] == 1 and 0 < maglev["allowed_by_flops"] < 1 and maglev["of_allowed"] > 0
    for row in result["rows"]:
        parts = row["start_s_by_part"]
        assert row["mfu"] > 0 and min(parts.values()) >= 0
        assert row["start_to_first_step_s"] == pytest.approx(sum(parts.values()), abs=1e-6)


@pytest.mark.parametrize("scaling", [[], ["--scaling"]], ids=["models", "scaling"])
def test_train_shows_what_failed_and_ends_with_status_1(
    scaling: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_worker(order: train_worker.Order) -> dict[str, Any]:
        if order.recipe == "lrt-ssss":
            raise WorkError("no room for [this] one")
        names = ("tokens_per_s", "seconds_per_step", "flops_per_token", "flops_per_s", "start_to_first_step_s")
        figures = dict.fromkeys(names, 1.0) | {"steps_timed": 3, "peak_bytes": None, "attention": "plain"}
        figures |= {"ms_by_part": {}, "ms_by_op": {}}
        configs = [run_config(order.recipe, order.depth, each) for each in order.settings]
        facts = {"device": "a", "dtype": "b", "torch": "c", "matrix_flops": 1.0, "copy_bytes_per_s": 1.0}
        return facts | {"rows": [train_worker.sizes_of(config) | figures for config in configs]}

    monkeypatch.setattr("maglev.bench.train.run_worker", run_worker)
    out, plot = tmp_path / "train.json", tmp_path / "train.svg"
    arguments = ["--quick", "--device", "cpu", "--depth", "1", "--context", "16", "--out", str(out), *scaling]
    assert main(["bench", "train", *arguments, "--recipes", "swa-ssss,lrt-ssss", "--plot", str(plot)]) == 1
    printed, said = capsys.readouterr()
    assert (
        "failed" in printed
        and "of 3 timed" in printed
        and "lrt-ssss, depth 1, context 16: no room for [this] one" in printed
    )
    assert "could not be measured: lrt-ssss, depth 1" in said and plot.exists()
    rows = json.loads(out.read_text())["rows"]
    assert [row["recipe"] for row in rows if "error" in row] == ["lrt-ssss"] * (len(rows) // 2)
    # where nothing could be measured there is nothing to draw
    plot.unlink()
    assert main(["bench", "train", *arguments, "--recipes", "lrt-ssss", "--plot", str(plot)]) == 1
    assert "Failed: lrt-ssss" in capsys.readouterr().out and not plot.exists()
    assert all(row["error"] for row in json.loads(out.read_text())["rows"])


def test_train_draws_how_its_cost_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maglev.bench.train.run_worker", train_worker.work)
    plot = tmp_path / "scaling.svg"
    arguments = ["--quick", "--scaling", "--device", "cpu", "--depth", "1", "--recipes", "swa-ssss", "--context", "16"]
    assert main(["bench", "train", *arguments, "--json", "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [each["axis"] for each in result["summary"]] == ["rows", "layers", "context"]
    assert {row["window"] for row in result["rows"]} == {4} and plot.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["decode", "--batches", "1,x"], "--batches is '1,x'"),
        (["decode", "--batches", "0"], "batches has 0"),
        (["decode", "--positions", "-5"], "positions has -5"),
        (["decode", "--weights", "plain,int4"], "--weights is 'int4'"),
        (["decode", "--depth", "0"], "depth is 0"),
        (["decode", "--dtype", "int3"], "--dtype is 'int3'"),
        (["decode", "--device", "abacus"], "--device is 'abacus'"),
        (["decode", "--plot", "a.gif"], "--plot is a.gif"),
        (["decode", "--out", "."], "--out is ., which is a folder"),
        (["decode", "--out", "/proc/a.json"], "--out /proc/a.json cannot be written"),
        (["read", "--plot", "/proc/a.svg"], "--plot /proc/a.svg cannot be written"),
        (["read", "swa-sss"], "did you mean 'swa-ssss'"),
        (["read", "no/run"], "is not a run folder"),
        (["read", "--passes", "0"], "passes is 0"),
        (["read", "--tokens", "0"], "tokens is 0"),
        (["read", "--prompt-file", "a.txt"], "--prompt-file is for a run"),
        (["read", "--data", "a"], "--data is for a run"),
        (["read", "no/run", "--depth", "3"], "leave --depth away"),
        (["train", "--recipes", "swa-sss"], "did you mean 'swa-ssss'"),
        (["train", "--depth", "12,x"], "--depth is '12,x'"),
        (["train", "--scaling", "--depth", "12,20"], "start from one depth"),
        (["train", "--recompute", "all"], "train.recompute is 'all'"),
        (["train", "--plot", "a.gif"], "--plot is a.gif"),
        (["raed"], "did you mean 'maglev bench read'"),
    ],
)
def test_wrong_requests_end_in_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert says in one_line(capsys)
