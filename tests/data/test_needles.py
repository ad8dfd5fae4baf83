"""Needles in text, against a reader that knows only the sentence."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maglev.data.loader import UNSCORED_TARGET, Loader
from maglev.data.needles import NeedleRows, words_of
from maglev.data.recall import RecallConfig
from maglev.data.shards import TokenData, open_data
from maglev.errors import RequestError
from tests.small_runs import data

__all__ = ["data"]

CONFIGS = st.builds(
    RecallConfig,
    variant=st.just("needles"),
    pairs=st.integers(1, 4),
    keys=st.integers(5, 6),
    values=st.integers(2, 6),
    query_share=st.sampled_from([0.01, 0.75, 1.0]),
    spread=st.sampled_from(["even", "log"]),
)
CONFIG = RecallConfig(variant="needles", pairs=3, keys=6, values=6)


@pytest.fixture(scope="module")
def text(data: Path) -> TokenData:
    return open_data(data)


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    return [at for at in range(len(tokens)) if tokens[at : at + len(part)] == part]


def read(text: TokenData, tokens: list[int]) -> tuple[dict[int, tuple[int, int]], dict[int, int], list[int]]:
    """Position -> (answer, distance) of every question, the word given for each key, and all that is between."""
    before, between, after = map(text.tokenizer.encode, ("\nThe special word for", " is", ".\n"))
    known: dict[int, tuple[int, int]] = {}
    answers, taken = {}, set()
    for begin in occurrences(tokens, before):
        key, end = tokens[begin + len(before)], begin + len(before) + 1 + len(between)
        assert tokens[end - len(between) : end] == between
        if key in known:
            value, place = known[key]
            answers[end - 1] = (value, end - 1 - place)
        else:
            known[key] = (tokens[end], end)
            assert tokens[end + 1 : end + 1 + len(after)] == after
            end += 1 + len(after)
        taken |= set(range(begin, end))
    rest = [token for at, token in enumerate(tokens) if at not in taken]
    return answers, {key: value for key, (value, _) in known.items()}, rest


@settings(max_examples=40, deadline=None)
@given(config=CONFIGS, context=st.integers(200, 400), seed=st.integers(0, 2**40), first=st.integers(0, 10**5))
def test_a_reader_of_the_text_finds_targets_and_distances(
    text: TokenData, config: RecallConfig, context: int, seed: int, first: int
) -> None:
    rows = NeedleRows(config, text, "train", context, seed)
    batch = rows.draw(range(first, first + 3))
    filler = Loader(text, "train", rows.text.context, seed).batch(range(first, first + 3)).tokens
    words = words_of(text.tokenizer, config.keys + config.values).tolist()
    for row, tokens in enumerate(batch.tokens.tolist()):
        answers, given_words, rest = read(text, tokens)
        places = np.flatnonzero(batch.targets[row] >= 0)
        found = zip(batch.targets[row, places].tolist(), batch.distance[row, places].tolist(), strict=True)
        assert dict(zip(places.tolist(), found, strict=True)) == answers
        assert len(answers) == rows.questions and len(given_words) == config.pairs
        assert set(given_words) <= set(words[: config.keys]) and set(given_words.values()) <= set(words[config.keys :])
        # the text is whole and in its order, and at least half of the row
        assert rest == filler[row].tolist() and len(rest) >= context / 2
        assert (np.delete(batch.targets[row], places) == UNSCORED_TARGET).all()


def test_a_row_is_the_same_in_any_batch_and_another_in_each_pass_over_the_text(text: TokenData) -> None:
    rows = NeedleRows(CONFIG, text, "train", 240, 5)
    whole, chosen = rows.draw(range(40)), [7, 8, 31, 0]
    some = NeedleRows(CONFIG, text, "train", 240, 5).draw(chosen)
    for every, own in zip(whole, some, strict=True):
        np.testing.assert_array_equal(every[chosen], own)
    loaded = rows.batch(chosen)
    np.testing.assert_array_equal(loaded.tokens, some.tokens)
    assert not loaded.starts.any() and rows.tokens_per_epoch == 240 * rows.text.rows_per_epoch
    fingerprints = {NeedleRows(CONFIG, text, split, 240, seed).fingerprint for split in text.splits for seed in (0, 1)}
    assert len(fingerprints) == 4
    far = rows.draw(range(rows.text.rows_per_epoch, rows.text.rows_per_epoch + 40))
    assert (far.targets != whole.targets).any(axis=1).all()


def test_every_distance_is_asked_and_each_value_as_often_as_others(text: TokenData) -> None:
    rows = NeedleRows(CONFIG, text, "train", 400, 0)
    batch = rows.draw(range(3000))
    asked = batch.targets >= 0
    distances = np.bincount(batch.distance[asked], minlength=400)
    # a question can come as soon as a needle ends
    nearest = len(rows.needle) - rows.value_at + len(rows.question) - 1
    assert distances[:nearest].sum() == 0 and (distances[nearest:350] > 0).all()
    middle = distances[60:260]
    assert middle.min() > 0.5 * middle.mean()
    counts = np.unique(batch.targets[asked], return_counts=True)[1]
    assert len(counts) == 6 and counts.min() > 0.9 * counts.mean()


def test_without_a_needle_its_key_and_value_alone_are_others(text: TokenData) -> None:
    rows = NeedleRows(CONFIG, text, "train", 240, 0)
    batch = rows.draw(range(20))
    to_key = len(rows.question) - 1 - rows.key_at
    asked_for = np.zeros_like(batch.tokens)
    for tokens, own in rows.without(range(20)):
        asked_for += own
        for row in range(20):
            before, now = batch.tokens[row], tokens[row]
            answers, given_words, _ = read(text, before.tolist())
            key_place, value_place = np.flatnonzero(now != before).tolist()
            gone = int(before[key_place])
            assert given_words[gone] == before[value_place] != now[value_place] in rows.values
            assert now[key_place] in rows.keys and int(now[key_place]) not in given_words
            # where it is asked for, all of that and nothing else
            assert np.flatnonzero(own[row]).tolist() == [at for at in answers if int(before[at - to_key]) == gone]
    np.testing.assert_array_equal(asked_for, batch.targets >= 0)


def test_a_logarithmic_spread_asks_sooner(text: TokenData) -> None:
    means = []
    for spread in ("even", "log"):
        config = RecallConfig(variant="needles", pairs=1, keys=6, values=6, query_share=0.1, spread=spread)  # type: ignore[arg-type]
        batch = NeedleRows(config, text, "train", 1000, 0).draw(range(200))
        means.append(batch.distance[batch.targets >= 0].mean())
    assert means[1] < 0.7 * means[0]


def test_the_smallest_context_is_named_and_works(text: TokenData) -> None:
    with pytest.raises(RequestError, match=r"no room for 3 pairs and a question; use at least (\d+)") as caught:
        NeedleRows(CONFIG, text, "train", 60, 0)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert ((NeedleRows(CONFIG, text, "train", least, 0).draw(range(9)).targets >= 0).sum(axis=1) == 1).all()
    with pytest.raises(RequestError):
        NeedleRows(CONFIG, text, "train", least - 1, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"keys": 40, "values": 40}, r"80 words of one token, and the tokenizer has \d+ such; ask for fewer"),
        ({"pairs": 6}, "needles need a key more than there are pairs, raise keys"),
    ],
)
def test_what_cannot_be_planted_is_refused(text: TokenData, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        NeedleRows(RecallConfig(**(CONFIG.to_dict() | changes)), text, "train", 400, 0)


def test_words_are_the_longest(text: TokenData) -> None:
    pieces = [text.tokenizer.token_bytes[id] for id in words_of(text.tokenizer, 8)]
    assert pieces[0] == b" the" and all(piece[:1] == b" " and piece[1:].islower() for piece in pieces)
    assert [len(piece) for piece in pieces] == sorted((len(piece) for piece in pieces), reverse=True)
