"""What docs/serving.md shows runs as it stands, against a server on another port."""

import re
import shlex
from pathlib import Path

import pytest

from maglev.cli.serve import serve
from tests.processes import Processes
from tests.serve.running import serving


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_python_runs(
    repository: Path, processes: Processes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks(repository, "python")
    names: dict = {}
    with serving(processes, run, tmp_path, "--name", "first") as server:
        for block in found:
            there = block.replace("http://127.0.0.1:8000", server.url)
            exec(compile(there, "docs/serving.md", "exec"), names)
        kept = [session["name"] for session in server.ask("GET", "/v1/sessions").json["data"]]
    assert len(found) == 2 and kept == ["another-end", "read", "tale"]
    assert "CompletionUsage" in capsys.readouterr().out


def test_the_options_exist(repository: Path) -> None:
    text = (repository / "docs" / "serving.md").read_text(encoding="utf-8")
    options = {name.replace("_", "-") for name in serve.__annotations__}
    for option in set(re.findall(r"`--([a-z-]+)", text)):
        assert option in options or option == "help", option
    commands = [shlex.split(line) for block in blocks(repository, "sh") for line in block.splitlines()]
    assert ["maglev", "serve", "runs/first"] in commands
