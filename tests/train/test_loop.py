"""One step after another: losses that fall, steps that are skipped, passes that add up, what is written down."""

import json
import math
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from maglev import checkpoint
from maglev.config import DataConfig
from maglev.data.loader import Loader
from maglev.data.shards import open_data
from maglev.errors import RequestError, WorkError
from maglev.evaluate.bpb import bits_per_byte
from maglev.evaluate.runs import load_objective
from maglev.model.accounting import objective_flops
from maglev.objectives.closed_loop import ClosedLoopObjective
from maglev.objectives.losses import Losses
from maglev.objectives.maglev import MaglevObjective
from maglev.runs import read_config, read_metrics
from maglev.train import launch, loop, schedule
from maglev.train.loop import Trainer
from maglev.train.optimizer import Optimizer
from maglev.train.signals import Interruption
from tests.helpers import ALL_RECIPES
from tests.small_runs import FAST, SMALL, Unwatched, assert_same_tensors, flip_byte, losses_of, tensors_of

pytestmark = pytest.mark.usefixtures("without_speed")


def train(recipe: str, data: Path, run: Path, settings: dict[str, Any], resume: bool = False) -> list[str]:
    """Run to the end; what was said."""
    watch = Unwatched()
    launch.train(recipe, data, run, watch, depth=1, settings=SMALL | settings, resume=resume)
    return watch.lines


def train_rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row["kind"] == "train"]


@pytest.mark.parametrize("recipe", ["swa-ssss", "lrt-ssss", "maglev-shared-0.1"])
def test_the_loss_of_a_batch_seen_again_and_again_falls(
    recipe: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "rows_of", lambda self, step: range(4))
    train(recipe, data, tmp_path / "run", FAST | {"train.steps": 40, "train.checkpoint_every": 40})
    losses = [loss for _, loss, _ in losses_of(tmp_path / "run")]
    assert losses[0] == pytest.approx(math.log(300), abs=0.1)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_rows_per_pass_do_not_change_the_losses(recipe: str, data: Path, tmp_path: Path) -> None:
    found = {}
    for rows in (4, 2, 1):
        run = tmp_path / str(rows)
        settings = FAST | {"train.rows_per_pass": rows, "train.steps": 4, "train.checkpoint_every": 4}
        train(recipe, data, run, settings)
        found[rows] = np.array(losses_of(run))
    np.testing.assert_allclose(found[2], found[4], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found[1], found[4], rtol=0, atol=1e-5)


class LastRows(Trainer):
    """Every step has the last four rows of an epoch, of which one is padded."""

    def rows_of(self, step: int) -> range:
        end = self.loader.rows_per_epoch
        return range(end - 4, end)


