"""The recall task, against a reader that knows only what the tokens mean."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maglev.data.loader import UNSCORED_TARGET
from maglev.data.recall import MARKER, RecallBatch, RecallConfig, RecallRows
from maglev.errors import RequestError

CONFIGS = st.builds(
    RecallConfig,
    variant=st.sampled_from(["pairs", "overwrite"]),
    pairs=st.integers(1, 6),
    keys=st.integers(6, 12),
    values=st.integers(2, 9),
    fillers=st.integers(1, 4),
    query_share=st.sampled_from([0.01, 0.3, 0.75, 1.0]),
    spread=st.sampled_from(["even", "log"]),
)


def is_key(config: RecallConfig, token: int) -> bool:
    return config.first_key <= token < config.first_value


def read(config: RecallConfig, tokens: list[int]) -> tuple[dict[int, tuple[int, int]], list[tuple[int, int]]]:
    """Token by token: position -> (answer, distance) of every question, and the (key, value) given, in order."""
    known: dict[int, tuple[int, int]] = {}
    answers: dict[int, tuple[int, int]] = {}
    given: list[tuple[int, int]] = []
    for position, token in enumerate(tokens):
        before = tokens[position - 1] if position else None
        if token >= config.first_value:
            assert before is not None and is_key(config, before) and tokens[position - 2] != MARKER
            known[before] = (token, position)
            given.append((before, token))
        elif is_key(config, token) and before == MARKER:
            value, place = known[token]
            answers[position] = (value, position - place)
        elif is_key(config, token):
            assert tokens[position + 1] >= config.first_value
        else:
            assert token == MARKER or 1 <= token <= config.fillers
            assert before != MARKER
    return answers, given


def scored(batch: RecallBatch, row: int) -> dict[int, tuple[int, int]]:
    places = np.flatnonzero(batch.targets[row] >= 0).tolist()
    assert (np.delete(batch.targets[row], places) == UNSCORED_TARGET).all()
    assert (np.delete(batch.distance[row], places) == 0).all()
    return {place: (int(batch.targets[row, place]), int(batch.distance[row, place])) for place in places}


@settings(max_examples=60, deadline=None)
@given(CONFIGS, st.integers(40, 90), st.integers(0, 2**40), st.integers(0, 10**9))
def test_a_reader_of_the_tokens_finds_targets_and_distances(
    config: RecallConfig, context: int, seed: int, first: int
) -> None:
    rows = RecallRows(config, "train", context, seed)
    batch = rows.draw(range(first, first + 5))
    assert batch.tokens.shape == (5, context) and batch.tokens.max() < config.vocab_size and batch.tokens.min() >= 0
    for row in range(5):
        answers, given_pairs = read(config, batch.tokens[row].tolist())
        assert scored(batch, row) == answers
        assert len(answers) == rows.questions
        # the pairs come first, each key once; later ones only where keys are overwritten, with a new value
        early, late = given_pairs[: config.pairs], given_pairs[config.pairs :]
        assert len({key for key, _ in early}) == config.pairs
        assert len(late) == (config.pairs if config.variant == "overwrite" else 0)
        newest = dict(early)
        for key, value in late:
            assert newest[key] != value
            newest[key] = value


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(2, 9), st.integers(30, 90), st.integers(0, 1000))
def test_copying_says_the_span_from_every_marker_on(pairs: int, values: int, context: int, seed: int) -> None:
    config = RecallConfig(variant="copy", pairs=pairs, values=values, keys=6)
    batch = RecallRows(config, "train", context, seed).draw(range(4))
    for row in range(4):
        tokens = batch.tokens[row].tolist()
        expected = {}
        for position in np.flatnonzero(batch.tokens[row] == MARKER).tolist():
            for index in range(pairs):
                expected[position + index] = (tokens[index], position)
        assert expected and scored(batch, row) == expected
        assert all(token >= config.first_value for token in tokens[:pairs])
        assert all(token <= config.fillers for token in tokens[pairs:])


@settings(max_examples=30, deadline=None)
@given(CONFIGS, st.lists(st.integers(0, 60), max_size=8), st.integers(0, 5))
def test_a_row_is_the_same_in_any_batch(config: RecallConfig, chosen: list[int], seed: int) -> None:
    """So ranks may take any share of the rows, and a resumed run goes on with the ones it would have had."""
    whole = RecallRows(config, "train", 60, seed).draw(range(61))
    some = RecallRows(config, "train", 60, seed).draw(chosen)
    for all_rows, own in zip(whole, some, strict=True):
        np.testing.assert_array_equal(all_rows[chosen], own)
    loaded = RecallRows(config, "train", 60, seed).batch(chosen)
    np.testing.assert_array_equal(loaded.tokens, some.tokens)
    np.testing.assert_array_equal(loaded.targets, some.targets)
    assert not loaded.starts.any()


def test_rows_seeds_and_splits_are_not_those_of_another() -> None:
    config = RecallConfig()
    made = [RecallRows(config, split, 128, seed) for split in ("train", "validation") for seed in range(3)]
    made.append(RecallRows(replace(config, values=16), "train", 128, 0))
    assert len({rows.fingerprint for rows in made}) == len(made)
    rows = [row.tobytes() for one in made[:-1] for row in one.draw(range(50)).tokens]
    assert len(set(rows)) == len(rows)
    assert RecallRows(config, "train", 128, 1).fingerprint == made[1].fingerprint


def test_these_numbers_stay() -> None:
    """A run that is resumed by a later version goes on with the same rows."""
    batch = RecallRows(RecallConfig(pairs=2), "train", 16, 7).draw([3])
    assert batch.tokens.tolist() == [[14, 53, 34, 44, 1, 3, 6, 7, 1, 0, 34, 4, 0, 34, 5, 7]]
    asked = {10: 44, 13: 44}
    assert {place: int(target) for place, target in enumerate(batch.targets[0]) if target >= 0} == asked


def test_every_distance_is_asked_and_each_value_as_often_as_others() -> None:
    config = RecallConfig()
    batch = RecallRows(config, "train", 128, 0).draw(range(2000))
    asked = batch.targets >= 0
    distances = np.bincount(batch.distance[asked], minlength=128)
    # the last pair's value is at 7, the first question's key at 9 or 10
    assert (distances[2:119] > 0).all() and distances[:2].sum() == 0
    counts = np.bincount(batch.targets[asked] - config.first_value)
    assert len(counts) == 32 and counts.min() > 0.7 * counts.mean()
    middle = distances[20:110]
    assert middle.min() > 0.8 * middle.mean()


def test_a_logarithmic_spread_asks_the_near_more_often() -> None:
    config = RecallConfig(query_share=0.1, spread="log")
    batch = RecallRows(config, "train", 512, 0).draw(range(400))
    distances = np.bincount(batch.distance[batch.targets >= 0], minlength=512)
    octaves = [distances[a : 2 * a].sum() for a in (32, 64, 128, 256)]
    assert max(octaves) < 1.3 * min(octaves)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pairs": 33}, "pairs is 33, more than the 32 keys there are; raise keys"),
        ({"pairs": 0}, "pairs is 0; it must be at least 1"),
        ({"values": 1}, "values is 1; it must be at least 2"),
        ({"variant": "sort"}, "variant is 'sort'; it must be one of pairs, overwrite, copy"),
        ({"spread": "wide"}, "spread is 'wide'; it must be one of even, log"),
        ({"query_share": 0}, "query_share is 0; it must be above 0"),
        ({"query_share": float("nan")}, "query_share is nan"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        RecallConfig(**changes)


@pytest.mark.parametrize("variant", ["pairs", "overwrite", "copy"])
def test_the_smallest_context_is_named_and_works(variant: Any) -> None:
    config = RecallConfig(variant=variant)
    with pytest.raises(RequestError, match=r"no room for 4 pairs and a question; use at least (\d+)") as caught:
        RecallRows(config, "train", 8, 0)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert (RecallRows(config, "train", least, 0).draw(range(20)).targets >= 0).any()
    with pytest.raises(RequestError):
        RecallRows(config, "train", least - 1, 0)


def test_a_description_survives_json_and_a_foreign_one_does_not() -> None:
    config = RecallConfig(variant="overwrite", pairs=3)
    assert RecallConfig.from_dict(config.to_dict()) == config
    with pytest.raises(RequestError, match="not the description"):
        RecallConfig.from_dict({"colour": 3})
