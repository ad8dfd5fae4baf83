"""Every option of the paper's open questions trains in the one loop and ends as a decoder that steps as it reads."""

import math
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import maglev
from maglev.checkpoint import newest
from maglev.data.shards import open_data
from maglev.evaluate.runs import load_objective
from maglev.model.init import initialise
from maglev.model.memory import shift_right
from maglev.model_config import InjectionKind
from maglev.objectives.losses import next_token_loss
from maglev.ops.inject import gate
from maglev.runs import read_metrics
from maglev.train import launch
from maglev.train.setup import start_from
from maglev.train.task import Text
from tests.helpers import batch_of, step_through
from tests.small_runs import FAST, SMALL, Unwatched, assert_same_tensors, losses_of

SEPARATE, CLOSED = "maglev-separate-0.1", "maglev-closed"
TEXT = "The quick brown fox jumps over the lazy dog, and on it goes."


def trained_run(recipe: str, data: Path, run: Path, settings: dict[str, Any], depth: int = 2) -> dict[str, Any]:
    """Train, then show that the loss fell and that the loaded decoder holds the recurrence identity. -> validation"""
    chosen = SMALL | FAST | {"model.width": 64, "train.validate_every": 6} | settings
    launch.train(recipe, data, run, Unwatched(), depth=depth, settings=chosen)
    rows = read_metrics(run)
    losses = [row["next_token_loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.1
    assert_steps_as_it_passes(run)
    (validation,) = [row for row in rows if row["kind"] == "validation"]
    assert all(math.isfinite(validation[key]) for key in ("bpb_recurrent", "contraction_pass", "contraction_step"))
    return validation


def assert_steps_as_it_passes(run: Path) -> None:
    """The recurrence identity of what was stored."""
    lm = maglev.load(run, dtype=torch.float64)
    tokens = torch.tensor([lm.tokenizer.encode(TEXT)])
    stepped = step_through(lm.decoder, tokens)
    with torch.no_grad():
        parallel = lm.decoder(tokens, shift_right(stepped))
    torch.testing.assert_close(parallel, stepped, rtol=0, atol=1e-10)
    read, step = lm.read(TEXT), lm.read(TEXT, method="step")
    torch.testing.assert_close(read.memory, step.memory, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "injection", [*get_args(InjectionKind)[1:], "shared_kv+layer_residual", "shared_kv+cross_attention"]
)
def test_injections(injection: str, data: Path, tmp_path: Path) -> None:
    settings = {"model.injection": injection, "model.heads": 2, "model.kv_heads": 1}
    validation = trained_run("maglev-shared-0.1", data, tmp_path / "run", settings)
    # how much of K/V is memory is told where it is mixed in
    assert len(validation["memory_share"]) == (2 if "_kv" in injection else 0)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        (SEPARATE, {"objective.prefiller_pattern": "L", "objective.prefiller_depth": 3}),
        (SEPARATE, {"objective.prefiller_width": 128}),
        (SEPARATE, {"objective.sharing": "none", "objective.prefiller_width": 64, "objective.prefiller_depth": 1}),
        (SEPARATE, {"objective.sharing": "embedding,attention"}),
        (SEPARATE, {"objective.sharing": "mlp,0"}),
        (CLOSED, {"objective.sharing": "embedding", "objective.prefiller_depth": 3}),
        (CLOSED, {"objective.sharing": "none", "objective.prefiller_width": 128}),
        (CLOSED, {"objective.prefiller_depth": 1}),
    ],
    ids=str,
)
def test_prefillers(recipe: str, settings: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Strength of Q against that of P, and what the two share; a resumed run goes on to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert "bpb_lifted" in trained_run(recipe, data, whole, settings)
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "step-00000006")
    chosen = SMALL | FAST | {"model.width": 64, "train.validate_every": 6} | settings
    launch.train(recipe, data, parts, Unwatched(), depth=2, settings=chosen, resume=True)
    assert_same_tensors(whole, parts)


@pytest.mark.parametrize("injection", [*get_args(InjectionKind), "shared_kv+layer_residual"])
def test_an_swa_as_the_start(injection: str, data: Path, tmp_path: Path) -> None:
    """Its weights are taken, gates begin neutral, and the loss goes on from where the SWA ended."""
    swa, run = tmp_path / "swa", tmp_path / "run"
    shape = {"model.width": 64, "model.heads": 2}
    launch.train("swa-ssss", data, swa, Unwatched(), depth=2, settings=SMALL | FAST | shape)
    given = SMALL | shape | {"model.injection": injection, "train.init_from": str(swa), "train.steps": 1}
    launch.train("maglev-shared-0.1", data, run, Unwatched(), depth=2, settings=given)
    config, objective, _ = load_objective(run, torch.device("cpu"), pytest.fail)
    initialise(objective, config.train.seed)
    missing = start_from(objective, swa, newest(swa, pytest.fail), Text(open_data(data)), pytest.fail)
    theirs = load_objective(swa, torch.device("cpu"), pytest.fail)[1].decoder
    own = {name.removeprefix("decoder.") for name in missing if name.startswith("decoder.")}
    assert own == set(objective.decoder.state_dict()) - set(theirs.state_dict())
    gates = [parameter for name, parameter in objective.decoder.named_parameters() if "_gate" in name]
    assert all((gate(parameter) == 1).all() for parameter in gates)
    tokens, targets = batch_of(2, 32, vocab=300)
    lifted = objective(tokens, targets)
    memory = theirs(tokens)
    if injection in ("residual", "layer_residual", "cross_attention"):
        torch.testing.assert_close(objective.lifted(tokens)[0], memory, rtol=0, atol=1e-5)
    else:
        assert abs(lifted.next_token - next_token_loss(theirs, memory, targets)) < 0.5
    assert losses_of(run)[0][1] < losses_of(swa)[0][1] - 0.1
    assert_steps_as_it_passes(run)