# LRT's loss is a mean over passes of means over each pass's own targets, which padding divides unevenly
@pytest.mark.parametrize("recipe", [name for name in ALL_RECIPES if not name.startswith("lrt")])
def test_a_padded_row_weighs_what_it_holds(
    recipe: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(open_data(data), "train", 32, seed=0)
    held = (loader.batch([loader.rows_per_epoch - 1]).targets >= 0).sum()
    assert 0 < held < 32
    monkeypatch.setattr(launch, "Trainer", LastRows)
    found = {}
    for rows in (4, 1):
        settings = FAST | {"train.rows_per_pass": rows, "train.steps": 3, "train.checkpoint_every": 3}
        train(recipe, data, tmp_path / str(rows), settings)
        found[rows] = train_rows(tmp_path / str(rows))
    assert found[1][0]["gradient_norm"] == pytest.approx(found[4][0]["gradient_norm"], rel=1e-5)
    for one, four in zip(found[1], found[4], strict=True):
        for name in ("total_loss", "next_token_loss", "consistency_loss"):
            assert one[name] == pytest.approx(four[name], abs=1e-5), name
        assert one["tokens"] == four["tokens"] == (96 + held) * one["step"]


def poison(steps: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loss of these steps NaN (`loss`), or its gradient alone (`gradient`)."""
    plain, count = MaglevObjective.forward, [0]

    class BadGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * math.inf

    def forward(self: MaglevObjective, *arguments: Any) -> Losses:
        count[0] += 1
        losses = plain(self, *arguments)
        kind = steps.get(count[0], "")
        if kind == "loss":
            return replace(losses, total=losses.total * math.nan, next_token=losses.next_token * math.nan)
        if kind == "gradient":
            return replace(losses, total=BadGradient.apply(losses.total))
        return losses

    monkeypatch.setattr(MaglevObjective, "forward", forward)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_counted_and_kept(
    kind: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"train.checkpoint_every": 1, "train.keep_checkpoints": 9, "train.log_every": 10} | FAST
    poison({3: kind}, monkeypatch)
    said = train("maglev-shared-0.1", data, tmp_path / "run", every)
    assert [line for line in said if "step 3" in line and "not finite" in line]
    tensors = {step: checkpoint_tensors(tmp_path / "run", step) for step in (2, 3, 4)}
    assert all(torch.equal(tensors[2][name], tensors[3][name]) for name in tensors[2])
    assert not all(torch.equal(tensors[3][name], tensors[4][name]) for name in tensors[3])
    # log_every would leave the row out
    rows = {row["step"]: row for row in train_rows(tmp_path / "run")}
    assert list(rows) == [3, 6]
    assert rows[3]["skipped"] is True and rows[6]["skipped"] is False and rows[6]["bad_steps"] == 1
    assert rows[3]["gradient_norm"] is None and (rows[3]["next_token_loss"] is None) == (kind == "loss")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    kept = load_file(tmp_path / "run" / "bad-batches" / "step-00000003-rank-0.safetensors")
    assert set(kept) == {"tokens", "targets", "starts"} and kept["tokens"].shape == (4, 32)


def checkpoint_tensors(run: Path, step: int) -> dict[str, Tensor]:
    folder = checkpoint.checkpoint_folder(run, step)
    found = checkpoint.Checkpoint(folder, step, {}, frozenset({"decoder", "prefiller", "optimizer"}))
    return {f"{stem}/{name}": t for stem in found.stems for name, t in found.tensors(stem).items()}


def test_the_kept_batch_is_the_one_that_failed(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison({2: "loss"}, monkeypatch)
    train("maglev-shared-0.1", data, tmp_path / "run", {"train.steps": 2})
    kept = load_file(tmp_path / "run" / "bad-batches" / "step-00000002-rank-0.safetensors")
    expected = Loader(open_data(data), "train", 32, seed=0).batch(range(4, 8))
    for name, array in expected._asdict().items():
        np.testing.assert_array_equal(kept[name], array)


def test_too_many_bad_steps_in_a_row_end_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single ones do not add up, and no older checkpoint is removed while the weights are in doubt."""
    poison(dict.fromkeys((2, 4, 5, 7, 8, 9), "loss"), monkeypatch)
    settings = {"train.steps": 20, "train.max_bad_steps": 3, "train.checkpoint_every": 1, "train.keep_checkpoints": 1}
    with pytest.raises(WorkError, match="3 steps in a row, up to step 9") as stopped:
        train("maglev-shared-0.1", data, tmp_path / "run", settings)
    assert "bad-batches" in str(stopped.value)
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path / "run")] == [6, 7, 8]
    assert [row["bad_steps"] for row in train_rows(tmp_path / "run")] == [0, 1, 1, 2, 3, 3, 4, 5, 6]


def test_a_learning_rate_that_explodes_stops_the_run(data: Path, tmp_path: Path) -> None:
    huge = {"optimizer.matrix_lr": 1e30, "optimizer.embedding_lr": 1e30, "optimizer.readout_lr": 1e38}
    with pytest.raises(WorkError, match="not finite 2 steps in a row"):
        train("swa-ssss", data, tmp_path / "run", huge | {"train.steps": 12, "train.max_bad_steps": 2})


