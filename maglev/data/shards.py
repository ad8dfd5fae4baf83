"""Token shards on disk: flat arrays of documents, opened by memory map, checked against an index."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError, WorkError
from maglev.files import sha256_of_file

FORMAT = "maglev-tokens"
VERSION = 1
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 100_000_000

# Files whose checksum this process has compared, by (path, checksum, size, time of change).
_verified: set[tuple[str, str, int, int]] = set()


@dataclass(frozen=True)
class ShardFile:
    """One array on disk with what the index says about it."""

    path: Path
    size: int
    sha256: str

    def check_size(self) -> None:
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise RequestError(f"{self.path}: missing; run `maglev data prepare` again") from None
        if size != self.size:
            raise WorkError(f"{self.path}: {size} bytes instead of {self.size}; run `maglev data prepare` again")

    def open(self) -> np.ndarray:
        """Memory-map the array, after comparing its checksum the first time in this process."""
        self.check_size()
        status = self.path.stat()
        key = (str(self.path.resolve()), self.sha256, status.st_size, status.st_mtime_ns)
        if key not in _verified:
            if sha256_of_file(self.path) != self.sha256:
                raise WorkError(f"{self.path}: damaged, its checksum is wrong; run `maglev data prepare` again")
            _verified.add(key)
        return np.load(self.path, mmap_mode="r", allow_pickle=False)


@dataclass(frozen=True)
class Shard:
    """Documents one after another, each from its BOS on; offsets[i] is where document i starts."""

    token_count: int
    documents: int
    bytes: int
    tokens_file: ShardFile
    offsets_file: ShardFile
    _opened: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def tokens(self) -> np.ndarray:
        return self._open(self.tokens_file)  # (token_count,)

    @property
    def offsets(self) -> np.ndarray:
        return self._open(self.offsets_file)  # (documents + 1,)

    def _open(self, file: ShardFile) -> np.ndarray:
        if file.path.name not in self._opened:
            self._opened[file.path.name] = file.open()
        return self._opened[file.path.name]


@dataclass(frozen=True)
class Split:
    """A named part of the data, such as `train`."""

    name: str
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.token_count for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of the raw text; BOS counts none."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class TokenData:
    """A folder made by `maglev data prepare`."""

    folder: Path
    tokenizer: Tokenizer
    vocab_size: int
    splits: dict[str, Split]
    fingerprint: str


def open_data(folder: str | Path) -> TokenData:
    folder = Path(folder)
    index = _read_index(folder)
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    try:
        expected = index["tokenizer"]
        splits = {name: _split(folder, name, shards) for name, shards in index["splits"].items()}
        vocab_size = int(index["vocab_size"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise RequestError(f"{folder / INDEX}: damaged index; run `maglev data prepare` again") from None
    if tokenizer.fingerprint != expected:
        raise RequestError(
            f"{folder / TOKENIZER}: not the tokenizer this data was made with (the index expects fingerprint "
            f"{str(expected)[:12]}, the file has {tokenizer.fingerprint[:12]}); put the right one back or "
            f"run `maglev data prepare` again"
        )
    for split in splits.values():
        for shard in split.shards:
            shard.tokens_file.check_size()
            shard.offsets_file.check_size()
    return TokenData(folder, tokenizer, vocab_size, splits, fingerprint_of(index))


def fingerprint_of(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class SplitWriter:
    """Collects the documents of one split and writes a shard whenever enough tokens are there; full at its limit."""

    def __init__(
        self,
        folder: Path,
        name: str,
        tokenizer: Tokenizer,
        shard_tokens: int = SHARD_TOKENS,
        limit: int | None = None,
    ) -> None:
        self.folder = folder
        self.name = name
        self.bos_id = tokenizer.bos_id
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.shard_tokens = shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.limit, self.total = limit, 0
        self._start_shard()

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.total >= self.limit

    def _start_shard(self) -> None:
        self._documents: list[np.ndarray] = []
        self._tokens = 0
        self._bytes = 0

    def add(self, ids: Iterable[int], text_bytes: int) -> None:
        """Add a document given by its tokens without BOS."""
        document = np.array([self.bos_id, *ids], dtype=self.dtype)
        if self._documents and self._tokens + len(document) > self.shard_tokens:
            self._write_shard()
        self._documents.append(document)
        self._tokens += len(document)
        self.total += len(document)
        self._bytes += text_bytes

    def finish(self) -> list[dict[str, Any]]:
        """The split's entry in the index."""
        if self._documents:
            self._write_shard()
        return self.shards

    def _write_shard(self) -> None:
        stem = f"{self.name}-{len(self.shards):05d}"
        lengths = [len(document) for document in self._documents]
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype("<i8")
        self.shards.append(
            {
                "tokens": self._tokens,
                "documents": len(self._documents),
                "bytes": self._bytes,
                "tokens_file": _write_array(self.folder / f"{stem}.tokens.npy", self._documents),
                "offsets_file": _write_array(self.folder / f"{stem}.offsets.npy", [offsets]),
            }
        )
        self._start_shard()


def index_of(tokenizer: Tokenizer, splits: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "tokenizer": tokenizer.fingerprint,
        "splits": splits,
    }


def files_in_index(index: dict[str, Any]) -> list[str]:
    shards = [shard for shards in index["splits"].values() for shard in shards]
    return [shard[kind]["name"] for shard in shards for kind in ("tokens_file", "offsets_file")]


def _write_array(path: Path, parts: list[np.ndarray]) -> dict[str, Any]:
    """Write the parts as one flat .npy. Plain writes, since a memory map on a full disk kills the process."""
    header = {
        "descr": np.lib.format.dtype_to_descr(parts[0].dtype),
        "fortran_order": False,
        "shape": (sum(len(part) for part in parts),),
    }
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part.data)
    return {"name": path.name, "size": path.stat().st_size, "sha256": sha256_of_file(path)}


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"{folder}: not a data folder, it has no {INDEX}; make one with `maglev data prepare SOURCE --out {folder}`"
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: cannot be read ({error}); run `maglev data prepare` again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise RequestError(f"{folder}: not a data folder, its {INDEX} is something else's; run `maglev data prepare`")
    if index.get("version") != VERSION:
        raise RequestError(
            f"{path}: data format version {index.get('version')}, this Maglev reads {VERSION}; "
            f"run `maglev data prepare` again"
        )
    return index


def _split(folder: Path, name: str, shards: list[dict[str, Any]]) -> Split:
    return Split(name, tuple(_shard(folder, shard) for shard in shards))


def _shard(folder: Path, entry: dict[str, Any]) -> Shard:
    tokens_file, offsets_file = (
        ShardFile(folder / entry[kind]["name"], int(entry[kind]["size"]), str(entry[kind]["sha256"]))
        for kind in ("tokens_file", "offsets_file")
    )
    return Shard(int(entry["tokens"]), int(entry["documents"]), int(entry["bytes"]), tokens_file, offsets_file)
