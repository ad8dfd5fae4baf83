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
    monkeypatch.setattr(sys, "argv", ["ship.py", *words])
    script.main()
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
    assert not any(name.endswith(".py") or name == "eval" for name in files)
    found = json.loads((tmp_path / "results" / f"{NAME}.json").read_text())
    card = (folder / "README.md").read_text()
    for key in ("bpb_recurrent", "bpb_recurrent_of_the_run", "bpb_lifted_of_the_run"):
        assert f"{found[key]:.4f}" in card and 0 < found[key] < 20
    assert f"{found['beside']['bpb']:.4f}" in card and found["text"].split()[0] in card
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


def test_without_data_nothing_is_shipped(script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ship.py", str(tmp_path), "--name", NAME])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 2 and not (tmp_path / "weights").exists()
