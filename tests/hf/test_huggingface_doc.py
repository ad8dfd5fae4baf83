"""The commands and the code of docs/huggingface.md run as they stand, on a small run."""

import re
import shlex
from pathlib import Path

import pytest

from maglev.__main__ import main
from tests.small_runs import Train

pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
pytest.importorskip("accelerate", reason="needs accelerate, for Trainer")


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "docs" / "huggingface.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_document_runs(
    repository: Path,
    trained: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/first").symlink_to(trained("maglev-shared-0.1", 2))
    lines = [shlex.split(line, comments=True) for block in blocks(repository, "sh") for line in block.splitlines()]
    assert [words[0] for words in lines] == ["pip", "maglev", "maglev"]
    for words in lines[1:]:
        assert main(words[1:]) == 0, capsys.readouterr().err
    assert main(["generate", "exported", "--max-tokens", "3"]) == 0
    names: dict = {}
    for block in blocks(repository, "python"):
        exec(compile(block, "docs/huggingface.md", "exec"), names)
    assert names["logits"].shape[:2] == names["more"].shape
    assert main(["generate", "tuned", "--max-tokens", "3"]) == 0, capsys.readouterr().err
