import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from maglev.data import held_out
from maglev.data.loader import Loader
from maglev.data.prepare import prepare
from maglev.data.shards import Split, SplitWriter, TokenData, open_data
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError, WorkError

SHARED_TEXT = Path(__file__).parents[2] / ".." / "shared" / "data" / "text"
TEXTS = [f"Document number {number} says {'word ' * (number % 7)}and ends.\n" for number in range(400)]


def write_source(path: Path, texts: list[str]) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_of(data: TokenData, split: Split) -> list[str]:
    found = []
    for shard in split.shards:
        for start, end in pairwise(shard.offsets):
            assert shard.tokens[start] == data.tokenizer.bos_id
            found.append(data.tokenizer.decode_bytes(shard.tokens[start + 1 : end]).decode())
    return found


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_document_is_in_one_split(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    summary = prepare([source], tmp_path / "out", vocab_size=300, shard_tokens=3000)
    data = open_data(tmp_path / "out")
    train, validation = (texts_of(data, data.splits[name]) for name in ("train", "validation"))
    assert sorted(train + validation) == sorted(TEXTS)
    assert 0 < len(validation) < 15
    assert validation == [text for text in TEXTS if held_out.text_hash(text) < held_out.HASH_LIMIT]
    assert "1% of the documents" in summary["held_out"]
    assert summary["splits"]["train"]["documents"] == len(train)
    assert summary["splits"]["train"]["shards"] == len(data.splits["train"].shards) > 1
    assert summary["splits"]["train"]["bytes"] == sum(map(len, train)) == data.splits["train"].bytes
    assert summary["vocab_size"] == data.vocab_size == 300
    assert summary["files"] == [source]
    assert summary["bytes_per_token"] > 1
    assert json.loads(json.dumps(summary)) == summary
    counts = data.tokenizer.token_byte_counts()
    for split in data.splits.values():
        assert sum(int(counts[shard.tokens].sum()) for shard in split.shards) == split.bytes


def test_a_split_ends_at_its_limit_and_the_rest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["maglev.data.prepare"], "BATCH_DOCUMENTS", 8)
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tmp_path / "whole", vocab_size=300)
    whole = open_data(tmp_path / "whole")
    every = {name: texts_of(whole, split) for name, split in whole.splits.items()}
    read: list[int] = []
    prepare(
        [source],
        tmp_path / "part",
        vocab_size=300,
        train_tokens=1000,
        progress=lambda stage, done, total: read.append(done) if stage == "train" else None,
    )
    data = open_data(tmp_path / "part")
    kept = {name: texts_of(data, split) for name, split in data.splits.items()}
    longest = max(len(data.tokenizer.encode(text)) + 1 for text in TEXTS)
    assert 1000 <= data.splits["train"].tokens < 1000 + longest
    # the beginning of either split; reading went on until there was something held out, and no further
    for name, texts in kept.items():
        assert texts and texts == every[name][: len(texts)]
    assert read[-1] < os.path.getsize(source) * 0.75
    prepare([source], tmp_path / "both", vocab_size=300, train_tokens=1000, validation_tokens=1)
    both = open_data(tmp_path / "both")
    assert texts_of(both, both.splits["train"]) == kept["train"] and both.splits["validation"].documents == 1
    # a source of its own has its limit too, and one for validation alone leaves training whole
    prepare([source], tmp_path / "own", vocab_size=300, validation=source_of_validation(tmp_path), validation_tokens=30)
    own = open_data(tmp_path / "own")
    assert own.splits["train"].documents == len(TEXTS) and 1 < own.splits["validation"].documents < 5
    with pytest.raises(RequestError, match="--train-tokens is 0"):
        prepare([source], tmp_path / "none", vocab_size=300, train_tokens=0)


def source_of_validation(folder: Path) -> str:
    return write_source(folder / "b.jsonl", [f"Held out {number}.\n" for number in range(50)])