def test_rows_name_their_memory_source(data: Path, tmp_path: Path) -> None:
    for recipe, memory, keys in (
        ("swa-ssss", "none", {"bpb_recurrent"}),
        ("lrt-ssss", "refined", {"bpb_recurrent", "bpb_refined"}),
        ("maglev-shared-0.1", "lifted", {"bpb_recurrent", "bpb_lifted", "bpb_recurrent_minus_lifted"}),
    ):
        run = tmp_path / recipe
        said = train(recipe, data, run, {"train.validate_every": 4})
        rows = read_metrics(run)
        assert {row["memory"] for row in rows if row["kind"] == "train"} == {memory}
        validation = [row for row in rows if row["kind"] == "validation"]
        assert [row["step"] for row in validation] == [4, 6]
        assert all({key for key in row if key.startswith("bpb")} == keys for row in validation)
        assert sum("bits per byte recurrent" in line for line in said) == 2
        for row in validation:
            assert ("contraction_pass" in row) == ("contraction_step" in row) == (memory != "none")
            assert len(row.get("memory_share", [])) == (memory != "none")
        if memory == "lifted":
            apart = [row["bpb_recurrent"] - row["bpb_lifted"] for row in validation]
            assert [row["bpb_recurrent_minus_lifted"] for row in validation] == apart


def test_validation_changes_nothing_and_comes_after_the_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = "maglev-shared-0.1"
    train(recipe, data, tmp_path / "without", FAST)
    train(recipe, data, tmp_path / "with", FAST | {"train.validate_every": 1})
    assert losses_of(tmp_path / "with") == losses_of(tmp_path / "without")
    assert_same_tensors(tmp_path / "with", tmp_path / "without")

    def crash(*arguments: Any, **named: Any) -> None:
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr("maglev.train.task.bits_per_byte", crash)
        with pytest.raises(ArithmeticError):
            train(recipe, data, tmp_path / "crashed", FAST | {"train.validate_every": 4})
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path / "crashed")] == [2, 4]
    # what was missed is made up for, and what is done is not done again
    train(recipe, data, tmp_path / "crashed", FAST | {"train.validate_every": 4}, resume=True)
    rows = [row["step"] for row in read_metrics(tmp_path / "crashed") if row["kind"] == "validation"]
    assert rows == [4, 6]
    assert_same_tensors(tmp_path / "crashed", tmp_path / "without")


def test_validation_rows_that_cannot_be_read_are_told_before_the_first_step(data: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "data"
    shutil.copytree(data, damaged)
    flip_byte(next(damaged.glob("validation-*.tokens.npy")))
    with pytest.raises(WorkError, match=r"validation-00000\.tokens\.npy: damaged"):
        train("swa-ssss", damaged, tmp_path / "run", {"train.validate_every": 6})
    assert losses_of(tmp_path / "run") == []
    train("swa-ssss", damaged, tmp_path / "run", {"train.validate_every": 0}, resume=True)
    assert len(losses_of(tmp_path / "run")) == 6


def test_seconds_and_tokens_add_up_over_a_resume(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train("swa-ssss", data, run, {})
    rows = train_rows(run)
    assert [row["tokens"] for row in rows] == [128 * step for step in range(1, 7)]
    steps = np.diff([0.0, *(row["seconds"] for row in rows)])
    np.testing.assert_allclose(steps, [128 / row["tokens_per_second"] for row in rows], rtol=1e-6)
    before = (run / "metrics.jsonl").read_bytes()
    remove_newest(run)
    train("swa-ssss", data, run, {}, resume=True)
    again = train_rows(run)
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6]
    assert (run / "metrics.jsonl").read_bytes().splitlines()[:4] == before.splitlines()[:4]
    assert again[-1]["tokens"] == rows[-1]["tokens"]
    assert all(later["seconds"] > earlier["seconds"] for earlier, later in pairwise(again))


def remove_newest(run: Path) -> None:
    shutil.rmtree(checkpoint.list_checkpoints(run)[-1][1])


def test_a_signal_is_seen_before_the_first_step_and_during_validation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Interruption()
    monkeypatch.setattr(launch, "interruption", lambda: nullcontext(noted))
    noted.signal = 15
    settings = SMALL | {"train.validate_every": 3}
    watch = Unwatched()
    summary = launch.train("swa-ssss", data, tmp_path / "run", watch, depth=1, settings=settings)
    assert (summary["signal"], summary["step"], summary["finished"]) == (15, 0, False)
    assert "stopped at step 0 and saved" in watch.lines[-1]

    noted.signal = 0
    monkeypatch.setattr(Trainer, "validate", lambda self: setattr(noted, "signal", 2))
    summary = launch.train("swa-ssss", data, tmp_path / "run", watch, depth=1, settings=settings, resume=True)
    assert (summary["signal"], summary["step"]) == (2, 3)
    assert [step for step, _ in checkpoint.list_checkpoints(tmp_path / "run")] == [2, 3]
    # a signal after the last step does not spoil a run that is done
    noted.signal = 0
    monkeypatch.setattr(Trainer, "validate", lambda self: None)
    plain = Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self: (plain(self), setattr(noted, "signal", 15))[0])
    done = SMALL | {"train.checkpoint_every": 6}
    summary = launch.train("swa-ssss", data, tmp_path / "run", watch, depth=1, settings=done, resume=True)
    assert (summary["signal"], summary["step"], summary["finished"]) == (0, 6, True)


