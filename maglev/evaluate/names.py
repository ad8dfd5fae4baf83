"""Does a name that was read once, long ago, raise its own probability? On held-out documents, such as books.

A name is asked about where it comes for the second time. Another reading has another name in place of its first
occurrence, as long in tokens and from another document, and nothing else changed: what the second occurrence then costs
more is what the model had kept of the first. One that cannot have kept anything at that distance gains exactly 0.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maglev.data.shards import Split
from maglev.evaluate.memories import Source, memories
from maglev.objectives.losses import Objective
from maglev.ops.loss import cross_entropy

BEGINS, GOES_ON, COMMON = re.compile(rb" [A-Z][a-z]*"), re.compile(rb"[a-z]+"), re.compile(rb" [a-z]+")
FEWEST_LETTERS = 4

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """Where a name comes first and where it comes again, and the name that takes its place."""

    first: int
    again: int
    other: Ids

    @property
    def distance(self) -> int:
        """From the end of the first to the token before the second; a stack of plain reach r sees it up to r."""
        return self.again - self.first - len(self.other)


@dataclass(frozen=True)
class Document:
    tokens: np.ndarray
    probes: tuple[Probe, ...]


def words(tokens: Sequence[int], pieces: Sequence[bytes], begins: re.Pattern[bytes]) -> Iterator[tuple[int, int]]:
    """Begin and end of every word whose first token is such and whose others are lower-case letters."""
    at = 0
    while at < len(tokens):
        if begins.fullmatch(pieces[tokens[at]]):
            end = at + 1
            while end < len(tokens) and GOES_ON.fullmatch(pieces[tokens[end]]):
                end += 1
            yield at, end
            at = end
        else:
            at += 1


def text_of(ids: Ids, pieces: Sequence[bytes]) -> bytes:
    return b"".join(pieces[id] for id in ids)


def places_of_names(tokens: list[int], pieces: Sequence[bytes]) -> dict[Ids, list[int]]:
    found: dict[Ids, list[int]] = defaultdict(list)
    for begin, end in words(tokens, pieces, BEGINS):
        found[tuple(tokens[begin:end])].append(begin)
    return found


def find_documents(texts: Sequence[np.ndarray], pieces: Sequence[bytes], most: int, seed: int = 0) -> list[Document]:
    """Those that have something to ask, with at most so many names each. What is written in lower case anywhere is a
    word and no name."""
    lists = [text.tolist() for text in texts]
    common = {text_of(tuple(ids[a:b]), pieces) for ids in lists for a, b in words(ids, pieces, COMMON)}
    named = [
        {
            name: places
            for name, places in places_of_names(ids, pieces).items()
            if len(text := text_of(name, pieces)) > FEWEST_LETTERS and text.lower() not in common
        }
        for ids in lists
    ]
    by_size: dict[int, list[Ids]] = defaultdict(list)
    for name in sorted({name for names in named for name in names}):
        by_size[len(name)].append(name)
    found = []
    for number, (tokens, names) in enumerate(zip(texts, named, strict=True)):
        draw = np.random.default_rng((seed, number))
        probes = []
        for name, places in sorted(names.items()):
            others = [other for other in by_size[len(name)] if other not in names]
            if len(places) > 1 and others and read_once(tokens[: places[1]], text_of(name, pieces), pieces):
                probes.append(Probe(places[0], places[1], others[int(draw.integers(len(others)))]))
        # far ones are rare, and what this is about
        probes.sort(key=lambda probe: -probe.distance)
        if probes:
            found.append(Document(tokens.astype(np.int64), tuple(probes[:most])))
    return found


def read_once(tokens: np.ndarray, name: bytes, pieces: Sequence[bytes]) -> bool:
    """Not another time in other tokens, as after a quotation mark."""
    return text_of(tuple(tokens.tolist()), pieces).count(name.strip()) == 1


def read_documents(split: Split, count: int, longest: int) -> list[np.ndarray]:
    """The longest documents, cut off at `longest` tokens."""
    found: list[np.ndarray] = []
    for shard in split.shards:
        tokens, offsets = shard.tokens, shard.offsets
        sizes = np.diff(offsets)
        for number in np.argsort(-sizes, kind="stable")[:count]:
            found.append(np.array(tokens[offsets[number] : offsets[number] + min(int(sizes[number]), longest)]))
    return sorted(found, key=lambda document: -len(document))[:count]


def token_nats(objective: Objective, tokens: Tensor, source: Source, passes: int) -> Tensor:
    """What every token cost, the first one 0. (B, T) -> (B, T)"""
    memory = memories(objective, tokens, source, passes)
    readout = objective.decoder.readout
    with torch.no_grad():
        nats = cross_entropy(memory[:, :-1], readout.weight, tokens[:, 1:], readout.cap).double()
    return torch.nn.functional.pad(nats, (1, 0))


def ask(
    objective: Objective,
    documents: Sequence[Document],
    source: Source,
    passes: int,
    progress: Callable[[int, int], None] | None = None,
    rows: int = 0,
) -> list[dict[str, float]]:
    """For every probe: its distance, what the name cost where it came again, and how much more without its first.

    Documents are read one by one, or together as long as that makes no more than `rows` readings."""
    device, found, done = objective.decoder.device, list[dict[str, float]](), 0
    for some in taken_together(documents, rows):
        read = [readings(document) for document in some]
        tokens = np.zeros((sum(map(len, read)), max(each.shape[1] for each in read)), dtype=np.int64)
        first = 0
        for each in read:
            # nothing sees ahead, so what a shorter one is filled up with does not matter
            tokens[first : first + len(each), : each.shape[1]] = each
            first += len(each)
        nats = iter(token_nats(objective, torch.from_numpy(tokens).to(device), source, passes).cpu())
        for document in some:
            kept = next(nats)
            for probe in document.probes:
                span = slice(probe.again, probe.again + len(probe.other))
                own = float(kept[span].sum())
                found.append({"distance": probe.distance, "nats": own, "gain": float(next(nats)[span].sum()) - own})
        done += len(some)
        if progress:
            progress(done, len(documents))
    return found


def readings(document: Document) -> np.ndarray:
    """The document as it is, then with another name in each first place. (1 + probes, T)"""
    end = max(probe.again + len(probe.other) for probe in document.probes)
    rows = np.repeat(document.tokens[None, :end], 1 + len(document.probes), axis=0)
    for row, probe in zip(rows[1:], document.probes, strict=True):
        row[probe.first : probe.first + len(probe.other)] = probe.other
    return rows


def taken_together(documents: Sequence[Document], rows: int) -> Iterator[list[Document]]:
    some: list[Document] = []
    for document in documents:
        if some and sum(1 + len(each.probes) for each in (*some, document)) > rows:
            yield some
            some = []
        some.append(document)
    if some:
        yield some


def by_distance(answers: Sequence[dict[str, float]], reach: int) -> list[dict[str, Any]]:
    """Means by distance in plain reaches: below 1, then doubling; with the standard error of the gain."""
    buckets: dict[int, list[dict[str, float]]] = defaultdict(list)
    for answer in answers:
        buckets[bucket_of(answer["distance"], reach)].append(answer)
    rows = []
    for bucket, own in sorted(buckets.items()):
        gains = np.array([answer["gain"] for answer in own])
        rows.append(
            {
                "distance": f"{0 if bucket == 0 else 2 ** (bucket - 1)}-{2**bucket}",
                "names": len(own),
                "nats": float(np.mean([answer["nats"] for answer in own])),
                "gain": float(gains.mean()),
                "error": float(gains.std(ddof=1) / len(own) ** 0.5) if len(own) > 1 else None,
                "helped": float((gains > 0).mean()),
            }
        )
    return rows


def bucket_of(distance: float, reach: int) -> int:
    """0 within the plain reach; then 1 up to twice that, 2 up to four times, ..."""
    return 0 if distance <= reach else int(np.ceil(np.log2(distance / reach)))
