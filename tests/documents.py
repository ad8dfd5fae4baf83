"""What documents show to be typed: their code blocks and commands, for tests that run them."""

import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from maglev.__main__ import main
from maglev.cli.app import app

REPOSITORY = Path(__file__).resolve().parent.parent


def fenced(document: str) -> list[tuple[str, str]]:
    """Language and content of every block of a document, which is named by its path in the repository."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(document: str, language: str) -> list[str]:
    return [content for found, content in fenced(document) if found == language]


def smaller(text: str, sizes: Mapping[str, str]) -> str:
    """What takes minutes as it stands, at a size for tests; a size that the text does not have is a mistake here."""
    for large, small in sizes.items():
        assert large in text, large
        text = text.replace(large, small)
    return text


def commands(text: str | Iterable[str]) -> list[list[str]]:
    """The words of every command of one or several blocks; lines that end in a backslash go on, comments fall away."""
    whole = text if isinstance(text, str) else "".join(text)
    lines = (shlex.split(line, comments=True) for line in whole.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `maglev ...` prints; it has to end well."""
    assert words[0] == "maglev", words
    status = main(words[1:])
    out, err = capsys.readouterr()
    assert status == 0, (words, err)
    return out


def run_python(
    document: str, names: dict[str, Any] | None = None, sizes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Every Python block, one after another in one namespace, as a reader would; the names it leaves."""
    names = {} if names is None else names
    for block in smaller("\0".join(blocks(document, "python")), sizes or {}).split("\0"):
        exec(compile(block, document, "exec"), names)
    return names


def extras_exist(words: list[str]) -> None:
    """Of `maglev[NAME]` and `.[NAME]`."""
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"\[([a-z,]+)\]", " ".join(words)):
        assert set(names.split(",")) <= set(known), names


def target_exists(words: list[str]) -> None:
    """Of `make TARGET`."""
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in words[1:]:
        assert "=" in target or re.search(rf"^{target}:", makefile, re.MULTILINE), target


def options_exist(words: list[str]) -> None:
    """The verb of a `maglev` command, and its options; prose may stop in the middle of one."""
    command: Any = typer.main.get_command(app)
    for word in words[1:]:
        if not hasattr(command, "commands") or word not in command.commands:
            break
        command = command.commands[word]
    known = [name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)]
    options = {*known, "--help"}
    if not hasattr(command, "commands"):
        assert {word for word in words if word.startswith("--")} <= options, words
