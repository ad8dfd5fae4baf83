"""The commands and the code of docs/huggingface.md run as they stand, on a small run."""

from pathlib import Path

import pytest

from tests.documents import blocks, commands, run_command, run_python
from tests.small_runs import Train

pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
pytest.importorskip("accelerate", reason="needs accelerate, for Trainer")


DOCUMENT = "docs/huggingface.md"


def test_the_document_runs(
    trained: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/first").symlink_to(trained("maglev-shared-0.1", 2))
    found = commands(blocks(DOCUMENT, "sh"))
    assert [words[0] for words in found] == ["pip", *3 * ["maglev"]]
    for words in found[1:]:
        run_command(words, capsys)
    for name in ("exported", "tiny"):
        run_command(["maglev", "generate", name, "--max-tokens", "3"], capsys)
    names = run_python(DOCUMENT)
    assert names["logits"].shape[:2] == names["more"].shape
    run_command(["maglev", "generate", "tuned", "--max-tokens", "3"], capsys)
