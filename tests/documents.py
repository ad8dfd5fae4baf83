"""What documents show to be typed: their code blocks and commands, for tests that run them."""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from maglev.__main__ import main

REPOSITORY = Path(__file__).resolve().parent.parent


def blocks(document: str, language: str) -> list[str]:
    """Of a document named by its path in the repository."""
    text = (REPOSITORY / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


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
    found = blocks(document, "python")
    text = smaller("\0".join(found), sizes or {})
    for block in text.split("\0"):
        exec(compile(block, document, "exec"), names)
    return names
