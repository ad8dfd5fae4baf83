"""Who can know a needle, to the bit, and what it is worth."""

from pathlib import Path

import numpy as np
import pytest
import torch

from maglev.data.needles import NeedleRows
from maglev.data.recall import RecallConfig
from maglev.data.shards import open_data
from maglev.evaluate.memories import Source, memories
from maglev.evaluate.needles import gain_rows, needle_gains
from maglev.objectives.losses import Objective
from tests.helpers import small, step_through

TASK = RecallConfig(variant="needles", pairs=2, keys=4, values=4)
CONTEXT, WINDOW, REACH, ROWS = 200, 18, 34, 8


@pytest.fixture(scope="module")
def rows(data: Path) -> NeedleRows:
    return NeedleRows(TASK, open_data(data), "validation", CONTEXT, 0)


def model(recipe: str) -> Objective:
    return small(recipe, depth=2, window=WINDOW, context=CONTEXT, vocab_size=300, scale=0.7)


@pytest.mark.parametrize(
    ("recipe", "source"),
    [("swa-ssss", "recurrent"), ("transformer-slsl", "recurrent"), ("maglev-shared-0.1", "recurrent")],
)
def test_swa_knows_nothing_of_a_needle_beyond_its_reach_and_others_can(
    recipe: str, source: Source, rows: NeedleRows
) -> None:
    """So it cannot be better than chance there, whatever it learns."""
    objective = model(recipe)
    batch = rows.draw(range(ROWS))
    before = memories(objective, torch.from_numpy(batch.tokens), source, 1)
    known, asked = set(), set()
    for tokens, own in rows.without(range(ROWS)):
        changed = (before != memories(objective, torch.from_numpy(tokens), source, 1)).any(-1).numpy()
        known |= set(batch.distance[own & changed].tolist())
        asked |= set(batch.distance[own].tolist())
    near = {distance for distance in asked if distance <= REACH}
    assert near and asked - near
    assert known == (near if recipe == "swa-ssss" else asked)


@pytest.mark.parametrize("recipe", ["swa-ssss", "maglev-shared-0.1"])
def test_the_gain_is_that_of_steps_and_exactly_nothing_beyond_a_plain_stack(recipe: str, rows: NeedleRows) -> None:
    objective = model(recipe)
    answers = needle_gains(objective, rows, "recurrent", passes=3, count=ROWS)
    batch = rows.draw(range(ROWS))
    asked = batch.targets >= 0
    assert [answer["distance"] for answer in answers] == batch.distance[asked].tolist()
    far = [answer["gain"] for answer in answers if answer["distance"] > REACH]
    assert far and all((gain == 0) == (recipe == "swa-ssss") for gain in far)
    assert all(answer["gain"] != 0 for answer in answers if answer["distance"] <= REACH)

    def nats(tokens: np.ndarray) -> np.ndarray:
        logits = objective.decoder.readout(step_through(objective.decoder, torch.from_numpy(tokens))).detach()
        cost = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten(), ignore_index=-2, reduction="none"
        )
        return cost.view(batch.targets.shape).numpy()

    kept = nats(batch.tokens)
    gone = sum(np.where(own, nats(tokens), 0) for tokens, own in rows.without(range(ROWS)))
    np.testing.assert_allclose([answer["nats"] for answer in answers], kept[asked], rtol=0, atol=1e-9)
    np.testing.assert_allclose([answer["gain"] for answer in answers], (gone - kept)[asked], rtol=0, atol=1e-9)


def test_means_are_by_source_and_distance(rows: NeedleRows) -> None:
    objective = model("maglev-shared-0.1")
    answers = needle_gains(objective, rows, "lifted", passes=1, count=ROWS)
    found = gain_rows(answers, "lifted", REACH)
    assert set(found) == {("lifted", label) for label in ("0-1", "1-2", "2-4", "4-8")}
    own = [answer["gain"] for answer in answers if REACH < answer["distance"] <= 2 * REACH]
    assert found["lifted", "1-2"]["gain"] == pytest.approx(np.mean(own))
    assert found["lifted", "1-2"]["gain_error"] > 0
