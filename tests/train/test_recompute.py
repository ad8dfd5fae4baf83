"""Recomputation changes what is kept, not what is computed; and how much is kept."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from maglev.objectives import Objective
from maglev.ops.inject import rms_norm
from maglev.ops.recompute import lean_norm
from maglev.recipes import run_config
from maglev.runs import read_metrics
from maglev.train import launch
from maglev.train.setup import build_for_training
from tests.helpers import ALL_RECIPES, batch_of, gradients, random_weights
from tests.scripts import load_script
from tests.small_runs import FAST, SMALL, Unwatched

CPU = torch.device("cpu")
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)


def built(recipe: str, recompute: str, compile: str = "off", products: str = "plain") -> Objective:
    settings = {"model.context": 24, "model.window": 8, "model.vocab_size": 61, "model.width": 32, "model.heads": 4}
    settings |= {"model.kv_heads": 2, "train.recompute": recompute, "train.compile": compile}
    objective = build_for_training(run_config(recipe, 2, settings | {"train.products": products}), CPU)
    if products == "plain":
        objective = objective.double()
        objective.decoder.embedding.compute_dtype = torch.float64
    random_weights(objective)
    return objective


def results(objective: Objective) -> dict[str, Tensor]:
    losses = objective(*batch_of(2, 24))
    return {"loss": losses.total.detach(), **gradients(losses.total, objective)}


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_gradients_are_those_of_keeping_everything(recipe: str, recompute: str) -> None:
    close(results(built(recipe, recompute)), results(built(recipe, "none")))


@pytest.mark.parametrize("recipe", ["lrt-slsl", "maglev-separate-0.1"])
def test_a_run_and_its_validation_are_the_same(recipe: str, data: Path, tmp_path: Path, without_speed: None) -> None:
    rows = {}
    for recompute in ("none", "selective", "full"):
        settings = SMALL | FAST | {"train.recompute": recompute, "train.validate_every": 3, "train.steps": 3}
        launch.train(recipe, data, tmp_path / recompute, Unwatched(), depth=1, settings=settings)
        rows[recompute] = read_metrics(tmp_path / recompute)
    for recompute in ("selective", "full"):
        for found, expected in zip(rows[recompute], rows["none"], strict=True):
            for name in expected.keys() & {"total_loss", "gradient_norm", "bpb_recurrent"}:
                assert found[name] == pytest.approx(expected[name], rel=1e-4), name


class Counted:
    """A compiler that stops short of code: graphs are split into forward and backward as the real one splits them,
    and run as they are. It counts their matrix products, in 8 bits or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.products = {"forward": 0, "backward": 0}
        backend = aot_autograd(
            fw_compiler=partial(self.count, "forward"),
            bw_compiler=partial(self.count, "backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        torch._dynamo.reset()
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    def count(self, direction: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        self.products[direction] += sum(map(called.count, PRODUCTS))
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize(
    ("recipe", "recompute", "spared"),
    [("maglev-shared-0.1", "selective", 0), pytest.param("lrt-ssss", "full", 2, marks=pytest.mark.soak)],
)
def test_gradients_in_compiled_blocks(
    recipe: str, recompute: str, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LRT's passes write down their K/V for one another; Maglev's gates and mix are what selecting is about. The zeros
    that LRT begins with want no gradient of their two projections."""
    expected = results(built(recipe, "none"))
    counted = Counted(monkeypatch).products
    close(results(built(recipe, recompute, "on")), expected)
    # no product is run again
    assert counted["forward"] >= 6 and counted["backward"] == 2 * counted["forward"] - spared


def test_no_product_in_8_bits_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results(built("swa-ssss", "none", products="fp8"))["loss"]
    counted = Counted(monkeypatch).products
    found = results(built("swa-ssss", "selective", "on", "fp8"))["loss"]
    assert counted["forward"] >= 6 and counted["backward"] == 2 * counted["forward"]
    # what is rounded to 8 bits may fall to another side
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)


def test_the_lean_norm_is_the_norm() -> None:
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(lean_norm(x), rms_norm(x))
    assert torch.autograd.gradcheck(lean_norm, x)
    zero = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.grad(lean_norm(zero).sum(), zero)[0].isfinite().all()


@pytest.fixture(scope="module")
def kept() -> Any:
    return load_script("benchmarks/kept.py")


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-separate-1"])
def test_two_passes_keep_little_more_than_twice_what_one_keeps(recipe: str, kept: Any) -> None:
    swa = kept.kept_bytes("swa-ssss", "none")
    assert kept.kept_bytes(recipe, "none") <= 2.05 * swa
    assert kept.kept_bytes(recipe, "selective") <= 1.6 * swa
    assert kept.kept_bytes(recipe, "full") <= 0.5 * swa


def test_the_compiler_keeps_less_too(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Counted(monkeypatch)
    swa = kept.kept_bytes("swa-ssss", "none", "on", depth=2)
    assert kept.kept_bytes("maglev-shared-0.1", "selective", "on", depth=2) <= 1.6 * swa


def test_the_benchmark_prints_a_line_per_model(
    kept: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kept, "WAYS", {"off": "plain PyTorch"})
    assert kept.main(["--quick"]) == 0
    *table, last = capsys.readouterr().out.strip().splitlines()
    rows = json.loads(last)["rows"]
    assert [row["recipe"] for row in rows] == ["swa-ssss", "maglev-shared-0.1"]
    assert len(table) == 2 + len(rows) and table[0] == "| | none | selective | full |"
    for row, line in zip(rows, table[2:], strict=True):
        assert row["recipe"] in line and row["bytes"]["none"] > row["bytes"]["selective"] > row["bytes"]["full"] > 0
