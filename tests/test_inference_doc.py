"""The code of docs/inference.md runs as it stands, on a small run; its commands too, at a quick size."""

import re
import shlex
from pathlib import Path

import pytest

from maglev.__main__ import main
from tests.small_runs import Train, data, trained

__all__ = ["data", "trained"]

RUN = "demo/maglev-shared-0.1"


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "docs" / "inference.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def place(trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run where the document has it."""
    monkeypatch.chdir(tmp_path)
    Path(RUN).parent.mkdir()
    Path(RUN).symlink_to(trained("maglev-shared-0.1"))
    return tmp_path


def test_the_python_runs(repository: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One block after another in one namespace, as a reader would."""
    found = blocks(repository, "python")
    assert len(found) >= 3 and RUN in found[0]
    names: dict = {}
    for block in found:
        exec(compile(block, "docs/inference.md", "exec"), names)
    assert (place / "s.safetensors").is_file() and capsys.readouterr().out
    assert names["again"].position == names["state"].position and names["first"] is not names["second"]
    assert names["lifted_state"].nbytes == names["state"].nbytes


def test_the_commands_run(repository: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for block in blocks(repository, "sh") for line in block.splitlines()]
    assert {tuple(shlex.split(line)[1:3]) for line in lines} == {("bench", "decode"), ("bench", "read")}
    for line in lines:
        words = [RUN if word == "RUN" else word for word in shlex.split(line)[1:]]
        assert main([*words, "--quick", "--device", "cpu"]) == 0, capsys.readouterr().err
    for name in ("decode.json", "decode.svg", "read.json", "read.svg"):
        assert (place / name).stat().st_size > 0
