"""What text read long ago is worth: the same tokens of documents, after more and more of what stands before them.

The unit is what a stack of windows reaches by itself. After one such reach its tokens cost what they will always cost
it; what is gained with more is the memory's, or that of layers which see the whole context.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maglev.data.shards import Split
from maglev.evaluate.bpb import batch_nats
from maglev.evaluate.memories import Source
from maglev.objectives.losses import WHOLE_ROWS, Objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Spans:
    """Rows (N, longest history + span) whose last `span` tokens are asked for, and the document of each (N,)"""

    rows: np.ndarray
    documents: np.ndarray
    span: int


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
    """At most so many, evenly from all that follow each other in documents and have such a history in their own."""
    places = []
    for shard in split.shards:
        for begin, end in pairwise(shard.offsets.tolist()):
            # a document's first token is BOS, which every row gets anew
            places += [(shard, begin, at) for at in range(begin + 1 + longest, end - span + 1, span)]
    if len(places) > most:
        places = [places[number] for number in np.linspace(0, len(places) - 1, most).round().astype(int)]
    rows = [np.asarray(shard.tokens[at - longest : at + span], dtype=np.int64) for shard, _, at in places]
    numbers: dict[tuple[int, int], int] = {}
    documents = [numbers.setdefault((id(shard), begin), len(numbers)) for shard, begin, _ in places]
    return Spans(np.array(rows).reshape(len(rows), longest + span), np.array(documents), span)


def span_nats(
    objective: Objective,
    spans: Spans,
    history: int,
    bos: int,
    source: Source,
    rows_per_pass: int,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """What each span costs after so many tokens of history, read from the start of a text. (N,)"""
    found, device = [], objective.decoder.device
    for first in range(0, len(spans.rows), rows_per_pass):
        rows = torch.from_numpy(spans.rows[first : first + rows_per_pass, -(history + spans.span) :])
        tokens = torch.cat((torch.full((len(rows), 1), bos), rows), dim=1).to(device)
        nats = batch_nats(objective, tokens[:, :-1], tokens[:, 1:], source, 1, WHOLE_ROWS)
        found.append(nats[:, -spans.span :].sum(1).cpu().numpy())
        if progress:
            progress(len(rows))
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
            gained = [row[f"gain_{source}"] for row in run["rows"]]
            errors = [row[f"error_{source}"] or 0.0 for row in run["rows"]]
            axes.errorbar(
                reaches, gained, errors, fmt="o", linestyle=LINE_STYLES[source], color=palette[run["label"]],
                markersize=3, linewidth=1.2, elinewidth=0.8, label=f"{run['label']}, {source}",
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlabel("text read before, in plain reaches")
    axes.set_ylabel("bits per byte gained by all beyond one reach")
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.legend(fontsize="small")
