"""Byte-level BPE: any text becomes tokens and comes back byte for byte."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from maglev.errors import RequestError
from maglev.files import write_text

BOS = "<|bos|>"
SMALLEST_VOCAB = 257

# What other people's files call the token that starts a document.
BOS_NAMES = (BOS, "<|begin_of_text|>", "<s>", "<|endoftext|>")

# One alternative per kind of pre-token. Digits go in pairs: with a vocabulary of some ten thousand
# tokens, groups of three would spend a thousand of them on numbers.
PRE_TOKEN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}{1,2}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# `tokenizers` needs some fifty bytes of memory per byte of one string, so a long text is encoded in
# segments. They end only where PRE_TOKEN splits whatever stands around: the tokens stay the same.
SEGMENT_CHARACTERS = 1 << 20
SEGMENT_END = re.compile(r"(?<=\S)(?= \S)|(?<=\n)(?=\S)")

# A normaliser, an added prefix space or a stripping step changes at least one of these.
ROUND_TRIP_PROBE = "Word  e\u0301 \ufb01 \u00c5 İ\u3000\u00a0x\t\r\n\r \x00\x1f\U0001f9ea 1234 <|bos|> \n "


class Tokenizer:
    """A tokenizer.json with a BOS token. Its file content is what is saved and fingerprinted."""

    def __init__(self, content: str) -> None:
        """`content` is that of a tokenizer.json; ValueError says why it cannot be used."""
        self._content = content
        description = _parse(content)
        self._inner = _build(content)
        self._inner.encode_special_tokens = True
        self._inner.no_truncation()
        self._inner.no_padding()

        added = {token["id"]: token for token in description.get("added_tokens") or ()}
        special = {token["content"]: id for id, token in added.items() if token["special"]}
        bos = next((name for name in BOS_NAMES if name in special), None)
        if bos is None:
            raise ValueError(f"it has none of the special tokens {', '.join(BOS_NAMES)}")
        self.bos_token = bos
        self.bos_id: int = special[bos]

        self.token_bytes: list[bytes] = _token_bytes(self._inner.get_vocab(with_added_tokens=True), added)
        self.vocab_size = len(self.token_bytes)
        if len({token for token in self.token_bytes if len(token) == 1}) < 256:
            raise ValueError("it is not byte-level: some single bytes have no token")
        if self.decode_bytes(self.encode(ROUND_TRIP_PROBE)) != ROUND_TRIP_PROBE.encode():
            raise ValueError("it changes the text (normaliser, added prefix space or unknown tokens)")

        # it is never asked for: texts are encoded without it, and an export has another one for those who ask
        description["post_processor"] = None
        canonical = json.dumps(description, sort_keys=True, separators=(",", ":"))
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn merges until there are `vocab_size` tokens in all, or the texts yield no more."""
        check_vocab_size(vocab_size)
        inner = tokenizers.Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PRE_TOKEN), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        segments = (segment for text in texts for segment in _segments(well_formed(text)))
        inner.train_from_iterator(segments, trainer)
        return cls(inner.to_str(pretty=True))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        path = Path(path)
        try:
            content = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RequestError(f"{path}: no such tokenizer file; give the path of a tokenizer.json") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"{path}: cannot be read as a tokenizer.json ({error})") from None
        try:
            return cls(content)
        except ValueError as error:
            raise RequestError(
                f"{path}: cannot be used as a tokenizer: {error}; give the tokenizer.json of a byte-level BPE"
            ) from None

    def save(self, path: str | Path) -> None:
        write_text(Path(path), self._content)

    def encode(self, text: str) -> list[int]:
        """Tokens of the text, without BOS; a special token's name in the text is ordinary text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [list(_segments(well_formed(text))) for text in texts]
        flat = [segment for segments in parts for segment in segments]
        encodings = iter(self._inner.encode_batch_fast(flat, add_special_tokens=False))
        ids: list[list[int]] = []
        for segments in parts:
            text_ids: list[int] = []
            for _ in segments:
                text_ids.extend(next(encodings).ids)
            ids.append(text_ids)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        found = []
        for id in ids:
            # a negative one would count from the end
            if not 0 <= id < len(self.token_bytes):
                raise RequestError(
                    f"token id {id} is outside of the vocabulary; ids go from 0 to {len(self.token_bytes) - 1:,}"
                )
            found.append(self.token_bytes[id])
        return b"".join(found)

    def token_byte_counts(self) -> np.ndarray:
        return np.array([len(token) for token in self.token_bytes], dtype=np.int32)  # (vocab_size,)


def bos_template(token: str, id: int) -> dict[str, Any]:
    """The post-processor of a tokenizer.json that puts BOS before every text."""
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    special = {token: {"id": token, "ids": [id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, second],
        "special_tokens": special,
    }


def check_vocab_size(vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCAB:
        raise RequestError(
            f"vocabulary of {vocab_size} tokens: the 256 bytes and BOS alone need {SMALLEST_VOCAB}; "
            f"give --vocab-size {SMALLEST_VOCAB} or more"
        )


def well_formed(text: str) -> str:
    """The text with surrogate pairs joined and lone surrogates, which UTF-8 cannot carry, replaced."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", errors="surrogatepass").decode("utf-16-le", errors="replace")
    return text


def _segments(text: str, characters: int = SEGMENT_CHARACTERS) -> Iterator[str]:
    start = 0
    while len(text) - start > characters:
        found = SEGMENT_END.search(text, start + characters)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _parse(content: str) -> dict[str, Any]:
    try:
        description = json.loads(content)
    except ValueError:
        raise ValueError("it is not JSON") from None
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise ValueError("it does not describe a BPE tokenizer")
    return description


def _build(content: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    # `tokenizers` raises bare Exception for every fault in a file.
    except Exception as error:
        raise ValueError(f"tokenizers says: {error}") from None


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes a printable Latin-1 byte as itself, the others in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return characters


def _token_bytes(vocabulary: dict[str, int], added: dict[int, dict[str, Any]]) -> list[bytes]:
    byte_of = _byte_of_character()
    # An id that no token uses stays empty, like a special token.
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, id in vocabulary.items():
        if id in added:
            table[id] = b"" if added[id]["special"] else token.encode()
        elif all(character in byte_of for character in token):
            table[id] = bytes(byte_of[character] for character in token)
        else:
            raise ValueError(f"it is not byte-level: token {token!r} is not written in byte characters")
    return table
