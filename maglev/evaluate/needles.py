"""What a needle is worth: how much more its value costs, where it is asked for, if another stood in its place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from maglev.data.needles import NeedleRows
from maglev.evaluate.memories import Source, memories
from maglev.evaluate.names import by_distance
from maglev.evaluate.recall import parts_of, rows_at_once
from maglev.objectives.losses import Objective
from maglev.ops.loss import cross_entropy


@torch.inference_mode()
def answer_nats(
    objective: Objective, tokens: np.ndarray, targets: np.ndarray, source: Source, passes: int
) -> np.ndarray:
    """What the value costs at every question, in the order of the rows. (R, T) twice -> (N,)"""
    device, readout = objective.decoder.device, objective.decoder.readout
    wanted = torch.from_numpy(targets).to(device)
    memory = memories(objective, torch.from_numpy(tokens).to(device), source, passes)
    asked = wanted >= 0
    nats = cross_entropy(memory[asked], readout.weight, wanted[asked], readout.cap)
    return nats.double().cpu().numpy()


def needle_gains(
    objective: Objective,
    rows: NeedleRows,
    source: Source,
    *,
    passes: int,
    count: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, float]]:
    """For every question of the first `count` rows: its distance, what its value cost, how much more without it.

    One that cannot have kept anything at that distance gains exactly 0: nothing else changes, and all shapes stay.
    """
    found = []
    for some in parts_of(count, rows_at_once(objective, source, rows.context)):
        batch = rows.draw(some)
        asked = batch.targets >= 0
        kept = answer_nats(objective, batch.tokens, batch.targets, source, passes)
        gone = np.zeros_like(kept)
        for tokens, own in rows.without(some):
            nats = answer_nats(objective, tokens, batch.targets, source, passes)
            gone[own[asked]] = nats[own[asked]]
        found += [
            {"distance": distance, "nats": nats, "gain": gain}
            for distance, nats, gain in zip(batch.distance[asked].tolist(), kept.tolist(), (gone - kept).tolist())
        ]
        if progress:
            progress(some.stop, count)
    return found


def gain_rows(answers: list[dict[str, float]], source: Source, reach: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Means by (memory source, distance in plain reaches), with the standard error of the gain."""
    return {
        (source, row["distance"]): {"nats": row["nats"], "gain": row["gain"], "gain_error": row["error"]}
        for row in by_distance(answers, reach)
    }
