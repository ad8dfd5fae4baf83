"""What docs/serving.md shows runs as it stands, against a server on another port."""

import re
from pathlib import Path

import pytest

from maglev.cli.serve import serve
from tests.documents import blocks, commands, run_python
from tests.processes import Processes
from tests.serve.running import serving

DOCUMENT = "docs/serving.md"


def test_the_python_runs(processes: Processes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(processes, run, tmp_path, "--name", "first") as server:
        run_python(DOCUMENT, sizes={"http://127.0.0.1:8000": server.url})
        kept = [session["name"] for session in server.ask("GET", "/v1/sessions").json["data"]]
    assert kept == ["another-end", "read", "tale"]
    assert "CompletionUsage" in capsys.readouterr().out


def test_the_options_exist(repository: Path) -> None:
    text = (repository / DOCUMENT).read_text(encoding="utf-8")
    options = {name.replace("_", "-") for name in serve.__annotations__}
    for option in set(re.findall(r"`--([a-z-]+)", text)):
        assert option in options or option == "help", option
    assert ["maglev", "serve", "runs/first"] in commands(blocks(DOCUMENT, "sh"))