def test_bfloat16_and_other_settings_train_on_a_cpu(data: Path, tmp_path: Path) -> None:
    settings = {"train.precision": "bfloat16", "data.document_mask": "true", "data.memory_reset": "true"}
    for recipe in ("maglev-shared-0.1", "lrt-slsl"):
        run = tmp_path / recipe
        train(recipe, data, run, settings | {"train.validate_every": 6})
        assert len(losses_of(run)) == 6
        assert {tensor.dtype for name, tensor in tensors_of(run).items() if name.startswith("decoder")} == {
            torch.float32
        }


@pytest.mark.parametrize("recipe", ["swa-ssss", "lrt-ssss", "maglev-shared-0.1"])
def test_rounding_alone_moves_no_scale(recipe: str, data: Path, tmp_path: Path) -> None:
    """At first the gradient of a scale is rounding, which AdamW would make a whole step of."""
    scales = {}
    for precision in ("float32", "bfloat16"):
        run = tmp_path / precision
        train(recipe, data, run, FAST | {"train.steps": 1, "train.precision": precision})
        _, objective, _ = load_objective(run, torch.device("cpu"), print)
        named = objective.named_parameters()
        scales[precision] = {name: tensor for name, tensor in named if name.endswith("_scale")}
    assert len(scales["float32"]) >= 2
    for name, exact in scales["float32"].items():
        assert torch.equal(scales["bfloat16"][name], exact)


def test_tokens_per_step_must_divide_into_rows(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="is 100, not a multiple of the context 32; set it to 96"):
        train("swa-ssss", data, tmp_path / "run", {"train.tokens_per_step": 100})


def test_the_tensorboard_of_a_resumed_run_has_each_step_once(data: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run, settings = tmp_path / "run", {"train.tensorboard": "true", "train.validate_every": 6}
    train("maglev-shared-0.1", data, run, settings)
    remove_newest(run)
    train("maglev-shared-0.1", data, run, settings, resume=True)
    files = sorted((run / "tensorboard").iterdir())
    assert len(files) == 2
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    seen = events.Scalars("train/next_token_loss")
    assert [event.step for event in seen] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in seen] == pytest.approx([loss for _, loss, _ in losses_of(run)])
    assert [event.step for event in events.Scalars("validation/bpb_lifted")] == [6]
    # lists, too: what is left of a disturbance, and a share of every layer
    (validation,) = [row for row in read_metrics(run) if row["kind"] == "validation"]
    for name in ("disturbance_left", "memory_share"):
        shown = [events.Scalars(f"validation/{name}/{place}")[0].value for place in range(len(validation[name]))]
        assert shown and shown == pytest.approx(validation[name])
    # resuming what is finished opens no further file
    train("maglev-shared-0.1", data, run, settings, resume=True)
    assert sorted((run / "tensorboard").iterdir()) == files