def test_deterministic(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    for name in ("one", "two"):
        prepare([source], tmp_path / name, vocab_size=300)
    assert folder_content(tmp_path / "one") == folder_content(tmp_path / "two")


def test_validation_does_not_depend_on_the_order(tmp_path: Path) -> None:
    forward = write_source(tmp_path / "a.jsonl", TEXTS)
    backward = write_source(tmp_path / "b.jsonl", TEXTS[::-1])
    chosen = []
    for source, name in ((forward, "one"), (backward, "two")):
        prepare([source], tmp_path / name, vocab_size=257)
        data = open_data(tmp_path / name)
        chosen.append(sorted(texts_of(data, data.splits["validation"])))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("texts", [["one", "two"], ["two", "one"], ["same", "same"], ["a", "b", "c", "a"]])
def test_few_documents_leave_neither_split_empty(tmp_path: Path, texts: list[str]) -> None:
    summary = prepare([write_source(tmp_path / "a.jsonl", texts)], tmp_path / "out", vocab_size=257)
    data = open_data(tmp_path / "out")
    validation = texts_of(data, data.splits["validation"])
    assert validation == [min(texts, key=held_out.text_hash)]
    assert sorted(texts_of(data, data.splits["train"]) + validation) == sorted(texts)
    assert "smallest hash" in summary["held_out"]


def test_documents_that_would_all_be_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "HASH_LIMIT", 1 << 64)
    rule = held_out.choose_held_out(["one", "two", "three"])
    splits = [document.split for document in rule.divide((text, 0) for text in ("one", "two", "three"))]
    assert sorted(splits) == ["train", "train", "validation"]


