"""`benchmarks/options.py` runs and tells what it says it does; what the numbers are is not a test's business."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from maglev.errors import RequestError
from maglev.objectives import build_objective
from maglev.recipes import RECIPES, run_config
from tests.scripts import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("benchmarks/options.py")


def rows_of(script: ModuleType, capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> list[Any]:
    assert script.main(["--quick", *words]) == status
    lines = capsys.readouterr().out.strip().splitlines()
    told = json.loads(lines[-1])
    assert told["setting"]["quick"] and len(lines) == len(told["rows"]) + 2
    return told["rows"]


def test_options_are_trained_and_set_side_by_side(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    words = ["--options", "injection tokens", "teacher", "from swa residual", "--keep", str(tmp_path / "kept")]
    rows = rows_of(script, capsys, *words, "--out", str(tmp_path / "out.json"))
    assert [row["option"] for row in rows] == ["injection tokens", "teacher", "from swa residual"]
    for row in rows:
        assert row["metric"] == "recall" and 0 <= row["recurrent"] <= 1 and 0 <= row["lifted"] <= 1
        assert len(row["disturbance_left"]) == 5 and row["disturbance_steps"] == 16
        assert row["contraction_step"] == pytest.approx(row["disturbance_left"][-1] ** (1 / 16))
        assert row["contraction_step"] >= 0 and row["train_tokens_per_s"] > 0 and row["step_tokens_per_s"] > 0
    tokens, teacher, residual = rows
    assert tokens["state_bytes"] > 1.9 * residual["state_bytes"]
    assert teacher["prefiller"] == 128 * 192
    # as long as `maglev eval recall` has them
    closed = script.Bench(script.parse(["--recipe", "maglev-closed", "--depth", "2", "--window", "8"]), tmp_path)
    assert closed.rollouts("maglev-closed") == {"objective.rollout": 64} and closed.rollouts("swa-ssss") == {}
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
    # what was kept is not trained again; steps that are timed are runs of their own
    began = {path: path.stat().st_mtime_ns for path in (tmp_path / "kept").rglob("decoder.safetensors")}
    again = rows_of(script, capsys, *words, "--timed", "2")
    assert len(list((tmp_path / "kept").glob("*-timed"))) == len(rows)
    assert {path: path.stat().st_mtime_ns for path in began} == began
    assert [row["recurrent"] for row in again] == [row["recurrent"] for row in rows]


def test_a_text_serves_as_well_and_a_failure_stops_nothing(
    script: ModuleType, capsys: pytest.CaptureFixture[str], data: Path
) -> None:
    words = ["--options", "injection layer_kv", "swa", "--data", str(data), "--set", "model.injection=layer_kv"]
    failed, row = rows_of(script, capsys, *words, status=1)
    assert failed["option"] == "swa" and "model.injection" in failed["error"]
    assert row["metric"] == "bpb" and row["recurrent"] > 0 and row["lifted"] > 0


def test_some_at_a_time_come_after_what_they_need(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is a command that measures one option alone; what is asked for and not there is made in the first round."""
    rounds = []

    def work(jobs: list[Any], at_a_time: int, ended: Any, **_: Any) -> None:
        rounds.append([job.facts["option"] for job in jobs])
        for job in jobs:
            options = script.parse(job.command[2:])
            assert (options.one, options.seeds, options.keep) == (job.facts["option"], [3], tmp_path)
            ended(job.facts | {"status": 0, "seconds": 1.0} | dict.fromkeys(script.COLUMNS, 1))

    monkeypatch.setattr(script, "work_through", work)
    words = ["--options", "from swa", "Q full", "--jobs", "3", "--seeds", "3", "--keep", str(tmp_path)]
    rows = rows_of(script, capsys, *words)
    assert rounds == [["Q full", "swa"], ["from swa shared_kv", "from swa residual"]]
    assert [row["option"] for row in rows] == [*rounds[0], *rounds[1]] and rows[0]["at_a_time"] == 3
    assert not {"status", "seconds"} & set(rows[0])


def test_rows_of_the_same_setting_stay(script: ModuleType, tmp_path: Path) -> None:
    arguments = script.parse(["--quick", "--device", "cpu", "--out", str(tmp_path / "out.json")])
    assert script.rows_before(arguments) == []
    good, failed = {"option": "swa", "seed": 0, "recurrent": 1.0}, {"option": "swa", "seed": 0, "error": "no time"}
    other, newer = {"option": "Q as P", "seed": 0, "recurrent": 0.5}, good | {"recurrent": 0.9}
    (tmp_path / "out.json").write_text(json.dumps({"setting": script.setting(arguments), "rows": [good]}))
    later = script.parse(["--quick", "--device", "cpu", "--options", "swa", "--out", str(tmp_path / "out.json")])
    before = script.rows_before(later)
    assert before == [good]
    assert script.together(before, [failed, other]) == [good, other]
    assert script.together([failed], [newer]) == [newer] and script.together([good], [newer]) == [newer]
    later.steps = 7
    with pytest.raises(RequestError, match=r"another setting \(steps\)"):
        script.rows_before(later)


@pytest.mark.parametrize("depth", [2, 4, 8])
@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-closed"])
def test_every_option_can_be_built(script: ModuleType, recipe: str, depth: int) -> None:
    found = script.all_options(recipe, depth, window=8)
    assert {option.recipe == recipe for name, option in found.items() if name != "swa"} == (
        {True} if recipe == "maglev-closed" else {True, False}
    )
    assert {option.question for option in found.values()} == {
        "baseline", "injection", "strength", "sharing", "teacher", "start",
    }  # fmt: skip
    for option in found.values():
        assert option.recipe in RECIPES
        settings = {"model.vocab_size": 61, "model.window": 8} | option.settings
        assert build_objective(run_config(option.recipe, depth, settings)).decoder.config.delay in (1, 8)
