"""`benchmarks/follow.py` says whether kernels follow. The curves are made up."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from maglev.recipes import RECIPES
from tests.scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/follow.py")


PLAIN = {"plain": 2.01, "plain-2": 2.0, "nudge-1": 2.02, "nudge-2": 2.03, "nudge-3": 1.99, "nudge-4": 2.0}


def curves(*fast: float) -> dict[str, list[float]]:
    """Constant ones, which rounding moves by up to .04."""
    given = dict(zip(("fast", "fast-2"), fast, strict=True)) | PLAIN
    return {way: [loss] * 40 for way, loss in given.items()}


@pytest.mark.parametrize(
    ("fast", "follows"),
    [
        ((2.0, 2.01), True),
        ((2.069, 1.951), True),
        ((2.01, 2.071), False),
        ((1.949, 2.01), False),
        ((2.01, math.nan), False),
    ],
)
def test_kernels_follow_where_none_of_their_runs_comes_farther_than_the_spread(
    script: Any, fast: tuple[float, ...], follows: bool
) -> None:
    row = script.compare(curves(*fast), {})
    assert row["follows"] is follows and row["spread"] == pytest.approx(0.04)
    assert ("do not follow" in script.verdict("a", row)) is not follows


def test_other_recipes_show_whether_a_wrong_model_would_follow(script: Any) -> None:
    others = {name: {"plain": [loss] * 40} for name, loss in (("near", 2.069), ("far", 2.2))}
    row = script.compare(curves(2.0, 2.0), others)
    assert row["wrong_ones_that_follow"] == ["near"] and row["nearest_wrong_one"] == pytest.approx(0.039)
    assert "so near are near" in script.verdict("a", row)
    assert "no other recipe is so near" in script.verdict("a", script.compare(curves(2.0, 2.0), {"far": others["far"]}))


def test_a_verdict_that_hangs_on_one_plain_run_says_so(script: Any) -> None:
    assert script.compare(curves(2.0, 2.01), {})["hangs_on"] == []
    # one that went astray makes room for kernels that are wrong
    astray = curves(2.3, 2.3) | {"nudge-3": [3.0] * 40}
    row = script.compare(astray, {})
    assert row["follows"] and row["hangs_on"] == ["nudge-3"]
    assert script.verdict("a", row).endswith("; not without nudge-3")
    assert script.compare(curves(2.3, 2.3), {})["hangs_on"] == []


def test_a_nudge_is_a_rounding_of_bfloat16(script: Any) -> None:
    weights = torch.randn(64, 64)
    one, again, other = (weights.clone() for _ in range(3))
    for each, seed in ((one, 1), (again, 1), (other, 2)):
        script.nudge([each], seed)
    assert torch.equal(one, again) and not torch.equal(one, other)
    moved = ((one - weights) / weights).abs()
    assert 0.9 * 2**-9 < moved.max() <= 1.001 * 2**-9
    # some of them are other numbers of bfloat16 now
    assert 0.1 < (one.bfloat16() != weights.bfloat16()).float().mean() < 0.3


def test_every_recipe_and_the_whole_get_a_verdict(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_one(recipe: str, way: str, asked: Namespace) -> list[float]:
        return curves(*([3.0 if recipe == "lrt-ssss" else 2.0] * 2))[way]

    out = tmp_path / "follow.json"
    monkeypatch.setattr(script, "run_one", run_one)
    monkeypatch.setattr(sys, "argv", ["follow.py", "--device", "cpu", "--out", str(out)])
    assert script.main() == 1
    *lines, last = capsys.readouterr().out.splitlines()
    told = [line for line in lines if ": at most 0.0000 from a plain run, which are up to 0.0400 apart" in line]
    assert len(told) == len(RECIPES) - 1
    assert lines[-1] == f"kernels follow in {len(RECIPES) - 1} of {len(RECIPES)} recipes; not in lrt-ssss"
    for told in (json.loads(last), json.loads(out.read_text())):
        assert told["follows"] is False
        assert [name for name, row in told["recipes"].items() if not row["follows"]] == ["lrt-ssss"]
