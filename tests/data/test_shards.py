import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maglev.data import shards
from maglev.data.shards import open_data, token_dtype
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError, WorkError

DOCUMENTS = [[10, 11, 12], [13], [14] * 20, [], [15, 16]]


def test_layout(write_data: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = write_data(tmp_path / "data", DOCUMENTS, shard_tokens=8)
    train = data.splits["train"]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "index.json",
        "tokenizer.json",
        "train-00000.offsets.npy",
        "train-00000.tokens.npy",
        "train-00001.offsets.npy",
        "train-00001.tokens.npy",
        "train-00002.offsets.npy",
        "train-00002.tokens.npy",
        "validation-00000.offsets.npy",
        "validation-00000.tokens.npy",
    ]
    assert (train.tokens, train.documents, len(train.shards)) == (31, 5, 3)
    assert train.bytes == sum(len(tokenizer.decode_bytes(document)) for document in DOCUMENTS)
    found = []
    for shard in train.shards:
        assert shard.tokens.dtype == np.uint16 and isinstance(shard.tokens, np.memmap)
        assert shard.offsets.dtype == np.int64
        assert (len(shard.tokens), len(shard.offsets)) == (shard.token_count, shard.documents + 1)
        found += [shard.tokens[start:end].tolist() for start, end in zip(shard.offsets, shard.offsets[1:])]
    assert found == [[tokenizer.bos_id, *document] for document in DOCUMENTS]
    assert data.vocab_size == data.tokenizer.vocab_size == tokenizer.vocab_size


def test_index(write_data: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = write_data(tmp_path / "data", DOCUMENTS)
    index = json.loads((tmp_path / "data" / "index.json").read_text())
    assert (index["format"], index["version"], index["dtype"]) == ("maglev-tokens", 1, "uint16")
    assert index["tokenizer"] == tokenizer.fingerprint
    shard = index["splits"]["train"][0]
    assert shard["tokens_file"]["name"] == "train-00000.tokens.npy"
    assert len(shard["tokens_file"]["sha256"]) == len(shard["offsets_file"]["sha256"]) == 64
    again = write_data(tmp_path / "again", DOCUMENTS)
    other = write_data(tmp_path / "other", DOCUMENTS[1:])
    assert again.fingerprint == data.fingerprint != other.fingerprint


def test_large_vocabularies_take_four_bytes() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.uint32


def test_what_is_no_data_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RequestError, match=r"not a data folder.*maglev data prepare"):
            open_data(folder)
    (tmp_path / "index.json").write_text('{"format": "other"}')
    with pytest.raises(RequestError, match="not a data folder"):
        open_data(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(RequestError, match=r"index\.json.*cannot be read"):
        open_data(tmp_path)
    (tmp_path / "index.json").write_text('{"format": "maglev-tokens", "version": 99}')
    with pytest.raises(RequestError, match="version 99"):
        open_data(tmp_path)


def test_damaged_index(write_data: Any, tmp_path: Path) -> None:
    write_data(tmp_path, DOCUMENTS)
    index = json.loads((tmp_path / "index.json").read_text())
    del index["splits"]["train"][0]["tokens_file"]["sha256"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(RequestError, match=r"index\.json.*damaged"):
        open_data(tmp_path)


def test_tokenizer_that_does_not_match(write_data: Any, tmp_path: Path) -> None:
    write_data(tmp_path, DOCUMENTS)
    Tokenizer.train(["another text altogether"] * 9, 280).save(tmp_path / "tokenizer.json")
    with pytest.raises(RequestError, match=r"tokenizer\.json.*not the tokenizer"):
        open_data(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RequestError, match=r"tokenizer\.json.*no such"):
        open_data(tmp_path)


@pytest.mark.parametrize("kind", ["tokens", "offsets"])
def test_missing_truncated_and_flipped_files(write_data: Any, tmp_path: Path, kind: str) -> None:
    write_data(tmp_path, DOCUMENTS)
    path = tmp_path / f"train-00000.{kind}.npy"
    whole = path.read_bytes()

    path.write_bytes(whole[:-1])
    with pytest.raises(WorkError, match=f"{path.name}.*{len(whole) - 1} bytes instead of {len(whole)}"):
        open_data(tmp_path)

    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    data = open_data(tmp_path)
    with pytest.raises(WorkError, match=f"{path.name}.*checksum"):
        getattr(data.splits["train"].shards[0], kind)
    assert len(data.splits["validation"].shards[0].tokens) == 2

    path.unlink()
    with pytest.raises(RequestError, match=f"{path.name}: missing"):
        open_data(tmp_path)


def test_a_file_is_verified_once_per_process(write_data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path, DOCUMENTS)
    checked: list[str] = []
    original = shards.sha256_of_file

    def counting(path: Path) -> str:
        checked.append(path.name)
        return original(path)

    monkeypatch.setattr(shards, "sha256_of_file", counting)
    for _ in range(2):
        shard = open_data(tmp_path).splits["train"].shards[0]
        assert len(shard.tokens) == len(shard.tokens) == shard.token_count
    assert checked == ["train-00000.tokens.npy"]
