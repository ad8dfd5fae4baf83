"""What can be recalled by whom, to the bit; and that right answers are counted right."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from maglev.data.recall import RecallConfig, RecallRows
from maglev.errors import RequestError
from maglev.evaluate import recall as module
from maglev.evaluate.figures import RECIPE_COLOURS
from maglev.evaluate.memories import Source, memories
from maglev.evaluate.recall import RecallResult, plain_reach, predict, recall, recall_sources
from maglev.evaluate.recall_results import (
    add_rows,
    cost_curves,
    curves,
    draw_costs,
    draw_recall,
    draw_rows,
    looks_of,
    read_rows,
    result_rows,
)
from maglev.objectives.losses import Objective
from maglev.recipes import run_config
from tests.helpers import small

TASK = RecallConfig(pairs=2, keys=8, values=8)
CONTEXT = 60
SHAPE = {"context": CONTEXT, "window": 5, "depth": 2, "vocab_size": TASK.vocab_size}
REACH = 8


def logits_with(objective: Objective, tokens: Tensor, source: Source) -> Tensor:
    # the passes are enough for the farthest distance
    return objective.decoder.readout(memories(objective, tokens, source, 8))


def distances_that_know(recipe: str, source: Source) -> set[int]:
    """At which distances the logits of a question change with the value of its own pair."""
    objective = small(recipe, **SHAPE)
    assert plain_reach(objective.decoder.config) == REACH
    batch = RecallRows(TASK, "validation", CONTEXT, 0).draw(range(40))
    tokens = torch.from_numpy(batch.tokens)
    found = set()
    before = logits_with(objective, tokens, source)
    for place in (1, 3):
        other = tokens.clone()
        other[:, place] = TASK.first_value + (tokens[:, place] - TASK.first_value + 1) % TASK.values
        changed = (before != logits_with(objective, other, source)).any(-1).numpy()
        position = np.arange(CONTEXT)
        own = (batch.targets >= 0) & (position - batch.distance == place)
        found |= set((batch.distance[changed & own]).tolist())
    asked = set(batch.distance[batch.targets >= 0].tolist())
    assert asked >= set(range(2, CONTEXT - 5))
    return found


def test_swa_knows_nothing_beyond_its_reach() -> None:
    """So it cannot be better than chance there, whatever it learns."""
    assert distances_that_know("swa-ssss", "recurrent") == set(range(2, REACH + 1))


@pytest.mark.parametrize(
    ("recipe", "source"),
    [
        ("transformer-slsl", "recurrent"),
        ("maglev-shared-0.1", "recurrent"),
        ("maglev-shared-0.1", "lifted"),
        ("lrt-ssss", "refined"),
    ],
)
def test_memory_and_full_attention_can_know_at_every_distance(recipe: str, source: Source) -> None:
    assert distances_that_know(recipe, source) >= set(range(2, CONTEXT - 5))


def test_few_passes_from_zeros_reach_only_so_far() -> None:
    objective = small("maglev-shared-0.1", **SHAPE)
    tokens = torch.from_numpy(RecallRows(TASK, "validation", CONTEXT, 0).draw([0]).tokens)
    other = tokens.clone()
    other[:, 3] = TASK.first_value + (tokens[:, 3] - TASK.first_value + 1) % TASK.values
    changed = memories(objective, tokens, "refined", 2) != memories(objective, other, "refined", 2)
    assert int(changed.any(-1)[0].nonzero().max()) == 3 + 2 * REACH + 1


def counted(monkeypatch: pytest.MonkeyPatch, answer: str, rows: RecallRows, count: int) -> RecallResult:
    """The result of somebody who knows (`oracle`), guesses (`guess`), or knows what is near (`near`)."""
    generator = np.random.default_rng(0)
    drawn = iter([rows.draw(range(first, min(first + 16, count))) for first in range(0, count, 16)])

    def say(objective: Objective, tokens: Tensor, asked: Tensor, source: Source, passes: int) -> Tensor:
        batch = next(drawn)
        guesses = generator.integers(TASK.first_value, TASK.vocab_size, batch.targets.shape)
        knows = {"oracle": batch.distance < 999, "guess": batch.distance > 999, "near": batch.distance <= 20}[answer]
        return torch.from_numpy(np.where(knows, batch.targets, guesses))

    monkeypatch.setattr(module, "predict", say)
    objective = small("swa-ssss", **SHAPE)
    return recall(objective, rows, "recurrent", passes=1, count=count, rows_per_pass=16)


def test_right_answers_are_counted_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RecallRows(TASK, "validation", CONTEXT, 0)
    batch = rows.draw(range(200))
    distances = batch.distance[batch.targets >= 0].tolist()
    # reach 8: distance 8 is within, 9 beyond
    edges = {"0-1": (1, 8), "1-2": (9, 16), "2-4": (17, 32), "4-8": (33, 64)}
    expected = {name: sum(first <= d <= last for d in distances) for name, (first, last) in edges.items()}

    oracle = counted(monkeypatch, "oracle", rows, 200)
    assert {b.label: b.items for b in oracle.buckets} == expected == {b.label: b.correct for b in oracle.buckets}
    assert oracle.beyond_reach == 1 and sum(expected.values()) == len(distances)

    guess = counted(monkeypatch, "guess", rows, 200)
    assert all(abs(b.accuracy - TASK.chance) < 5 * math.sqrt(TASK.chance / b.items) for b in guess.buckets)
    assert guess.beyond_reach == pytest.approx(TASK.chance, abs=0.02)

    near = {b.label: b for b in counted(monkeypatch, "near", rows, 200).buckets}
    assert near["0-1"].accuracy == near["1-2"].accuracy == 1
    known = sum(17 <= d <= 20 for d in distances) / expected["2-4"]
    assert near["2-4"].accuracy == pytest.approx(known + (1 - known) * TASK.chance, abs=0.05)
    assert near["4-8"].accuracy == pytest.approx(TASK.chance, abs=0.04)


def test_a_prediction_is_the_likeliest_token_where_something_is_asked() -> None:
    objective = small("maglev-shared-0.1", scale=0.4, **SHAPE)
    batch = RecallRows(TASK, "validation", CONTEXT, 0).draw(range(3))
    tokens, asked = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets >= 0)
    stepped = predict(objective, tokens, asked, "recurrent", 1)
    likeliest = logits_with(objective, tokens, "recurrent").argmax(-1)
    assert torch.equal(stepped[asked], likeliest[asked]) and (stepped[~asked] == -1).all()
    # to the end, refining is stepping
    assert torch.equal(predict(objective, tokens, asked, "refined", CONTEXT), stepped)
    one_by_one = recall(objective, RecallRows(TASK, "validation", CONTEXT, 0), "recurrent", passes=1, count=3)
    right = Counter(batch.distance[(stepped.numpy() == batch.targets)].tolist())
    assert {d: int(n) for d, n in enumerate(one_by_one.correct) if n} == dict(right)


def test_every_source_that_an_objective_has_is_named() -> None:
    assert recall_sources(small("swa-ssss")) == ("recurrent",)
    assert recall_sources(small("lrt-ssss")) == ("recurrent", "refined")
    assert recall_sources(small("maglev-separate-1")) == ("recurrent", "lifted", "refined")


def rows_of(recipe: str, seed: int, accuracy: float) -> list[dict[str, object]]:
    settings = {"model.window": 16, "model.vocab_size": 72, "train.seed": seed, "train.tokens_per_step": 2048}
    settings |= {"train.steps": 5}
    config = run_config(recipe, 4, settings)
    items = np.zeros(200, dtype=np.int64)
    items[1:] = 100
    result = RecallResult("recurrent", None, 60, (items * accuracy).astype(np.int64), items)
    return result_rows(config, TASK, 200, [result], steps=5, seconds=1.0, settings={})


def test_recall_against_cost_is_a_curve_where_steps_alone_differ() -> None:
    """Weighed by questions, over seeds; what lies nearer or farther is not counted."""
    short = [*rows_of("maglev-closed", 0, 0.5), *rows_of("maglev-closed", 1, 1.0)]
    # twice the steps are twice the FLOPs
    long = [row | {"steps": 10, "training_flops": 2 * row["training_flops"], "accuracy": 0.9} for row in short]
    swa = rows_of("swa-ssss", 0, 0.1)
    flops = short[0]["training_flops"]
    assert (short[0]["distance"], short[-1]["distance"]) == ("0-1", "2-4")
    closed, plain = cost_curves([*long, *short, *swa], 1, 4)
    assert closed == ("maglev-closed, recurrent", "maglev-closed", [(flops, 0.75), (2 * flops, pytest.approx(0.9))])
    assert plain[1:] == ("swa-ssss", [(swa[0]["training_flops"], pytest.approx(0.1))])
    assert cost_curves(short, 4, 16) == []


def test_a_cost_is_told_in_that_of_the_papers_objective() -> None:
    paper, closed, swa = (rows_of(name, 0, 1.0)[0] for name in ("maglev-shared-1", "maglev-closed", "swa-ssss"))
    assert paper["cost"] == 1 and 1.2 < closed["cost"] <= 1.3 and swa["cost"] < 0.7
    assert closed["cost"] == pytest.approx(closed["training_flops"] / paper["training_flops"], abs=1e-3)


def test_rows_are_added_once_and_drawn(tmp_path: Path) -> None:
    file, first, second = tmp_path / "r.json", rows_of("swa-ssss", 0, 0.5), rows_of("swa-ssss", 1, 1.0)
    assert [row["distance"] for row in first] == ["0-1", "1-2", "2-4"]
    assert first[0]["training_flops"] > 1e9 and first[0]["items"] == 6000
    add_rows(file, first)
    add_rows(file, second)
    again = add_rows(file, [row | {"accuracy": 0.25} for row in first])
    assert read_rows(file) == again and len(again) == 6
    assert [row["accuracy"] for row in again] == [0.25] * 3 + [1.0] * 3
    # one curve, the mean of two seeds
    ((name, recipe, source, points),) = curves(again)
    assert (name, recipe, source) == ("swa-ssss", "swa-ssss", "recurrent")
    # the last distances end with the row, before four reaches
    end = (first[0]["context"] - 1) / (first[0]["depth"] * (first[0]["window"] - 1))
    assert 2 < end < 4 and points == [(0.5, 0.625), (math.sqrt(2), 0.625), (math.sqrt(2 * end), 0.625)]
    # a setting is named where it tells curves apart
    fast = [row | {"settings": {"optimizer.matrix_lr": 0.12345, "train.threads": 1}} for row in first]
    slow = [row | {"settings": {"optimizer.matrix_lr": 0.01, "train.threads": 1}} for row in first]
    assert [name for name, *_ in curves(fast)] == ["swa-ssss"]
    both = [*fast, *slow, *(row | {"settings": {"train.threads": 1}} for row in first)]
    assert [name for name, *_ in curves(both)] == ["swa-ssss, matrix_lr 0.123", "swa-ssss, matrix_lr 0.01", "swa-ssss"]
    asked = [row | {"data": "books", "trained_on": "text", "gain": 0.5} for row in first]
    assert [name for name, *_ in curves(asked)] == ["swa-ssss, trained on text"]
    assert len(add_rows(tmp_path / "text.json", [*asked, *(row | {"gain": 0.1} for row in asked)])) == 3
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    draw_costs(tmp_path / "c.svg", again)
    assert "1 to 4 plain reaches" in (tmp_path / "c.svg").read_text()
    # rows of before costs were told are read and added to, and left out where costs are drawn
    old = [{key: value for key, value in row.items() if key != "training_flops"} for row in again]
    assert add_rows(tmp_path / "old.json", old) == read_rows(tmp_path / "old.json") == old
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
    draw_costs(tmp_path / "a" / "c.svg", [*old, *again])
    assert (tmp_path / "a" / "c.svg").read_text() == (tmp_path / "c.svg").read_text()
    draw_costs(tmp_path / "b" / "c.svg", old)
    assert "swa-ssss" in (tmp_path / "c.svg").read_text() and "swa-ssss" not in (tmp_path / "b" / "c.svg").read_text()
    # each with a look of its own, the recipe as it is in the recipe's colour
    looks = looks_of(curves(both))
    assert len(set(looks.values())) == 3 and to_hex(looks["swa-ssss"][0]) == RECIPE_COLOURS["swa-ssss"]
    # a panel for every task; a legend that tells settings and memories once each
    figure = Figure()
    draw_recall(figure, [*both, *(row | {"pairs": 99, "memory": "lifted"} for row in both)])
    assert [axes.get_title() for axes in figure.axes] == ["pairs 2", "pairs 99"]
    assert [len([line for line in axes.lines if line.get_marker() != "None"]) for axes in figure.axes] == [3, 3]
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == [*looks, "recurrent memories", "lifted memories"]
    draw_rows(tmp_path / "r.png", again)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match=r"must end in one of \.svg, \.png, \.pdf"):
        draw_rows(tmp_path / "r.txt", again)
    file.write_text("[]")
    with pytest.raises(RequestError, match="not a file of recall results"):
        read_rows(file)
