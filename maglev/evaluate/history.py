"""What text read long ago is worth: the same tokens of documents, after more and more of what stands before them.

The unit is what a stack of windows reaches by itself. After one such reach its tokens cost what they will always cost
it; what is gained with more is the memory's, or that of layers which see the whole context. Whether it is content that
is kept or no more than which words there were, and whether a memory only needs some text of any kind to find its
stride, tell readings whose far part, all but the last reach, is shuffled or that of another document.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from maglev.data.shards import Split
from maglev.errors import RequestError
from maglev.evaluate.memories import Source, memories, with_prefiller
from maglev.evaluate.recall import rows_at_once
from maglev.objectives.losses import Objective
from maglev.ops.loss import cross_entropy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what the prefiller itself predicts is no memory source of the decoder: it tells what Q knows
Reading = Source | Literal["prefiller"]
Far = Literal["own", "shuffled", "foreign"]
FARS: tuple[Far, ...] = get_args(Far)


@dataclass(frozen=True)
class Spans:
    """Rows (N, longest history + span) whose last `span` tokens are asked for, and the document of each (N,)"""

    rows: np.ndarray
    documents: np.ndarray
    span: int

    @property
    def effective_documents(self) -> float:
        """As many of one size would tell as much."""
        sizes = np.bincount(self.documents)
        return float(sizes.sum() ** 2 / (sizes**2).sum())

    @property
    def digest(self) -> str:
        """Two results of the same places have the same."""
        return hashlib.sha256(self.rows.tobytes()).hexdigest()[:16]

    def with_far(self, history: int, near: int, far: Far) -> np.ndarray:
        """Rows of so much history, in which all but the last `near` tokens of it are as `far` says."""
        rows = self.rows[:, -(history + self.span) :].copy()
        if far == "shuffled":
            rows[:, : history - near] = np.random.default_rng(0).permuted(rows[:, : history - near], axis=1)
        elif far == "foreign":
            rows[:, : history - near] = rows[others(self.documents), : history - near]
        return rows


def others(documents: np.ndarray) -> np.ndarray:
    """For each span one of another document, half of all spans further on or the next after that."""
    count = len(documents)
    if len(set(documents.tolist())) < 2:
        raise RequestError("a foreign history needs spans of two documents; use more --spans, or more text")
    found = []
    for number, own in enumerate(documents):
        at = (number + count // 2) % count
        while documents[at] == own:
            at = (at + 1) % count
        found.append(at)
    return np.array(found)


def histories(reach: int, times: int) -> list[int]:
    """Tokens read before a span: one reach, twice that and so on up to `times`. One more, so that a stack of windows
    sees its whole reach from the first of them on, and not where the text begins."""
    multiples = [1]
    while multiples[-1] * 2 <= times:
        multiples.append(multiples[-1] * 2)
    if multiples[-1] < times:
        multiples.append(times)
    return [multiple * reach + 1 for multiple in multiples]


def find_spans(split: Split, longest: int, span: int, most: int) -> Spans:
    """At most so many that have such a history in their own document: as many of each document as there are, or as
    keep the sum below, so that a few long books do not stand for all."""
    found: list[list[np.ndarray]] = []
    for shard in split.shards:
        for begin, end in pairwise(shard.offsets.tolist()):
            # a document's first token is BOS, which every row gets anew
            places = range(begin + 1 + longest, end - span + 1, span)
            if places:
                found.append([shard.tokens[at - longest : at + span] for at in places])
    if len(found) > most:
        found = [found[number] for number in evenly(len(found), most)]
    shares = range(1, max(map(len, found), default=0) + 1)
    share = max((each for each in shares if sum(min(each, len(own)) for own in found) <= most), default=0)
    chosen = [[own[number] for number in evenly(len(own), min(share, len(own)))] for own in found]
    rows = [np.asarray(row, dtype=np.int64) for own in chosen for row in own]
    documents = np.repeat(np.arange(len(chosen)), [len(own) for own in chosen])
    return Spans(np.array(rows).reshape(len(rows), longest + span), documents, span)


def evenly(count: int, chosen: int) -> list[int]:
    """From the first to the last; of one, the middle."""
    if chosen == 1:
        return [(count - 1) // 2]
    numbers: list[int] = np.linspace(0, count - 1, chosen).round().astype(int).tolist()
    return numbers


def predicted_from(objective: Objective, tokens: Tensor, reading: Reading) -> Tensor:
    """(B, T) -> (B, T, D)"""
    if reading == "prefiller":
        return with_prefiller(objective).lifted(tokens)[1]
    return memories(objective, tokens, reading, 1)


@torch.inference_mode()
def span_nats(
    objective: Objective, spans: Spans, rows: np.ndarray, bos: int, reading: Reading, progress: Callable[[int], None]
) -> np.ndarray:
    """What the span at the end of each row costs, read from the start of a text. (N, T) -> (N,)"""
    found, device, readout = [], objective.decoder.device, objective.decoder.readout
    size = rows_at_once(objective, "lifted" if reading == "prefiller" else reading, rows.shape[1])
    for first in range(0, len(rows), size):
        own = torch.from_numpy(rows[first : first + size]).to(device)
        tokens = torch.cat((torch.full_like(own[:, :1], bos), own[:, :-1]), dim=1)
        memory = predicted_from(objective, tokens, reading)[:, -spans.span :]
        nats = cross_entropy(memory, readout.weight, own[:, -spans.span :], readout.cap)
        found.append(nats.double().sum(1).cpu().numpy())
        progress(len(own))
    return np.concatenate(found)


def gains(nats: Sequence[np.ndarray], spans: Spans, byte_counts: np.ndarray) -> list[dict[str, float]]:
    """For each history bits per byte, and by how much that is below the first; with the standard error of this over
    documents, whose spans are not independent."""
    size = float(byte_counts[spans.rows[:, -spans.span :]].sum())
    rows = []
    for own in nats:
        gain = (nats[0] - own) / math.log(2)
        apart = np.bincount(spans.documents, gain - gain.mean())
        count = len(apart)
        error = math.sqrt(float((apart**2).sum()) * count / (count - 1)) / size if count > 1 else math.nan
        bits = float(own.sum()) / math.log(2)
        rows.append({"bpb": bits / size, "gain": float(gain.sum()) / size, "error": error})
    return rows


def draw_history(figure: "Figure", runs: list[dict[str, Any]]) -> None:
    from maglev.evaluate.figures import LINE_STYLES, colours

    axes = figure.add_subplot()
    palette = colours([run["label"] for run in runs])
    for run in runs:
        reaches = [row["reaches"] for row in run["rows"]]
        for source in run["sources"]:
            style = LINE_STYLES.get(source, "-.")
            gained = [row[f"gain_{source}"] for row in run["rows"]]
            errors = [0.0 if math.isnan(row[f"error_{source}"]) else row[f"error_{source}"] for row in run["rows"]]
            axes.errorbar(
                reaches, gained, errors, fmt="o", linestyle=style, color=palette[run["label"]],
                markersize=3, linewidth=1.2, elinewidth=0.8, label=f"{run['label']}, {source}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [row["reaches"] for row in runs[0]["rows"]], [str(tick) for tick in ticks])
    axes.set_xlabel("text read before, in plain reaches")
    axes.set_ylabel("bits per byte gained by all beyond one reach")
    # what full layers gain is a hundred times what a memory does
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
