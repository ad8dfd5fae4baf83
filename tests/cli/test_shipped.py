"""Weights that come with the package: found by their name, read and never written to."""

from pathlib import Path

import pytest
import torch

import maglev
from maglev import runs
from maglev.__main__ import main
from maglev.errors import RequestError
from tests.small_runs import Train, one_line

NAME = "tiny"


@pytest.fixture
def shipped(trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model under that name, as an export in half of the bytes, and a working folder elsewhere."""
    pytest.importorskip("transformers")
    run, folder = trained("maglev-shared-0.1"), tmp_path / "weights" / NAME
    assert main(["export", str(run), str(folder), "--without-prefiller", "--dtype", "bfloat16"]) == 0
    monkeypatch.setattr(runs, "SHIPPED", folder.parent)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_a_name_writes_what_its_folder_writes(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    texts = []
    for model in (NAME, str(shipped)):
        assert main(["generate", model, "--prompt", "The", "--max-tokens", "8", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert maglev.load(NAME, device="cpu").fingerprint == maglev.load(shipped, device="cpu").fingerprint


def test_a_folder_of_that_name_comes_first(shipped: Path) -> None:
    Path(NAME).mkdir()
    with pytest.raises(RequestError, match=f"^{NAME} is not a run folder, .*, or {NAME}$"):
        maglev.load(NAME)


@pytest.mark.parametrize("name", ["tin", "../weights/tiny/nothing", ""])
def test_other_names_are_folders(shipped: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.run_folder(name) == Path(name)
    capsys.readouterr()
    assert main(["generate", name, "--prompt", "a"]) == 2
    assert f"or {NAME}" in one_line(capsys)


def test_rounding_halves_the_bytes_and_changes_no_name(shipped: Path, trained: Train) -> None:
    rounded = maglev.load(shipped, device="cpu").decoder.state_dict()
    exact = maglev.load(trained("maglev-shared-0.1"), device="cpu").decoder.state_dict()
    assert rounded.keys() == exact.keys()
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.bfloat16().float()), name
    stored = sum(tensor.numel() * 2 for tensor in exact.values())
    assert stored < (shipped / "model.safetensors").stat().st_size < 1.2 * stored + 10_000


@pytest.mark.parametrize("more", [["--dtype", "int3"], ["--format", "run", "--dtype", "bfloat16"]])
def test_what_cannot_be_rounded_is_refused(shipped: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", NAME, "out", *more]) == 2
    assert "dtype" in one_line(capsys) and not Path("out").exists()


def test_a_server_keeps_its_sessions_outside(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from maglev.cli import serve

    told: dict = {}
    monkeypatch.setattr(serve, "SHIPPED", shipped.parent)
    monkeypatch.setattr(serve, "serve_here", lambda run, *rest, **more: told.update(more, run=run))
    assert main(["serve", NAME, "--port", "0"]) == 0
    assert told["run"] == shipped and told["name"] == NAME and told["sessions"] == Path(f"{NAME}-sessions")
