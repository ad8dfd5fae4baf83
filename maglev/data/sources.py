"""Where documents come from: parquet, JSON lines, text files, folders of them, Hub data sets."""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from maglev.errors import RequestError, WorkError

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".txt")
PARQUET_ROWS = 256
HUB_NAME = re.compile(r"(?:hf://datasets/)?([\w.-]+/[\w.-]+)(?::([\w.-]+))?")


class HubName(NamedTuple):
    name: str
    config: str | None


@dataclass(frozen=True)
class Source:
    """One SOURCE of the command line, resolved: files in a fixed order, or a Hub data set."""

    label: str
    files: tuple[Path, ...]
    hub: HubName | None
    column: str

    @property
    def size(self) -> int | None:
        """Bytes on disk; None for what is streamed."""
        return None if self.hub else sum(file.stat().st_size for file in self.files)

    def read(self) -> Iterator[tuple[str, int]]:
        """Yield each non-empty document with the bytes on disk consumed so far."""
        found = False
        before = 0
        for part in self.parts():
            for text, consumed in part.read_unchecked():
                found = True
                yield text, before + consumed
            before += part.size or 0
        if not found:
            raise RequestError(f"{self.label}: no text in it, only empty documents; give a source that has some")

    def parts(self) -> list["Source"]:
        """One source per file."""
        if self.hub:
            return [self]
        return [Source(str(file), (file,), None, self.column) for file in self.files]

    def read_unchecked(self) -> Iterator[tuple[str, int]]:
        """As `read`, for a single part, which may be without text."""
        if self.hub:
            documents: Iterator[tuple[str, int]] = ((text, 0) for text in _read_hub(self.hub, self.column))
        else:
            documents = _read_file(self.files[0], self.column)
        return ((text, consumed) for text, consumed in documents if text)


def open_source(source: str, column: str = "text") -> Source:
    path = Path(source)
    if path.is_dir():
        files = _files_in(path)
        if not files:
            raise RequestError(f"{source}: no readable file in this folder; known endings: {', '.join(ENDINGS)}")
        return Source(source, tuple(files), None, column)
    if path.exists():
        if not _is_known(path.name):
            raise RequestError(f"{source}: unknown kind of file; known endings: {', '.join(ENDINGS)}")
        return Source(source, (path,), None, column)
    hub = HUB_NAME.fullmatch(source)
    # where the first folder of a path exists, the path was meant, and not a data set of that name
    if hub is None or _is_known(source) or (hub[2] is None and Path(source).parent.is_dir()):
        raise RequestError(f"{source}: no such file or folder; check the path")
    return Source(source, (), HubName(hub[1], hub[2]), column)


def resolve_source(source: str) -> list[Path]:
    """The files of a source, in the order they are read; none for a Hub data set."""
    return list(open_source(source).files)


def iterate_documents(source: str, column: str = "text") -> Iterator[str]:
    """The non-empty documents of a source, one by one."""
    return (text for text, _ in open_source(source, column).read())


def _is_known(name: str) -> bool:
    return name.lower().endswith(ENDINGS)


def _files_in(folder: Path) -> list[Path]:
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(parent, name) for name in names if not name.startswith(".") and _is_known(name)]
    return sorted(files)


def _read_file(path: Path, column: str) -> Iterator[tuple[str, int]]:
    name = path.name.lower()
    try:
        if name.endswith(".parquet"):
            yield from _read_parquet(path, column)
        elif name.endswith(".txt"):
            yield _read_text(path), path.stat().st_size
        else:
            yield from _read_json_lines(path, column)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error}); check the file and its permissions") from None


def _read_text(path: Path) -> str:
    content = path.read_bytes()
    if b"\0" in content:
        raise RequestError(f"{path}: not a text file (NUL byte at offset {content.index(0)}); give plain UTF-8 text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path}: not a text file (invalid UTF-8 at offset {error.start}); convert it to UTF-8"
        ) from None


def _read_json_lines(path: Path, column: str) -> Iterator[tuple[str, int]]:
    with open(path, "rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.name.lower().endswith(".gz") else raw
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of_line(line, column, f"{path}, line {number}"), raw.tell()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise RequestError(
                f"{path}, after line {number}: damaged gzip ({error}); download or compress it again"
            ) from None


def _text_of_line(line: bytes, column: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where}: not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise RequestError(f"{where}: not a JSON object; each line must be one object with {column!r}")
    return _text_of_record(record, column, where)


def _text_of_record(record: dict[str, Any], column: str, where: str) -> str:
    if column not in record:
        raise RequestError(f"{where}: no {column!r} in it, only {_listed(record)}; name the one that holds text")
    text = record[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise RequestError(f"{where}: {column!r} holds {type(text).__name__}, not text; name another column")
    return text


def _read_parquet(path: Path, column: str) -> Iterator[tuple[str, int]]:
    size = path.stat().st_size
    done = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_schema(file.schema_arrow, column, path)
            rows = file.metadata.num_rows
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    done += 1
                    yield text or "", size * done // rows
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RequestError(f"{path}: not a readable parquet file ({reason}); download or write it again") from None


def _check_schema(schema: pyarrow.Schema, column: str, path: Path) -> None:
    if column not in schema.names:
        raise RequestError(
            f"{path}: no column {column!r} in it, only {_listed(schema.names)}; name the one that holds text"
        )
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise RequestError(f"{path}: column {column!r} holds {kind}, not text; name another column")


def _read_hub(hub: HubName, column: str) -> Iterator[str]:
    where = hub.name if hub.config is None else f"{hub.name}:{hub.config}"
    try:
        import datasets
    except ImportError:
        raise RequestError(
            f"{where}: no such file or folder; to read it as a Hub data set, install the extra 'hub' of maglev"
        ) from None
    try:
        records = iter(datasets.load_dataset(hub.name, hub.config, split="train", streaming=True))
        record = next(records, None)
    # Opening goes through the network and the data set's own layout, and can fail in any of their ways.
    except Exception as error:
        raise RequestError(
            f"{where}: no such file or folder, and not readable as a Hub data set ({_first_line(error)}); "
            f"check the name, its config (NAME:CONFIG) and the network"
        ) from None
    while record is not None:
        yield _text_of_record(record, column, where)
        try:
            record = next(records, None)
        except Exception as error:
            raise WorkError(f"{where}: the stream from the Hub broke off ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"
