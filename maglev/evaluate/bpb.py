"""Bits per byte of a split: nats of the targets over the raw bytes of their tokens, special tokens left out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maglev.config import DataConfig
from maglev.data.loader import Batch, Loader
from maglev.evaluate.memories import Source, memories
from maglev.objectives.losses import WHOLE_ROWS, Documents, Objective
from maglev.ops.loss import cross_entropy

POSITION_BUCKETS = 32


@dataclass(frozen=True)
class BitsPerByte:
    source: Source
    passes: int | None
    value: float
    tokens: int
    bytes: int
    # (first position, last position, bits per byte), in order
    by_position: list[tuple[int, int, float]]
    # of each of them: their mean weighted by these is the value
    position_bytes: list[int]

    def to_dict(self) -> dict[str, Any]:
        """The value's key names its source: there is no plain bits per byte for a memory model."""
        return {
            f"bpb_{self.source}": self.value,
            "memory": self.source,
            "passes": self.passes,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "by_position": [
                {"first": first, "last": last, f"bpb_{self.source}": value, "bytes": size}
                for (first, last, value), size in zip(self.by_position, self.position_bytes, strict=True)
            ],
        }


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting for what the GPU is doing: it copies by itself from pinned memory alone."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def documents_of(batch: Batch, config: DataConfig, device: torch.device) -> Documents:
    """What the run's settings make of document boundaries."""
    if not (config.document_mask or config.memory_reset):
        return WHOLE_ROWS
    starts = upload(batch.starts, device)
    inside = starts != torch.arange(starts.shape[1], device=device)
    return Documents(
        attention_starts=starts if config.document_mask else None,
        memory_keep=inside if config.memory_reset else None,
    )


@torch.inference_mode()
def batch_nats(
    objective: Objective, tokens: Tensor, targets: Tensor, source: Source, passes: int, documents: Documents
) -> Tensor:
    """Nats of every target, float64. (B, T) -> (B, T)"""
    memory = memories(objective, tokens, source, passes, documents)
    readout = objective.decoder.readout
    return cross_entropy(memory, readout.weight, targets, readout.cap).double()


def bits_per_byte(
    objective: Objective,
    loader: Loader,
    source: Source,
    byte_counts: np.ndarray,
    *,
    passes: int = 1,
    rows: int = 0,
    rows_per_pass: int = 16,
    data: DataConfig | None = None,
    edges: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BitsPerByte:
    """Over the first `rows` rows of the loader's plan; 0 means all of them. `byte_counts` (V,): raw bytes per token.
    `edges` are where ranges of positions begin and the last one ends, 32 alike unless given."""
    count = min(rows or loader.rows_per_epoch, loader.rows_per_epoch)
    bytes_of = torch.from_numpy(byte_counts).long()
    nats = np.zeros(loader.context)
    size = np.zeros(loader.context, dtype=np.int64)
    tokens_seen = 0
    device = objective.decoder.device
    for first in range(0, count, rows_per_pass):
        batch = loader.batch(range(first, min(first + rows_per_pass, count)))
        tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
        documents = documents_of(batch, data or DataConfig(), device)
        losses = batch_nats(objective, tokens.to(device), targets.to(device), source, passes, documents).cpu()
        # special tokens and padding carry no bytes
        target_bytes = bytes_of[targets.clamp_min(0)] * (targets >= 0)
        counted = target_bytes > 0
        nats += torch.where(counted, losses, 0).sum(0).numpy()
        size += target_bytes.sum(0).numpy()
        tokens_seen += int(counted.sum())
        if progress:
            progress(min(first + rows_per_pass, count), count)
    buckets = position_buckets(size, edges)
    return BitsPerByte(
        source=source,
        passes=passes if source == "refined" else None,
        value=ratio(nats.sum(), size.sum()),
        tokens=tokens_seen,
        bytes=int(size.sum()),
        by_position=[(a, b - 1, ratio(nats[a:b].sum(), size[a:b].sum())) for a, b in buckets],
        position_bytes=[int(size[a:b].sum()) for a, b in buckets],
    )


def ratio(nats: float, size: float) -> float:
    return float(nats / math.log(2) / size) if size else math.nan


def position_buckets(size: np.ndarray, edges: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Ranges of positions, of about equal length unless given, those without a byte left out. size (T,)"""
    if edges is None:
        edges = np.unique(np.linspace(0, len(size), min(POSITION_BUCKETS, len(size)) + 1).astype(int)).tolist()
    return [(a, b) for a, b in pairwise(edges) if size[a:b].sum()]
