import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maglev.data import tokenizer as module
from maglev.data.tokenizer import BOS, Tokenizer, well_formed
from maglev.errors import RequestError

AWKWARD = [
    "",
    " ",
    "\x00",
    "\r",
    "a\r b\r\n\n\rc",
    "\u2028\u3000\u00a0\u200b\ufeff x",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u1e69\u0323",
    "".join(map(chr, range(0x250))),
    "don't DON'T 1234567890 ½ ⅷ ४२",
    f"{BOS}{BOS} <|bos",
    "ﷺ" * 40 + " " * 300 + "\n" * 40,
]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(ANY_TEXT)
@settings(deadline=None, max_examples=300)
def test_any_text_comes_back_byte_for_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_id not in ids


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()
    assert tokenizer.bos_id not in tokenizer.encode(text)


@given(st.text(st.characters()))
@settings(deadline=None, max_examples=100)
def test_lone_surrogates_do_not_crash(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == well_formed(text)


@pytest.mark.parametrize("wrong", [-1, 1 << 40])
def test_ids_outside_of_the_vocabulary_are_refused(tokenizer: Tokenizer, wrong: int) -> None:
    with pytest.raises(RequestError, match=f"token id {wrong} is outside"):
        tokenizer.decode([0, wrong])


def test_surrogates_become_characters_or_the_replacement() -> None:
    assert well_formed("a\ud83d\ude00b\ud800c") == "a😀b\ufffdc"


@given(st.lists(st.sampled_from([*"a1.é\n\r\t'’ ", "\x1c", "\u3000", "  ", "cat ", "\n\n", "½"]), max_size=60))
@settings(deadline=None, max_examples=300)
def test_segments_do_not_change_the_tokens(tokenizer: Tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    whole = tokenizer.encode(text)
    for characters in (1, 5):
        segments = list(module._segments(text, characters))
        assert "".join(segments) == text
        assert [id for segment in tokenizer.encode_batch(segments) for id in segment] == whole


def test_a_long_text_is_encoded_in_segments(tokenizer: Tokenizer) -> None:
    text = "The cat sat. " * (module.SEGMENT_CHARACTERS // 10)
    assert len(list(module._segments(text))) == 2
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encode_batch_equals_encode(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(AWKWARD) == [tokenizer.encode(text) for text in AWKWARD]
    assert tokenizer.encode_batch([]) == []


def test_cut_character_is_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0010fffd")
    assert tokenizer.decode(ids[:-1]) == "\ufffd"


def test_token_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes[tokenizer.bos_id] == b""
    assert {bytes([byte]) for byte in range(256)} <= set(tokenizer.token_bytes)
    counts = tokenizer.token_byte_counts()
    assert counts.dtype == np.int32 and counts.shape == (tokenizer.vocab_size,)
    text = "The cat, 1984: é"
    assert counts[tokenizer.encode(text)].sum() == len(text.encode())


def test_numbers_go_in_pairs(tokenizer: Tokenizer) -> None:
    trained = Tokenizer.train(["1234 1234 1234"] * 50, 400)
    assert max(len(token) for token in trained.token_bytes if token.isdigit()) == 2


def test_vocabulary_size_tells_the_truth() -> None:
    assert Tokenizer.train(["ab"], 5000).vocab_size == 258
    assert Tokenizer.train(["ab ab abc abcd"] * 9, 259).vocab_size == 259
    assert Tokenizer.train([], 257).vocab_size == 257
    with pytest.raises(RequestError, match=r"256.*257"):
        Tokenizer.train(["ab"], 256)


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    texts = [f"{word} the quick brown fox {word}{word}" for word in ("one", "two", "six", "ten")] * 20
    assert Tokenizer.train(texts, 400).fingerprint == Tokenizer.train(iter(texts), 400).fingerprint
    assert Tokenizer.train(texts, 400).fingerprint != tokenizer.fingerprint


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.token_bytes == tokenizer.token_bytes
    assert loaded.bos_id == tokenizer.bos_id
    assert loaded.encode(f"the cat {BOS}") == tokenizer.encode(f"the cat {BOS}")


def test_fingerprint_is_of_the_content_not_the_layout(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert Tokenizer.load(path).fingerprint == tokenizer.fingerprint


def changed_file(tokenizer: Tokenizer, path: Path, **changes: object) -> Path:
    tokenizer.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return path


@pytest.mark.parametrize("name", ["<|endoftext|>", "<s>", "<|begin_of_text|>"])
def test_other_names_of_bos(tokenizer: Tokenizer, tmp_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    path.write_text(path.read_text().replace(BOS, name))
    loaded = Tokenizer.load(path)
    assert (loaded.bos_token, loaded.bos_id) == (name, tokenizer.bos_id)
    assert loaded.bos_id not in loaded.encode(f"a {name} b")


def test_truncation_and_padding_of_a_file_are_ignored(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = changed_file(
        tokenizer,
        tmp_path / "tokenizer.json",
        truncation={"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": BOS,
        },
    )
    loaded = Tokenizer.load(path)
    assert loaded.encode_batch(["a cat", "a cat on the mat"]) == tokenizer.encode_batch(["a cat", "a cat on the mat"])


def test_added_tokens_that_are_not_special_are_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = [
        {"id": 0, "content": BOS, "special": True, **plain},
        {"id": 310, "content": "<tab>", "special": False, **plain},
    ]
    loaded = Tokenizer.load(changed_file(tokenizer, tmp_path / "tokenizer.json", added_tokens=tokens))
    assert loaded.encode("a<tab>b")[1] >= tokenizer.vocab_size
    assert loaded.decode(loaded.encode("a<tab>b")) == "a<tab>b"
    assert len(loaded.token_bytes) == loaded.vocab_size


def test_bad_tokenizer_files_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def refusal() -> str:
        with pytest.raises(RequestError) as caught:
            Tokenizer.load(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "no such tokenizer file" in refusal()
    path.write_text("{not json")
    assert "not JSON" in refusal()
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal()
    path.write_text("[]")
    assert "does not describe a BPE" in refusal()
    path.write_text('{"model": {"type": "WordPiece"}}')
    assert "does not describe a BPE" in refusal()
    path.write_text('{"model": {"type": "BPE"}}')
    assert "tokenizers says" in refusal()

    changed_file(tokenizer, path, added_tokens=[])
    assert "none of the special tokens" in refusal()
    changed_file(tokenizer, path, normalizer={"type": "Lowercase"})
    assert "changes the text" in refusal()
    changed_file(tokenizer, path, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True})
    assert "changes the text" in refusal()

    content = json.loads(path.read_text())
    content["model"] |= {"vocab": {BOS: 0, "a": 1, "b": 2}, "merges": []}
    changed_file(tokenizer, path, model=content["model"])
    assert "some single bytes have no token" in refusal()
    content["model"]["vocab"]["▁the"] = 3
    changed_file(tokenizer, path, model=content["model"])
    assert "not byte-level" in refusal()
