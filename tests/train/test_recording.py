"""Recorded passes: the same run, from graphs. On a CPU a function that is called again plays a graph."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from maglev.bench import train_worker
from maglev.bench.train import train_plan
from maglev.bench.train_worker import Order
from maglev.errors import RequestError
from maglev.objectives.losses import WHOLE_ROWS
from maglev.train import launch, passes, recording
from maglev.train.recording import Inputs, Recorder
from tests.helpers import random_tokens, small
from tests.small_runs import FAST, SMALL, Unwatched, assert_same_tensors, losses_of

pytestmark = pytest.mark.usefixtures("without_speed")
CLOSED = {"objective.rollout_start": 0.5, "train.steps": 8, "train.rows_per_pass": 2}


def train(recipe: str, data: Path, run: Path, settings: dict[str, Any]) -> list[str]:
    watch = Unwatched()
    launch.train(recipe, data, run, watch, depth=1, settings=SMALL | FAST | settings, resume=False)
    return watch.lines


def play(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Callable[[], None]]:
    losses = torch.zeros(3, dtype=torch.float64)

    def replay() -> None:
        losses.copy_(work())

    return losses, replay


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "capture", play)
    monkeypatch.setattr(
        passes, "Recorder", lambda objective, wanted, possible, say: Recorder(objective, "on", True, say)
    )


def assert_same_run(one: Path, other: Path) -> None:
    assert losses_of(one) == losses_of(other)
    assert_same_tensors(one, other)


@pytest.mark.parametrize("settings", [{}, {"data.document_mask": True, "data.memory_reset": True}])
def test_a_recorded_run_is_the_same_run(
    data: Path, tmp_path: Path, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    chosen = CLOSED | settings
    assert not any("recorded" in line for line in train("maglev-closed", data, tmp_path / "plain", chosen))
    request.getfixturevalue("played")
    said = train("maglev-closed", data, tmp_path / "recorded", chosen)
    # once before and once from the step on from which there are rollouts
    assert len([line for line in said if "passes are recorded as CUDA graphs" in line]) == 2
    assert_same_run(tmp_path / "plain", tmp_path / "recorded")


def test_no_pass_of_the_first_step_is_recorded(data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of four in a step."""
    one, two = ({"train.rows_per_pass": 1, "train.steps": steps} for steps in (1, 2))
    train("maglev-shared-0.1", data, tmp_path / "plain", two)
    request.getfixturevalue("played")
    assert not any("recorded" in line for line in train("maglev-shared-0.1", data, tmp_path / "one", one))
    said = train("maglev-shared-0.1", data, tmp_path / "two", two)
    assert any("passes are recorded as CUDA graphs" in line for line in said)
    assert_same_run(tmp_path / "plain", tmp_path / "two")


@pytest.mark.usefixtures("played")
def test_a_benchmark_times_steps_after_the_one_that_is_recorded() -> None:
    """With one pass in a step, the fourth."""
    plan = train_plan(True, recipes=("swa-ssss",), context=32, rows=2, tokens=64)
    order = Order("swa-ssss", 1, [plan.settings()], steps=1, device="cpu", quick=True, began=0.0, split=False)
    (row,) = train_worker.work(order)["rows"]
    assert row["recorded"] and row["steps_timed"] == 1


@pytest.mark.usefixtures("played")
def test_a_graph_that_cannot_be_recorded_is_told_and_the_run_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(work: Callable[[], Tensor], device: torch.device) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    train("maglev-closed", data, tmp_path / "plain", CLOSED)
    monkeypatch.setattr(recording, "capture", fail)
    said = train("maglev-closed", data, tmp_path / "failed", CLOSED)
    told = "passes are not recorded: RuntimeError: operation not permitted when stream is capturing"
    assert [line for line in said if "recorded" in line] == [told]
    assert_same_run(tmp_path / "plain", tmp_path / "failed")