@pytest.mark.parametrize("text", ["The only text there is. " * 50, "ab", "é😀\n" * 100])
def test_single_text_file(tmp_path: Path, text: str) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(text.encode())
    summary = prepare([str(source)], tmp_path / "out", vocab_size=270)
    data = open_data(tmp_path / "out")
    (train,) = texts_of(data, data.splits["train"])
    (validation,) = texts_of(data, data.splits["validation"])
    assert train + validation == text
    assert len(validation) == max(1, len(text) // 100)
    assert "the only document" in summary["held_out"]


def test_single_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(RequestError, match="one character"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", vocab_size=257)


def test_validation_source(tmp_path: Path) -> None:
    train = write_source(tmp_path / "data" / "a.jsonl", TEXTS)
    validation = write_source(tmp_path / "data" / "v.jsonl", ["held \ud800 back", "and more"])
    # A validation file in the folder of the sources is not trained on.
    for sources in ([train], [str(tmp_path / "data")]):
        out = tmp_path / f"out{len(sources[0])}"
        summary = prepare(sources, out, vocab_size=270, validation=validation)
        data = open_data(out)
        assert texts_of(data, data.splits["train"]) == TEXTS
        assert texts_of(data, data.splits["validation"]) == ["held \ufffd back", "and more"]
        assert summary["held_out"] == "a source of its own"
        assert summary["files"] == [train, validation]
    with pytest.raises(RequestError, match="nothing left to train on"):
        prepare([validation], tmp_path / "other", vocab_size=270, validation=validation)


def test_given_tokenizer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path / "mine.json")
    source = write_source(tmp_path / "a.jsonl", TEXTS[:20])
    summary = prepare([source], tmp_path / "out", tokenizer=tmp_path / "mine.json", vocab_size=5)
    assert summary["tokenizer"] == tokenizer.fingerprint == open_data(tmp_path / "out").tokenizer.fingerprint
    assert summary["vocab_size"] == tokenizer.vocab_size


def test_tokenizer_learns_from_training_documents_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = Tokenizer.train

    def spy(texts: Any, vocab_size: int) -> Tokenizer:
        seen.extend(texts)
        return train(seen, vocab_size)

    monkeypatch.setattr(Tokenizer, "train", spy)
    write_source(tmp_path / "in" / "a.jsonl", TEXTS[:200])
    write_source(tmp_path / "in" / "b.jsonl", TEXTS[200:])
    held = {text for text in TEXTS if held_out.text_hash(text) < held_out.HASH_LIMIT}
    prepare([str(tmp_path / "in")], tmp_path / "all", vocab_size=300)
    assert seen == [text for text in TEXTS if text not in held]

    seen.clear()
    prepare([str(tmp_path / "in")], tmp_path / "some", vocab_size=300, sample_bytes=1000)
    assert sum(map(len, seen)) == 1000
    halves = [sum(len(text) for text in seen if text in part) for part in (TEXTS[:200], TEXTS[200:])]
    assert min(halves) > 400


def test_progress(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    validation = write_source(tmp_path / "v.jsonl", ["held back"])
    calls: list[tuple[str, int, int | None]] = []
    prepare([source], tmp_path / "out", 260, validation=validation, progress=lambda *call: calls.append(call))
    stages = list(dict.fromkeys(stage for stage, _, _ in calls))
    assert stages == ["tokenizer", "merges", "train", "validation"]
    size = os.path.getsize(source)
    assert [call for call in calls if call[0] == "train"][-1] == ("train", size, size)
    assert max(done for stage, done, _ in calls if stage == "tokenizer") == size


def test_finished_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    prepare([source], out, vocab_size=270, shard_tokens=2000)
    (out / "notes.md").write_text("mine")
    before = folder_content(out)
    with pytest.raises(RequestError, match=r"already holds prepared data.*--overwrite"):
        prepare([source], out, vocab_size=260)
    assert folder_content(out) == before

    prepare([source], out, vocab_size=260, overwrite=True)
    prepare([source], tmp_path / "fresh", vocab_size=260)
    assert folder_content(out) == folder_content(tmp_path / "fresh") | {"notes.md": b"mine"}
    assert open_data(out).vocab_size == 260


def test_folders_that_exist(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS[:20])
    out = tmp_path / "out"
    out.mkdir()
    (out / ".partial-left-by-a-kill").mkdir()
    prepare([source], out, vocab_size=257)
    (out / "index.json").unlink()
    with pytest.raises(RequestError, match="not a data folder"):
        open_data(out)
    prepare([source], out, vocab_size=257, overwrite=True)
    assert open_data(out).splits["train"].documents == 19

    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("someone's")
    (other / "model.bin").write_text("someone's")
    with pytest.raises(RequestError, match=r"holds other files \(model.bin\)"):
        prepare([source], other, vocab_size=257, overwrite=True)
    with pytest.raises(RequestError, match="is a file"):
        prepare([source], source, vocab_size=257)
    assert folder_content(other) == {"tokenizer.json": b"someone's", "model.bin": b"someone's"}


def test_output_inside_the_source_folder_is_not_read(tmp_path: Path) -> None:
    write_source(tmp_path / "a.jsonl", TEXTS[:20])
    for _ in range(2):
        prepare([str(tmp_path)], tmp_path / "out", vocab_size=257, overwrite=True)
    assert open_data(tmp_path / "out").splits["train"].documents == 19


@pytest.mark.parametrize("exists", [False, True])
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    if exists:
        prepare([source], out, vocab_size=257)
    before = folder_content(out) if exists else None

    def full(self: SplitWriter) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SplitWriter, "_write_shard", full)
    with pytest.raises(WorkError, match=r"out.*No space left"):
        prepare([source], out, vocab_size=257, overwrite=True)
    assert (folder_content(out) if out.exists() else None) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == (["a.jsonl", "out"] if exists else ["a.jsonl"])


@pytest.mark.parametrize("exists", [False, True])
def test_a_kill_leaves_nothing_half_made(tmp_path: Path, exists: bool) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "out"
    if exists:
        prepare([source], out, vocab_size=257)
    program = (
        "import os, sys; from maglev.data import prepare\n"
        "kill = lambda stage, *_: stage == 'train' and os.kill(os.getpid(), 9)\n"
        "prepare([sys.argv[1]], sys.argv[2], vocab_size=270, overwrite=True, progress=kill)"
    )
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", program, source, str(out)], cwd=root, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    if exists:
        assert open_data(out).vocab_size == 257
    else:
        assert not out.exists()
    prepare([source], out, vocab_size=270, overwrite=True)
    assert open_data(out).vocab_size == 270
    assert all(not path.name.startswith(".partial-") for path in out.iterdir())


def test_bad_requests(tmp_path: Path) -> None:
    source = write_source(tmp_path / "a.jsonl", TEXTS[:5])
    with pytest.raises(RequestError, match="no source"):
        prepare([], tmp_path / "out")
    with pytest.raises(RequestError, match="vocabulary of 256"):
        prepare([source], tmp_path / "out", vocab_size=256)
    with pytest.raises(RequestError, match="no such tokenizer"):
        prepare([source], tmp_path / "out", tokenizer=tmp_path / "absent.json")
    with pytest.raises(RequestError, match=r"absent\.txt"):
        prepare([source], tmp_path / "out", validation=str(tmp_path / "absent.txt"))
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(RequestError, match=r"empty\.txt: no text"):
        prepare([source, str(empty)], tmp_path / "out", vocab_size=257)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not SHARED_TEXT.exists(), reason="needs ../shared/data/text")
def test_real_text(tmp_path: Path) -> None:
    table = pq.read_table(SHARED_TEXT / "validation-00000-of-00001.parquet").slice(0, 40)
    pq.write_table(table, tmp_path / "a.parquet")
    prepare([str(tmp_path / "a.parquet")], tmp_path / "out", vocab_size=1000)
    data = open_data(tmp_path / "out")
    texts = [texts_of(data, split) for split in data.splits.values()]
    assert sorted(texts[0] + texts[1]) == sorted(table["text"].to_pylist())
    loader = Loader(data, "train", 256, seed=0)
    batch = loader.batch(range(loader.rows_per_epoch))
    assert (batch.targets >= 0).sum() == loader.tokens_per_epoch
    assert loader.rows_per_epoch == -(-loader.tokens_per_epoch // 256)
