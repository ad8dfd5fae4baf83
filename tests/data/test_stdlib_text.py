"""Text that every Python carries."""

import sys
import zipfile
from pathlib import Path

import pytest

from maglev.data import stdlib_text
from maglev.errors import RequestError

SOURCE = b'''"""Module."""
import does_not_exist
class A:
    """Class,

    indented."""
    def inner(self):
        "Method."
        def deep():
            """Deep."""
async def last():
    """Last."""
if True:
    def conditional():
        """Conditional."""
def silent(): "" ; x = """not a docstring"""
'''
JOINED = "Module.\n\nClass,\n\nindented.\n\nMethod.\n\nDeep.\n\nLast.\n\nConditional."


@pytest.fixture(scope="module")
def all_documents() -> list[tuple[str, str]]:
    return list(stdlib_text.documents())


def test_some_megabytes_of_text(all_documents: list[tuple[str, str]]) -> None:
    assert sum(len(text.encode()) for _, text in all_documents) > 1_500_000
    assert all(name and text.strip() for name, text in all_documents)


def test_names_are_unique_and_wanted(all_documents: list[tuple[str, str]]) -> None:
    names = [name for name, _ in all_documents]
    assert len(set(names)) == len(names)
    assert {"textwrap", "argparse", "pydoc.if"} <= set(names)
    assert not any(part in stdlib_text.SKIPPED_FOLDERS for name in names for part in name.split("."))


def test_the_same_every_time(all_documents: list[tuple[str, str]]) -> None:
    assert list(stdlib_text.documents()) == all_documents


def test_docstrings_in_source_order() -> None:
    assert stdlib_text.docstrings(SOURCE) == JOINED


@pytest.mark.parametrize("source", [b"print 'old'", b"\0", b"# coding: no-such-coding\n", b"", b"x = 1"])
def test_what_has_no_docstrings_gives_nothing(source: bytes) -> None:
    assert stdlib_text.docstrings(source) == ""


def make_library(folder: Path) -> None:
    for name in ("one.py", "package/__init__.py", "package/two.py", "test/three.py", "site-packages/four.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SOURCE)


def test_a_folder_and_a_zip_give_the_same(tmp_path: Path) -> None:
    folder, archive = tmp_path / "lib", tmp_path / "lib.zip"
    make_library(folder)
    with zipfile.ZipFile(archive, "w") as file:
        for path in folder.rglob("*.py"):
            file.write(path, path.relative_to(folder).as_posix())
    expected = [("one", JOINED), ("package", JOINED), ("package.two", JOINED)]
    assert list(stdlib_text.module_documents([folder])) == expected
    assert list(stdlib_text.module_documents([archive])) == expected
    assert list(stdlib_text.module_documents([folder, archive])) == expected


def test_topics_alone_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_text, "library_places", lambda: [tmp_path])
    assert all(name.startswith("pydoc.") for name, _ in stdlib_text.documents())


def test_nothing_at_all_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_text, "library_places", lambda: [tmp_path])
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RequestError, match="maglev data prepare"):
        list(stdlib_text.documents())


def test_nothing_is_imported(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text('"""Loud."""\nraise SystemExit("imported")\n')
    assert list(stdlib_text.module_documents([tmp_path])) == [("loud", "Loud.")]
