"""The code of docs/inference.md runs as it stands, on a small run; its commands too, at a quick size."""

from pathlib import Path

import pytest

from tests.documents import blocks, commands, run_command, run_python
from tests.small_runs import Train, data, trained

__all__ = ["data", "trained"]

DOCUMENT = "docs/inference.md"
RUN = "demo/maglev-shared-0.1"


@pytest.fixture
def place(trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the run where the document has it."""
    monkeypatch.chdir(tmp_path)
    Path(RUN).parent.mkdir()
    Path(RUN).symlink_to(trained("maglev-shared-0.1"))
    return tmp_path


def test_the_python_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert RUN in blocks(DOCUMENT, "python")[0]
    names = run_python(DOCUMENT)
    assert (place / "s.safetensors").is_file() and capsys.readouterr().out
    assert names["again"].position == names["state"].position and names["first"] is not names["second"]
    assert names["lifted_state"].nbytes == names["state"].nbytes


def test_the_commands_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands(blocks(DOCUMENT, "sh"))
    assert {tuple(words[1:3]) for words in found} == {("bench", "decode"), ("bench", "read")}
    for words in found:
        run_command([RUN if word == "RUN" else word for word in words] + ["--quick", "--device", "cpu"], capsys)
    for name in ("decode.json", "decode.svg", "read.json", "read.svg"):
        assert (place / name).stat().st_size > 0
