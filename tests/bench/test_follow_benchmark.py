"""`benchmarks/follow.py` says whether kernels follow. The curves are made up."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from maglev.recipes import RECIPES
from tests.scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/follow.py")


PLAIN = {"plain": 2.01, "plain-2": 2.0, "exact": 2.02, "seed-1": 2.03, "seed-2": 1.99}


def curves(*fast: float) -> dict[str, list[float]]:
    """Constant ones, which rounding moves by up to .02 and another seed by .04."""
    given = dict(zip(("fast", "fast-2"), fast, strict=True)) | PLAIN
    return {way: [loss] * 40 for way, loss in given.items()}


@pytest.mark.parametrize(
    ("fast", "follows"),
    [
        ((2.0, 2.01), True),
        ((2.049, 1.961), True),
        # near another seed's, or near float32, is not near
        ((2.01, 2.051), False),
        ((1.959, 2.01), False),
        ((2.01, math.nan), False),
    ],
)
def test_kernels_follow_where_none_of_their_runs_comes_farther_than_the_spread(
    script: Any, fast: tuple[float, ...], follows: bool
) -> None:
    row = script.compare(curves(*fast))
    assert row["follows"] is follows
    assert ("do not follow" in script.verdict("a", row)) is not follows
    assert (row["plain_from_exact"], row["plain_spread"]) == (pytest.approx(0.02), pytest.approx(0.02))
    if math.isfinite(sum(fast)):
        assert row["fast_from_exact"] == pytest.approx(max(abs(loss - 2.02) for loss in fast))


def test_every_recipe_and_the_whole_get_a_verdict(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_one(recipe: str, way: str, asked: Namespace) -> list[float]:
        return curves(*([3.0 if recipe == "lrt-ssss" else 2.0] * 2))[way]

    out = tmp_path / "follow.json"
    monkeypatch.setattr(script, "run_one", run_one)
    monkeypatch.setattr(sys, "argv", ["follow.py", "--device", "cpu", "--out", str(out)])
    script.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert (
        len(
            [
                line
                for line in lines
                if ": at most 0.0000 from a plain run; those of other seeds are up to 0.0400 apart" in line
            ]
        )
        == len(RECIPES) - 1
    )
    assert lines[-1] == f"kernels follow in {len(RECIPES) - 1} of {len(RECIPES)} recipes; not in lrt-ssss"
    for told in (json.loads(last), json.loads(out.read_text())):
        assert told["follows"] is False
        assert [name for name, row in told["recipes"].items() if not row["follows"]] == ["lrt-ssss"]
