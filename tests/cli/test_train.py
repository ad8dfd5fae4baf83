"""`maglev train` as a user meets it: every recipe, what it prints and leaves, and that the run is of use."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main
from maglev.cli.train import MeterWatch
from maglev.config import RunConfig
from maglev.model.accounting import state_nbytes
from maglev.runs import read_config, read_metrics
from maglev.train import launch
from maglev.train.distributed import SaidElsewhere
from tests.helpers import ALL_RECIPES, MAGLEV_RECIPES, MEMORY_RECIPES
from tests.small_runs import FAST, train_arguments

pytestmark = pytest.mark.usefixtures("without_speed")


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_every_recipe_goes_from_data_to_text(
    recipe: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = FAST | {"train.validate_every": 3, "train.tensorboard": "true"}
    summary = run_json(train_arguments(recipe, data, run, settings, depth=2), capsys)
    assert summary | {"seconds": 0} == {
        "run": str(run), "recipe": recipe, "step": 6, "steps": 6, "finished": True, "tokens": 768,
        "seconds": 0, "bad_steps": 0, "signal": 0,
    }  # fmt: skip
    names = {path.name for path in run.iterdir()}
    assert names == {"config.json", "tokenizer.json", "metrics.jsonl", "checkpoints", "tensorboard"}
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    config = read_config(run)
    assert RunConfig.from_dict(json.loads((run / "config.json").read_text())) == config
    assert (config.recipe, config.model.vocab_size, config.model.depth) == (recipe, 300, 2)
    rows = read_metrics(run)
    memory = {"lrt": "refined", "mag": "lifted"}.get(recipe[:3], "none")
    assert [(row["step"], row["memory"]) for row in rows if row["kind"] == "train"] == [
        (n, memory) for n in range(1, 7)
    ]
    assert rows[-1]["kind"] == "validation" and rows[-1]["bpb_recurrent"] < rows[3]["bpb_recurrent"]
    assert [name for name in rows[0] if name.endswith("loss")] == ["total_loss", "next_token_loss", "consistency_loss"]

    sources = ["recurrent"]
    sources += ["refined"] if recipe in MEMORY_RECIPES else []
    sources += ["lifted"] if recipe in MAGLEV_RECIPES else []
    for source in sources:
        arguments = ["eval", "bpb", str(run), "--data", str(data), "--memory", source, "--rows", "3"]
        found = run_json(arguments, capsys)
        assert found["memory"] == source and found["step"] == 6 and 3 < found[f"bpb_{source}"] < 8
    written = run_json(["generate", str(run), "--prompt", "The", "--max-tokens", "8", "--temperature", "1"], capsys)
    assert written["text"] and written["state_bytes"] == state_nbytes(config.model, 4)
    assert run_json(["info", str(run)], capsys)["recipe"] == recipe


def test_without_json_a_line_for_people(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(train_arguments("maglev-shared-0.1", data, tmp_path / "run", {"train.validate_every": 6})) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'run'}: step 6 of 6, 768 tokens\n"
    lines = err.splitlines()
    assert lines[0].startswith("maglev-shared-0.1, depth 1: 6 steps of 128 tokens (0.0")
    assert "1 x 4 rows per rank on cpu" in lines[0] and lines[1].startswith("attention on cpu")
    assert re.fullmatch(
        r"maglev-shared-0\.1: 6 of 6 steps loss \d\.\d{4} \(lifted\) consistency 0\.\d{4} [\d,]+ tokens/s MFU \d+% "
        r"0:00:00 left",
        lines[-2],
    )
    assert re.fullmatch(
        r"step 6: bits per byte recurrent \d\.\d{4}, lifted \d\.\d{4}; "
        r"of a disturbance of the memory \S+ is left after a step, \S+ after \d+",
        lines[-1],
    )


@pytest.mark.parametrize("setting", [{"train.attention": "fused"}, {"train.tokens_per_step": 100}])
def test_what_is_refused_leaves_no_folder_and_takes_none_away(
    setting: dict[str, Any], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, there = tmp_path / "new", tmp_path / "there"
    there.mkdir()
    for run in (new, there):
        assert main(train_arguments("swa-ssss", data, run, setting)) in (1, 2)
        assert next(iter(setting)) in capsys.readouterr().err
    assert not new.exists() and list(there.iterdir()) == []


class Seen:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, stage: str, done: int, total: int | None = None, note: str = "") -> None:
        self.notes.append(note)


def test_time_left_counts_the_steps_of_this_session(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, now = Seen(), [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = MeterWatch(meter, "a run", quiet=False)
    for step, seconds in ((901, 50.0), (902, 60.0), (911, 250.0), (1000, 7000.0)):
        now[0] = seconds
        watch.step(step, 1000, "loss 1")
    assert meter.notes == ["loss 1", "loss 1 0:16:20 left", "loss 1 0:29:40 left", "loss 1 0:00:00 left"]


def test_progress_on_a_terminal(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main([*train_arguments("swa-ssss", data, tmp_path / "run"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["finished"] and "6 of 6 steps" in err and "tokens/s" in err


def test_other_ranks_show_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a bar on the terminal nor a line about what another rank has told."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def stopped(recipe: str, data: Path, run: Path, watch: MeterWatch, **settings: Any) -> dict[str, Any]:
        watch.say("a remark")
        watch.step(1, 2, "loss 3")
        raise SaidElsewhere("rank 0 failed", 2)

    monkeypatch.setattr(launch, "train", stopped)
    assert main(train_arguments("swa-ssss", data, tmp_path / "run")) == 2
    assert capsys.readouterr() == ("", "")


def test_a_signal_becomes_the_exit_status(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"run": "r", "step": 3, "steps": 6, "tokens": 9, "signal": 15}
    monkeypatch.setattr(launch, "train", lambda *arguments, **settings: done)
    assert main(train_arguments("swa-ssss", data, tmp_path / "run")) == 143
    out, err = capsys.readouterr()
    assert out == "r: step 3 of 6, 9 tokens\n"
    assert err.count("\n") == 1 and "--resume" in err


def test_init_from_is_an_option_and_a_setting(
    data: Path, tmp_path: Path, trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    swa = trained("swa-ssss")
    arguments = train_arguments("maglev-shared-0.1", data, tmp_path / "run", {}, "--init-from", str(swa))
    assert main(arguments) == 0
    assert f"decoder taken from {swa}" in capsys.readouterr().err
    assert read_config(tmp_path / "run").train.init_from == str(swa)
