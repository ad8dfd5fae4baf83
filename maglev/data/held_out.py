"""Which documents validation gets when the user names none: a rule that depends on the texts alone."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from maglev.data.tokenizer import well_formed
from maglev.errors import RequestError

HELD_OUT_PERCENT = 1
HASH_BYTES = 8
HASH_LIMIT = (1 << 8 * HASH_BYTES) * HELD_OUT_PERCENT // 100


class Document(NamedTuple):
    split: str
    text: str
    consumed: int


@dataclass(frozen=True)
class Nothing:
    """Validation has a source of its own."""

    description = "a source of its own"

    def divide(self, documents: Iterable[tuple[str, int]]) -> Iterator[Document]:
        for text, consumed in documents:
            yield Document("train", well_formed(text), consumed)


@dataclass(frozen=True)
class ByHash:
    """The usual case: a fixed share of the documents."""

    description = f"{HELD_OUT_PERCENT}% of the documents, chosen by a hash of the text"

    def divide(self, documents: Iterable[tuple[str, int]]) -> Iterator[Document]:
        for text, consumed in documents:
            text = well_formed(text)
            yield Document("validation" if text_hash(text) < HASH_LIMIT else "train", text, consumed)


@dataclass(frozen=True)
class OneDocument:
    """Where the hash would leave one of the splits empty."""

    smallest: int
    description = "one document, the one whose text has the smallest hash"

    def divide(self, documents: Iterable[tuple[str, int]]) -> Iterator[Document]:
        taken = False
        for text, consumed in documents:
            text = well_formed(text)
            # Of several copies only one is held out, since there may be nothing but copies.
            take = not taken and text_hash(text) == self.smallest
            taken = taken or take
            yield Document("validation" if take else "train", text, consumed)


@dataclass(frozen=True)
class Tail:
    """Where there is a single document."""

    description = f"the last {HELD_OUT_PERCENT}% of the only document"

    def divide(self, documents: Iterable[tuple[str, int]]) -> Iterator[Document]:
        for text, consumed in documents:
            text = well_formed(text)
            cut = len(text) - max(1, len(text) * HELD_OUT_PERCENT // 100)
            yield Document("train", text[:cut], consumed)
            yield Document("validation", text[cut:], consumed)


HeldOut = Nothing | ByHash | OneDocument | Tail


def choose_held_out(documents: Iterable[str]) -> HeldOut:
    """The first rule of ByHash, OneDocument and Tail that leaves neither split empty."""
    count = length = largest = 0
    smallest = 1 << 8 * HASH_BYTES
    for text in documents:
        text = well_formed(text)
        count, length, value = count + 1, len(text), text_hash(text)
        smallest, largest = min(smallest, value), max(largest, value)
        # Both splits have a document: no need to read on.
        if smallest < HASH_LIMIT <= largest:
            return ByHash()
    if count > 1:
        return OneDocument(smallest)
    if length < 2:
        raise RequestError("a single document of one character leaves nothing to hold out; give more text")
    return Tail()


def text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest(), "big")