def test_without_tensorboard_a_line_says_so(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = train("swa-ssss", data, tmp_path / "run", {"train.tensorboard": "true"})
    assert any("tensorboard is not installed" in line for line in said)
    assert not (tmp_path / "run" / "tensorboard").exists() and len(losses_of(tmp_path / "run")) == 6


def test_every_line_of_metrics_is_json(data: Path, tmp_path: Path) -> None:
    train("swa-ssss", data, tmp_path / "run", {"train.validate_every": 2})
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_mfu_is_three_forward_passes_over_the_measured_rate(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "matrix_rate", lambda device, dtype: 1e15)
    train("maglev-shared-0.1", data, tmp_path / "run", FAST)
    forward = objective_flops(read_config(tmp_path / "run"))
    for row in train_rows(tmp_path / "run"):
        assert row["mfu"] == pytest.approx(3 * forward * row["tokens_per_second"] / 1e15)


def test_mfu_is_never_above_one(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that was measured beside other work may be too low."""
    monkeypatch.setattr(loop, "matrix_rate", lambda device, dtype: 1.0)
    train("swa-ssss", data, tmp_path / "run", FAST)
    assert all(0 < row["mfu"] <= 1 for row in train_rows(tmp_path / "run"))


def test_every_step_gets_the_schedules_of_its_index(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume, which goes on where the schedule was."""
    seen = []
    step = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", lambda self, *given: (seen.append(given), step(self, *given))[1])
    settings = FAST | {"train.steps": 6, "train.checkpoint_every": 3, "optimizer.warmup_steps": 2}
    train("swa-ssss", data, tmp_path / "run", settings)
    config = read_config(tmp_path / "run").optimizer
    expected = [
        (schedule.lr_scale(n, 6, config), schedule.muon_momentum(n), schedule.weight_decay_scale(n, 6))
        for n in range(6)
    ]
    assert seen == expected and len(set(expected)) == 6
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000006")
    train("swa-ssss", data, tmp_path / "run", settings, resume=True)
    assert seen[6:] == expected[3:]


def test_every_step_tells_the_objective_how_far_training_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    forward = ClosedLoopObjective.forward
    monkeypatch.setattr(
        ClosedLoopObjective, "forward", lambda self, *given: (seen.append(self.progress), forward(self, *given))[1]
    )
    settings = FAST | {"train.steps": 4, "train.checkpoint_every": 2, "train.rows_per_pass": 4}
    train("maglev-closed", data, tmp_path / "run", settings)
    assert seen == [0, 0.25, 0.5, 0.75]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    train("maglev-closed", data, tmp_path / "run", settings, resume=True)
    assert seen[4:] == [0.5, 0.75]


@pytest.mark.parametrize("setting", ["data.document_mask", "data.memory_reset"])
def test_document_settings_reach_training_and_validation(
    setting: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(open_data(data), "train", 32, seed=0)
    end = loader.rows_per_epoch
    assert any(len(np.unique(row)) > 1 for row in loader.batch(range(end - 4, end)).starts)
    monkeypatch.setattr(launch, "Trainer", LastRows)
    rows = {}
    for value in ("false", "true"):
        # large steps, so that memory comes to matter in a few of them
        settings = FAST | {"train.validate_every": 12, "train.validation_rows": 64, "train.steps": 12}
        settings |= {setting: value, "optimizer.matrix_lr": 2.0}
        train("maglev-shared-0.1", data, tmp_path / value, settings)
        rows[value] = read_metrics(tmp_path / value)
    last = {value: [row for row in found if row["kind"] == "train"][-1] for value, found in rows.items()}
    assert last["true"]["next_token_loss"] != last["false"]["next_token_loss"]
    # validation of the same weights depends on the setting too
    config, objective, _ = load_objective(tmp_path / "true", torch.device("cpu"), print)
    tokens = open_data(data)
    loader = Loader(tokens, "validation", config.model.context, seed=0)
    counts = tokens.tokenizer.token_byte_counts()
    found = {
        own: bits_per_byte(objective, loader, "recurrent", counts, rows=config.train.validation_rows, data=own).value
        for own in (config.data, DataConfig())
    }
    assert rows["true"][-1]["bpb_recurrent"] == pytest.approx(found[config.data], abs=1e-6)
    assert found[config.data] != pytest.approx(found[DataConfig()], abs=1e-6)
