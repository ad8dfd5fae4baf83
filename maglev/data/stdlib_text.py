"""English that every Python carries: the language reference of `pydoc` and the standard library's docstrings.

Source files are parsed and never imported. The order is fixed: one Python gives the same documents each time.
"""

import ast
import inspect
import itertools
import os
import sys
import sysconfig
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from maglev.errors import RequestError

# Tests, generated tables, programs and what is installed beside the standard library.
SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idle_test",
    "idlelib",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text): the topics of `pydoc` first, then one document per module that has docstrings."""
    found = False
    for name, text in itertools.chain(topics(), module_documents(library_places())):
        found = True
        yield name, text
    if not found:
        raise RequestError(
            f"this Python ({sys.executable}) carries neither pydoc topics nor its library's source; "
            "use one that does, or give text of your own to `maglev data prepare`"
        )


def topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        return
    for name in sorted(texts):
        yield f"pydoc.{name}", texts[name].strip()


def library_places() -> list[Path]:
    """The folder of the standard library, and the zip that embedded Pythons have in its place."""
    folders = [Path(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib")]
    zip_name = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    zips = [Path(entry) for entry in sys.path if Path(entry).name == zip_name]
    return list(dict.fromkeys(place for place in folders + zips if place.exists()))


def module_documents(places: Iterable[Path]) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for place in places:
        for path, source in read_sources(place):
            name = ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")
            text = docstrings(source)
            if text and name not in seen:
                seen.add(name)
                yield name, text


def read_sources(place: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (path inside the library, source) of every module that is not skipped, sorted by path."""
    if place.is_dir():
        for path in sorted(python_files(place)):
            yield path, (place / path).read_bytes()
    elif zipfile.is_zipfile(place):
        with zipfile.ZipFile(place) as archive:
            for path in sorted(filter(is_wanted, archive.namelist())):
                yield path, archive.read(path)


def python_files(folder: Path) -> Iterator[str]:
    for current, folders, files in os.walk(folder):
        # Pruned in place: what is installed beside the library can be a hundred times its size.
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)
        inside = Path(current).relative_to(folder)
        yield from (path for path in ((inside / name).as_posix() for name in files) if is_wanted(path))


def is_wanted(path: str) -> bool:
    return path.endswith(".py") and not SKIPPED_FOLDERS.intersection(path.split("/"))


def docstrings(source: bytes) -> str:
    """Every docstring of a module in the order of its source; nothing where it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    found = (ast.get_docstring(node, clean=False) for node in in_source_order(tree))
    cleaned = (inspect.cleandoc(text) for text in found if text)
    return "\n\n".join(text for text in cleaned if text)


def in_source_order(node: ast.AST) -> Iterator[Documented]:
    """Depth first, which is the order of the lines. Expressions are left out: they hold no definitions."""
    if isinstance(node, Documented):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield from in_source_order(child)
