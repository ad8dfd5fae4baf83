"""`benchmarks/same_weights.py` says how far kernels are from float32, by numbers made up and by those of a tiny run."""

import math
from argparse import Namespace
from typing import Any

import pytest
import torch

from tests.scripts import load_script


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("benchmarks/same_weights.py")


def test_the_distance_is_over_all_parameters(script: Any) -> None:
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    found = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([[4.4]])}
    assert script.apart(found, exact) == pytest.approx(0.5 / 5)
    assert script.apart(exact, exact) == 0


@pytest.mark.parametrize(("fast", "serves"), [(0.1, True), (0.109, True), (0.111, False), (math.nan, False)])
def test_kernels_serve_where_they_are_as_near(script: Any, fast: float, serves: bool) -> None:
    rows = [
        {
            "step": step,
            "loss": 2.0,
            "fast_loss": 0.1,
            "plain_loss": 0.1,
            "fast_gradient": fast + off,
            "plain_gradient": 0.1,
        }
        for step, off in ((0, 0.01), (1, -0.01))
    ]
    found = script.summary(rows)
    assert found["serves"] is serves and found["rows"] == rows and found["plain_gradient"] == pytest.approx(0.1)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_the_same_precision_is_at_no_distance_and_training_goes_on(
    precision: str, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = script.sys.modules["follow"]
    for name, value in {"DEPTH": 1, "WIDTH": 64, "CONTEXT": 16, "WINDOW": 8}.items():
        monkeypatch.setattr(follow, name, value)
    asked = Namespace(steps=4, rows=4, precision=precision, device="cpu")
    rows = script.one("maglev-shared-0.1", asked, torch.device("cpu"))
    assert [row["step"] for row in rows] == [0, 1, 2] and len({row["loss"] for row in rows}) == 3
    if precision == "float32":
        apart = [row[f"{way}_{what}"] for row in rows for way in ("fast", "plain") for what in ("loss", "gradient")]
        assert apart == [0] * 12
    else:
        assert all(1e-4 < row["plain_gradient"] < 0.5 for row in rows)
