"""Recall by distance and memory source: how often the value that was given so long ago is the likeliest token."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maglev.data.recall import DrawnRows, distance_unit
from maglev.evaluate.memories import Source, memories, sources_of
from maglev.model_config import ModelConfig
from maglev.objectives.losses import Objective

# a step is bound by launches, not by rows, and keeps little of each; a pass at once keeps all positions
STEPPED_ROWS, PARALLEL_ROWS, PARALLEL_TOKENS = 256, 64, 1 << 16


def plain_reach(config: ModelConfig) -> int:
    """The unit of distance; full layers do not change it, so that all recipes have one unit."""
    return distance_unit(config.depth, config.window)


def recall_sources(objective: Objective) -> tuple[Source, ...]:
    """Every source that the objective has, the number that counts first."""
    sources = sources_of(objective)
    refinable = objective.decoder.injection is not None and "refined" not in sources
    return (*sources, "refined") if refinable else sources


@dataclass(frozen=True)
class Bucket:
    """Distances above `first` and up to `last` times the plain reach."""

    first: int
    last: int
    correct: int
    items: int

    @property
    def label(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def accuracy(self) -> float:
        return self.correct / self.items if self.items else math.nan


@dataclass(frozen=True)
class RecallResult:
    source: Source
    passes: int | None
    reach: int
    # by distance, counted in positions
    correct: np.ndarray
    items: np.ndarray

    def between(self, first: int, last: int | None) -> Bucket:
        """`last` of None is as far as it goes."""
        farthest = math.ceil((len(self.items) - 1) / self.reach)
        last = max(first + 1, farthest) if last is None else last
        at = slice(first * self.reach + 1, last * self.reach + 1)
        return Bucket(first, last, int(self.correct[at].sum()), int(self.items[at].sum()))

    @property
    def buckets(self) -> list[Bucket]:
        """0-1, 1-2, 2-4, 4-8 and so on, those without a question left out."""
        found, first, last = [], 0, 1
        while first * self.reach + 1 < len(self.items):
            found.append(self.between(first, last))
            first, last = last, 2 * last
        return [bucket for bucket in found if bucket.items]

    @property
    def beyond_reach(self) -> float:
        """Accuracy over all that only memory can answer; NaN where nothing of that is asked."""
        return self.between(1, None).accuracy

    def to_dict(self) -> dict[str, Any]:
        return {
            f"recall_{self.source}": self.beyond_reach,
            "memory": self.source,
            "passes": self.passes,
            "by_distance": [
                {"distance": b.label, f"recall_{self.source}": b.accuracy, "items": b.items} for b in self.buckets
            ],
        }


def tally(predicted: np.ndarray, targets: np.ndarray, distance: np.ndarray, length: int) -> np.ndarray:
    """Right answers and questions by distance. (R, T) each -> (2, length)"""
    asked = targets >= 0
    right = (predicted == targets) & asked
    return np.stack([np.bincount(distance[which], minlength=length) for which in (right, asked)])


@torch.inference_mode()
def predict(objective: Objective, tokens: Tensor, asked: Tensor, source: Source, passes: int) -> Tensor:
    """The likeliest token where something is asked, -1 elsewhere. (B, T) -> (B, T)"""
    memory = memories(objective, tokens, source, passes)
    predicted = torch.full_like(tokens, -1)
    predicted[asked] = objective.decoder.readout(memory[asked]).argmax(-1)
    return predicted


def rows_at_once(objective: Objective, source: Source, context: int) -> int:
    if source == "recurrent" and objective.decoder.injection is not None:
        return STEPPED_ROWS
    return max(1, min(PARALLEL_ROWS, PARALLEL_TOKENS // context))


def parts_of(count: int, size: int) -> list[range]:
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def recall(
    objective: Objective,
    rows: DrawnRows,
    source: Source,
    *,
    passes: int,
    count: int,
    rows_per_pass: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> RecallResult:
    """Over the first `count` rows."""
    device = objective.decoder.device
    counts = np.zeros((2, rows.context), dtype=np.int64)
    for some in parts_of(count, rows_per_pass or rows_at_once(objective, source, rows.context)):
        batch = rows.draw(some)
        tokens = torch.from_numpy(batch.tokens).to(device)
        asked = torch.from_numpy(batch.targets >= 0).to(device)
        predicted = predict(objective, tokens, asked, source, passes).cpu().numpy()
        counts += tally(predicted, batch.targets, batch.distance, rows.context)
        if progress:
            progress(some.stop, count)
    return RecallResult(
        source=source,
        passes=passes if source == "refined" else None,
        reach=plain_reach(objective.decoder.config),
        correct=counts[0],
        items=counts[1],
    )