@pytest.mark.parametrize(("share", "recorded"), [(0.79, False), (0.81, True)])
def test_passes_are_recorded_where_asking_for_them_takes_nearly_all_of_their_time(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, recorded: bool
) -> None:
    """A clock that goes from 0 to `share` while Python asks, and to 1 while the GPU works."""
    ticks = iter([0.0, share, 1.0] * 1000)
    monkeypatch.setattr(recording, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(recording, "clock", lambda device: next(ticks))
    monkeypatch.setattr(recording, "capture", play)
    monkeypatch.setattr(
        passes, "Recorder", lambda objective, wanted, possible, say: Recorder(objective, wanted, True, say)
    )
    said = train("maglev-shared-0.1", data, tmp_path / "run", {"train.rows_per_pass": 2})
    assert any("passes are recorded" in line for line in said) is recorded


@pytest.mark.usefixtures("played")
def test_where_a_recorded_pass_leaves_too_little_memory_there_is_none(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("maglev-closed", data, tmp_path / "plain", CLOSED)
    monkeypatch.setattr(recording, "free_memory", lambda device: 1000.0)
    said = train("maglev-closed", data, tmp_path / "full", CLOSED)
    told = "passes are not recorded: one would leave too little memory for the rest of a step"
    assert [line for line in said if "recorded" in line] == [told]
    assert_same_run(tmp_path / "plain", tmp_path / "full")


def test_nothing_of_earlier_passes_is_met_while_one_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that adds up gradients runs on the stream that it was made on. It lives as long as a pass's graph, which
    compilation leaves in a cycle."""
    objective = small("swa-ssss")
    weight = objective.decoder.embedding.weight
    tokens = random_tokens(2, 8)
    inputs = Inputs(tokens, tokens, WHOLE_ROWS, torch.ones((), dtype=torch.float64))
    found: list[bool] = []

    def work(given: Inputs) -> Tensor:
        total = objective(given.tokens, given.targets).total
        metadata = get_gradient_edge(weight).node.metadata
        found.append("old" in metadata)
        metadata["old"] = True
        cycle: list[Any] = [total]
        cycle.append(cycle)
        total.backward()
        return torch.zeros(3, dtype=torch.float64)

    monkeypatch.setattr(recording, "capture", lambda work, device: (work(), lambda: None))
    recorder = Recorder(objective, "on", True, lambda line: None)
    recorder.first_step = False
    gc.disable()
    try:
        for _ in range(recording.TIMED + 2):
            recorder.run(inputs, work)
    finally:
        gc.enable()
    assert recorder.holds and found == [False, *[True] * recording.TIMED, False]


def test_graphs_are_refused_where_there_are_none_and_leave_no_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"train.graphs is on, which takes a CUDA GPU.*; set it to auto"):
        train("swa-ssss", data, tmp_path / "run", {"train.graphs": "on", "train.device": "cpu"})
    train("swa-ssss", data, tmp_path / "run", {"train.device": "cpu", "train.steps": 1})


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["swa-ssss", "transformer-slsl", "lrt-ssss", "maglev-shared-0.1", "maglev-closed"])
def test_graphs_on_a_gpu_give_the_losses_of_passes_one_by_one(data: Path, tmp_path: Path, recipe: str) -> None:
    chosen = {"train.steps": 8, "train.rows_per_pass": 2, "model.width": 128, "train.device": "cuda"}
    chosen |= {"objective.rollout_start": 0.5} if recipe == "maglev-closed" else {}
    said = train(recipe, data, tmp_path / "on", chosen | {"train.graphs": "on"})
    assert [line for line in said if "not recorded" in line] == []
    assert any("passes are recorded as CUDA graphs" in line for line in said)
    train(recipe, data, tmp_path / "off", chosen | {"train.graphs": "off"})
    for one, other in zip(losses_of(tmp_path / "on"), losses_of(tmp_path / "off"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
