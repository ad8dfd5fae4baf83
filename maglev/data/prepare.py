"""Documents in, a data folder out: train or take a tokenizer, hold out validation, write shards."""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from maglev.data.held_out import Document, HeldOut, Nothing, choose_held_out
from maglev.data.shards import FORMAT, INDEX, SHARD_TOKENS, TOKENIZER, SplitWriter, files_in_index, index_of
from maglev.data.sources import Source, open_source
from maglev.data.tokenizer import Tokenizer, check_vocab_size
from maglev.errors import RequestError, WorkError
from maglev.files import TEMPORARY_PREFIX, atomic_folder, remove_leftovers, sync, write_json

VOCAB_SIZE = 32768
SAMPLE_BYTES = 1_000_000_000
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000
OUR_FILES = re.compile(r"index\.json|tokenizer\.json|(train|validation)-\d{5,}\.(tokens|offsets)\.npy")

# Called with the stage (tokenizer, merges, train, validation), bytes of the sources done, bytes in all.
Progress = Callable[[str, int, int | None], None]


def prepare(
    sources: list[str],
    out: str | Path,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: str | Path | None = None,
    validation: str | None = None,
    column: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    sample_bytes: int = SAMPLE_BYTES,
    train_tokens: int | None = None,
    validation_tokens: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make the data folder `out` and answer with a summary that can go to JSON as it is.

    Of `train_tokens` and `validation_tokens` a split has no more than its last document brings; what comes after is not
    read, or left out.
    """
    started = time.monotonic()
    report = progress or (lambda stage, done, total: None)
    folder = Path(out).resolve()
    limits = {"train": train_tokens, "validation": validation_tokens}
    for split, limit in limits.items():
        if limit is not None and limit < 1:
            raise RequestError(f"--{split}-tokens is {limit}; it must be at least 1")
    if tokenizer is None:
        check_vocab_size(vocab_size)
    given = Tokenizer.load(tokenizer) if tokenizer else None
    _check_out(folder, out, overwrite)
    held_back = [open_source(validation, column)] if validation else []
    training = _training_sources(sources, column, held_back, folder)

    held_out = Nothing() if held_back else choose_held_out(text for text, _ in _read(training))
    trained = given or Tokenizer.train(_sample(training, held_out, sample_bytes, report), vocab_size)
    try:
        with _new_folder(folder) as temporary:
            writers = {name: SplitWriter(temporary, name, trained, shard_tokens, limits[name]) for name in limits}
            divided = held_out.divide(_read(training))
            _encode(divided, trained, writers, "train", held_out, _total(training), report)
            for source in held_back:
                documents = (
                    Document("validation", text, consumed) for _, text, consumed in held_out.divide(source.read())
                )
                _encode(documents, trained, writers, "validation", held_out, source.size, report)
            index = index_of(trained, {name: writer.finish() for name, writer in writers.items()})
            trained.save(temporary / TOKENIZER)
            write_json(temporary / INDEX, index)
    except OSError as error:
        raise WorkError(
            f"{out}: could not be written ({error}); free space or mend permissions, then run it again"
        ) from error
    files = [part.label for source in training + held_back for part in source.parts()]
    return _summary(index, files, held_out, started) | {"out": str(out)}


def _training_sources(sources: list[str], column: str, held_back: list[Source], folder: Path) -> list[Source]:
    """The sources without validation's files, which may lie in one folder with them, and our own output."""
    if not sources:
        raise RequestError("no source given; name at least one file, folder or Hub data set")
    reserved = {file.resolve() for source in held_back for file in source.files}
    training = []
    for name in sources:
        source = open_source(name, column)
        kept = [file for file in source.files if file.resolve() not in reserved]
        kept = [file for file in kept if folder not in file.resolve().parents]
        if source.files and not kept:
            raise RequestError(f"{name}: nothing left to train on beside validation; give another source")
        training.append(replace(source, files=tuple(kept)))
    return training


def _read(sources: list[Source]) -> Iterator[tuple[str, int]]:
    before = 0
    for source in sources:
        for text, consumed in source.read():
            yield text, before + consumed
        before += source.size or 0


def _total(sources: list[Source]) -> int | None:
    sizes = [source.size for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def _sample(sources: list[Source], held_out: HeldOut, budget: int, report: Progress) -> Iterator[str]:
    """Training texts for the tokenizer, an equal share of the budget from each file."""
    parts = [part for source in sources for part in source.parts()]
    total = _total(sources)
    done = 0
    for index, part in enumerate(parts):
        share = budget // (len(parts) - index)
        for split, text, consumed in held_out.divide(part.read_unchecked()):
            if split != "train":
                continue
            content = text.encode()[:share]
            share -= len(content)
            budget -= len(content)
            yield content.decode(errors="ignore")
            report("tokenizer", done + consumed, total)
            if not share:
                break
        done += part.size or 0
    report("merges", 0, None)


def _encode(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    writers: dict[str, SplitWriter],
    stage: str,
    held_out: HeldOut,
    total: int | None,
    report: Progress,
) -> None:
    for batch in _batches(documents):
        wanted = [document for document in batch if not writers[document.split].is_full]
        ids = tokenizer.encode_batch([document.text for document in wanted])
        for document, document_ids in zip(wanted, ids, strict=True):
            writer = writers[document.split]
            if not writer.is_full:
                writer.add(document_ids, len(document.text.encode()))
        report(stage, batch[-1].consumed, total)
        if writers[stage].is_full and _is_enough(writers, stage, held_out):
            break


def _is_enough(writers: dict[str, SplitWriter], stage: str, held_out: HeldOut) -> bool:
    """The split is full, and so is the share that is held out of it; without a limit of its own that has a document."""
    share = writers["validation"]
    return (
        stage != "train" or isinstance(held_out, Nothing) or share.is_full or (share.limit is None and share.total > 0)
    )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_out(folder: Path, out: str | Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise RequestError(f"{out}: is a file; give a folder for --out")
    names = [path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY_PREFIX)]
    finished = _old_files(folder) is not None
    foreign = [name for name in names if not OUR_FILES.fullmatch(name)]
    if foreign and not finished:
        raise RequestError(f"{out}: holds other files ({foreign[0]}); give an empty or a new folder for --out")
    if names and not overwrite:
        raise RequestError(f"{out}: already holds prepared data; give another --out, or --overwrite")


def _old_files(folder: Path) -> list[str] | None:
    """What an earlier `prepare` wrote to the folder, by its index; None where there is no such index."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = [INDEX, TOKENIZER, *files_in_index(index)] if index["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return names and [name for name in names if OUR_FILES.fullmatch(name)]


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files become those of `folder`, the index last."""
    if not folder.exists():
        with atomic_folder(folder) as temporary:
            yield temporary
        return
    # The folder may be a mount point or the working directory: it stays, and only its files change.
    remove_leftovers(folder)
    staged = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder))
    try:
        with atomic_folder(staged) as temporary:
            yield temporary
        _replace_files(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _replace_files(staged: Path, folder: Path) -> None:
    old = _old_files(folder)
    if old is None:
        old = [path.name for path in folder.iterdir() if OUR_FILES.fullmatch(path.name)]
    # A folder without index is visibly unfinished: the old index goes first, the new one comes last.
    (folder / INDEX).unlink(missing_ok=True)
    sync(folder)
    for name in old:
        (folder / name).unlink(missing_ok=True)
    for path in sorted(staged.iterdir(), key=lambda path: path.name == INDEX):
        if path.name == INDEX:
            sync(folder)
        os.replace(path, folder / path.name)
    sync(folder)


def _summary(index: dict[str, Any], files: list[str], held_out: HeldOut, started: float) -> dict[str, Any]:
    splits = {
        name: {key: sum(shard[key] for shard in shards) for key in ("tokens", "documents", "bytes")}
        | {"shards": len(shards)}
        for name, shards in index["splits"].items()
    }
    # BOS stands for no text, so it does not count here.
    text_tokens = sum(split["tokens"] - split["documents"] for split in splits.values())
    return {
        "vocab_size": index["vocab_size"],
        "tokenizer": index["tokenizer"],
        "splits": splits,
        "held_out": held_out.description,
        "bytes_per_token": round(sum(split["bytes"] for split in splits.values()) / text_tokens, 4),
        "files": files,
        "seconds": round(time.monotonic() - started, 3),
    }
