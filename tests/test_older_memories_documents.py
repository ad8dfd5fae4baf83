"""What documents say of older memories and many pairs is what was measured."""

import json
from typing import Any

import pytest

from tests.documents import REPOSITORY

DELAYED = {"model.injection": "shared_kv", "model.delay": 8}
DISTANCES = ("1-2", "2-4", "4-8", "8-16")


def rows_of(name: str) -> list[dict[str, Any]]:
    content = json.loads((REPOSITORY / "results" / name).read_text(encoding="utf-8"))
    return [row for row in content["rows"] if row["recipe"] == "maglev-closed"]


def recurrent(rows: list[dict[str, Any]], pairs: int, share: float, settings: dict[str, Any], seed: int) -> list[float]:
    """By distance, of the run with these settings and no others but the tokens of a step."""

    def matches(row: dict[str, Any]) -> bool:
        own = {key: value for key, value in row["settings"].items() if key != "train.tokens_per_step"}
        asked = (row["pairs"], row["query_share"], row["seed"], row["memory"]) == (pairs, share, seed, "recurrent")
        return own == settings and asked and row["steps"] in (1200, 1800)

    found = {row["distance"]: row["accuracy"] for row in rows if matches(row)}
    return [found[distance] for distance in DISTANCES if distance in found]


def told(values: list[float], digits: int = 2) -> str:
    return ", ".join(bare(value, digits) for value in values)


def bare(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".removeprefix("0")


def words_of(name: str) -> str:
    return " ".join((REPOSITORY / name).read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return rows_of("recall-delay-cpu.json")


def test_eight_pairs_over_seeds(rows: list[dict[str, Any]]) -> None:
    results, readme, log = map(words_of, ("docs/results.md", "README.md", "docs/log.md"))
    by_seed = [recurrent(rows, 8, 0.75, DELAYED, seed) for seed in range(3)]
    near, middle, far = (f"{bare(min(each))} to {bare(max(each))}" for each in zip(*by_seed, strict=True))
    assert f"{near} at 1-2 plain reaches, {middle} at 2-4 and {far} at 4-8 in three seeds" in results
    assert f"8 pairs at toy size {far} at 4-8 in three seeds" in readme
    before = [recurrent(rows_of("recall-many-cpu.json"), 8, 0.75, {}, seed) for seed in (0, 1)]
    ends = [f"{bare(min(each))} and {bare(max(each))}" for each in zip(*before, strict=True)]
    assert ", ".join(ends) in results and f"`maglev-closed` has {ends[-1]}" in readme
    for each in by_seed:
        assert " | ".join(f"{bare(value, 3)}" for value in each[:2]) in log


def test_rare_questions_and_sixteen_pairs(rows: list[dict[str, Any]]) -> None:
    results, log = words_of("docs/results.md"), words_of("docs/log.md")
    rare = recurrent(rows, 8, 0.02, DELAYED, 0)
    assert f"at .02 of the places, {bare(rare[-1])} is there at 4-8" in results
    sixteen = {"model.injection": "shared_kv", "model.delay": 16}
    dense, some, few = (recurrent(rows, 16, share, sixteen, 0) for share in (0.75, 0.1, 0.02))
    assert f"are at {told(dense)} from 1-2 to 8-16, at {told(few)} with rare questions" in results
    assert f"{told(dense[2:])}; where questions are rare {told(few[2:])}" in results
    for each in (dense, some, few):
        assert " | ".join(bare(value, 3) for value in each) in log
