"""`maglev eval bpb` as a user meets it."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.data.loader import Loader
from maglev.data.shards import open_data
from tests.processes import Processes
from tests.small_runs import Train, flip_byte, one_line

RECIPE = "maglev-shared-0.1"


def evaluate(run: Path, data: Path, *more: str) -> list[str]:
    return ["eval", "bpb", str(run), "--data", str(data), *more]


def value_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_one_document_with_the_source_in_every_name(
    trained: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(RECIPE)
    capsys.readouterr()
    assert main(evaluate(run, data, "--memory", "refined", "--passes", "2", "--json")) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    rows = Loader(open_data(data), "validation", 32, seed=0).rows_per_epoch
    assert (
        err
        == f"bits per byte, refined: {min(64, rows)} of {rows} rows\nbits per byte, refined: {rows} of {rows} rows\n"
    )
    assert (value["run"], value["recipe"], value["step"], value["split"]) == (str(run), RECIPE, 6, "validation")
    assert (value["memory"], value["passes"]) == ("refined", 2)
    assert 3 < value["bpb_refined"] < 8 and value["bytes"] > value["tokens"] > 1000
    assert set(value["by_position"][0]) == {"first", "last", "bpb_refined", "bytes"}
    assert not [key for key in value if key.startswith("bpb") and key != "bpb_refined"]


def test_for_people_there_is_a_table(trained: Train, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(RECIPE)
    capsys.readouterr()
    value = value_of(evaluate(run, data, "--rows", "5"), capsys)
    assert main(evaluate(run, data, "--rows", "5")) == 0
    out, _ = capsys.readouterr()
    words = " ".join(out.split())
    assert f"validation: {value['bpb_recurrent']:.4f} bits per byte with recurrent memories" in words
    assert "0 to 0" in out and "31 to 31" in out


def test_rows_splits_and_sources(trained: Train, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(RECIPE)
    capsys.readouterr()
    few = value_of(evaluate(run, data, "--rows", "2"), capsys)
    assert few["tokens"] <= 64
    assert value_of(evaluate(run, data, "--rows", "2", "--rows-per-pass", "1"), capsys)[
        "bpb_recurrent"
    ] == pytest.approx(few["bpb_recurrent"], abs=1e-6)
    assert value_of(evaluate(run, data, "--split", "train", "--rows", "2"), capsys)["split"] == "train"
    # to the end, refining is stepping
    settled = value_of(evaluate(run, data, "--rows", "2", "--memory", "refined", "--passes", "32"), capsys)
    assert settled["bpb_refined"] == pytest.approx(few["bpb_recurrent"], abs=1e-4)
    lifted = value_of(evaluate(run, data, "--rows", "2", "--memory", "lifted"), capsys)
    assert math.isfinite(lifted["bpb_lifted"]) and lifted["passes"] is None


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_measured(
    trained: Train, data: Path, tmp_path: Path, processes: Processes
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained(RECIPE), run)
    flip_byte(run / "checkpoints" / "step-00000006" / "decoder.safetensors")
    done = processes.run(evaluate(run, data, "--rows", "2", "--json"))
    assert json.loads(done.stdout)["step"] == 4
    assert "step-00000006 is damaged: decoder.safetensors" in done.stderr


@pytest.mark.parametrize("setting", ["data.document_mask", "data.memory_reset"])
def test_the_runs_document_settings_are_those_of_its_evaluation(
    setting: str, trained: Train, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights under another setting give another number."""
    run = tmp_path / "run"
    shutil.copytree(trained("maglev-shared-0.1"), run)
    numbers = []
    for value in (False, True):
        config = json.loads((run / "config.json").read_text())
        section, name = setting.split(".")
        config[section][name] = value
        (run / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        assert main(["eval", "bpb", str(run), "--data", str(data), "--json"]) == 0
        numbers.append(json.loads(capsys.readouterr().out)["bpb_recurrent"])
    assert numbers[0] != numbers[1]


def test_weights_in_8_bits_have_a_number_of_their_own(
    trained: Train, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the rounded decoder, whichever way it is computed."""
    run = trained(RECIPE)
    capsys.readouterr()
    found = {}
    for weights in ("plain", "int8", "fp8"):
        value = value_of(evaluate(run, data, "--rows", "4", "--weights", weights), capsys)
        assert value["weights"] == weights
        found[weights] = value["bpb_recurrent"]
    assert len(set(found.values())) == 3 and max(found.values()) - min(found.values()) < 0.05
    refining = ["--rows", "4", "--memory", "refined", "--passes", "32", "--weights", "int8"]
    assert value_of(evaluate(run, data, *refining), capsys)["bpb_refined"] == pytest.approx(found["int8"], abs=1e-4)
    assert main(evaluate(run, data, "--rows", "4", "--weights", "int8")) == 0
    assert "recurrent memories, int8 weights" in " ".join(capsys.readouterr().out.split())


def test_weights_that_cannot_be_are_refused(trained: Train, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(RECIPE)
    capsys.readouterr()
    assert main(evaluate(run, data, "--weights", "int4")) == 2
    assert "--weights is 'int4'; it must be one of plain, int8, fp8" in one_line(capsys)
    assert main(evaluate(run, data, "--weights", "fp8", "--memory", "lifted")) == 2
    assert "--weights fp8 goes with --memory recurrent or refined" in one_line(capsys)
