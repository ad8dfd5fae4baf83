"""`benchmarks/ship.py`: a run becomes weights of the package, and a card of what they do."""

import json
import sys
from pathlib import Path

import pytest

from maglev.__main__ import main as maglev_main
from maglev.runs import read_config
from tests.scripts import load_script
from tests.small_runs import Train

NAME = "maglev-test"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    found = load_script("benchmarks/ship.py")
    monkeypatch.setattr(found, "SHIPPED", tmp_path / "weights")
    monkeypatch.setattr(found, "RESULTS", tmp_path / "results")
    return found


def test_a_run_is_shipped_with_its_figures(
    script, data: Path, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, beside, folder = trained("maglev-closed"), trained("swa-ssss"), tmp_path / "weights" / NAME
    words = [str(run), "--name", NAME, "--data", str(data), "--beside", str(beside)]
    words += ["--text", "a little text", "--machine", "this machine"]
    monkeypatch.setattr(sys, "argv", ["ship.py", *words])
    script.main()
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert not any(name.endswith(".py") or name == "eval" for name in files)
    found = json.loads((tmp_path / "results" / f"{NAME}.json").read_text())
    card = (folder / "README.md").read_text()
    for key in ("bpb_recurrent", "bpb_recurrent_of_the_run", "bpb_lifted_of_the_run"):
        assert f"{found[key]:.4f}" in card and 0 < found[key] < 20
    assert f"{found['beside']['bpb']:.4f}" in card and "a little text" in card and "on this machine" in card
    # the card alone, again
    (folder / "README.md").unlink()
    monkeypatch.setattr(sys, "argv", ["ship.py", "--name", NAME])
    script.main()
    assert (folder / "README.md").read_text() == card


def test_the_cards_command_gives_that_configuration(script, data: Path, trained: Train, tmp_path: Path) -> None:
    run = trained("maglev-closed")
    config = read_config(run)
    settings = [word for each in script.settings(config) for word in each.split(" ", 1)]
    out = tmp_path / "again"
    command = ["train", config.recipe, "--depth", str(config.model.depth), "--data", str(data), "--out", str(out)]
    assert maglev_main([*command, *settings]) == 0
    assert read_config(out).to_dict() == config.to_dict()


@pytest.mark.parametrize("missing", ["--data", "--text", "--machine"])
def test_what_the_card_needs_has_to_be_said(
    script, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    words = [f"{name}={tmp_path}" for name in ("--data", "--text", "--machine") if name != missing]
    monkeypatch.setattr(sys, "argv", ["ship.py", str(trained("maglev-closed")), "--name", NAME, *words])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2 and not (tmp_path / "weights").exists()


def test_what_was_shipped_stays_where_the_next_cannot_be_measured(
    script, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "weights" / NAME / "README.md"
    kept.parent.mkdir(parents=True)
    kept.write_text("a card")
    words = ["--data", str(tmp_path / "nowhere"), "--text", "a", "--machine", "b"]
    monkeypatch.setattr(sys, "argv", ["ship.py", str(trained("maglev-closed")), "--name", NAME, *words])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2 and "nowhere" in capsys.readouterr().err
    assert kept.read_text() == "a card" and not (tmp_path / "results").exists()
    monkeypatch.setattr(sys, "argv", ["ship.py", "--name", NAME])
    with pytest.raises(SystemExit, match="2"):
        script.main()
