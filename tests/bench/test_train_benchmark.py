"""What `bench train` counts and how it splits a step. What the times are is not a test's business."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from maglev.bench import train, train_worker
from maglev.bench.lines import Lines
from maglev.bench.trace import kinds_of_ops
from maglev.bench.train import BASELINE, COMPARED, growth, known_recipes, scaling_axes, summary, train_plan
from maglev.bench.train_worker import PARTS, Order, RandomTask, as_json, split_by_part
from maglev.config import RunConfig
from maglev.errors import RequestError, WorkError
from maglev.model.accounting import objective_flops
from maglev.recipes import run_config
from maglev.train.distributed import Ranks
from maglev.train.loop import Trainer

CPU = torch.device("cpu")


def order(recipe: str, **changed: Any) -> Order:
    plan = train_plan(True, recipes=(recipe,), context=32)
    return Order(recipe, 1, [plan.settings(**changed)], steps=1, device="cpu", quick=True, began=0.0)


@pytest.mark.parametrize("recipe", [BASELINE, "lrt-ssss", "maglev-shared-0.1"])
def test_every_part_of_the_trainers_own_step_is_found(recipe: str) -> None:
    asked = order(recipe)
    config = run_config(recipe, 1, asked.settings[0])
    trainer = Trainer(config, RandomTask(256), Path(), Ranks(0, 1, 0, CPU), Lines())
    before = trainer.objective.decoder.readout.weight.clone()
    times = split_by_part(trainer)
    assert set(times) == {*PARTS, "rest"}
    assert all(times[part] > 0 for part in PARTS if part != "prefiller")
    assert (times["prefiller"] > 0) == recipe.startswith("maglev")
    # a real step was made, and nothing of the marks is left
    assert trainer.progress.step == 1 and trainer.progress.tokens == config.train.tokens_per_step
    assert not torch.equal(trainer.objective.decoder.readout.weight, before)
    assert "run" not in vars(trainer.objective.decoder) and "forward" not in vars(trainer.objective)


def test_a_row_holds_what_was_run_and_its_counted_flops() -> None:
    found = train_worker.work(order("maglev-separate-1", train__recompute="full"))
    (row,) = found["rows"]
    config = run_config("maglev-separate-1", 1, order("maglev-separate-1").settings[0])
    assert (row["depth"], row["context"], row["window"], row["rows"]) == (1, 32, 8, 2)
    assert row["flops_per_token"] == 3 * objective_flops(config) and row["recompute"] == "full"
    assert row["tokens_per_s"] > 0 and row["loss_finite"] and row["ms_by_op"] == {} and row["peak_bytes"] is None
    assert row["steps_timed"] == 1
    assert row["least_seconds_per_step"] == row["seconds_per_step"] == row["largest_seconds_per_step"] > 0
    assert found["matrix_flops"] > 0 and found["dtype"] == "float32" and "plain PyTorch" in row["attention"]


def test_kernels_are_told_by_their_name_and_by_the_range_they_lie_in() -> None:
    def event(name: str, begin: float, length: float, category: str = "kernel") -> dict[str, Any]:
        return {"name": name, "ts": begin, "dur": length, "cat": category}

    events = [
        event("maglev.loss", 0, 90, "gpu_user_annotation"),
        event("maglev.decoder", 0, 50, "gpu_user_annotation"),
        event("maglev.optimizer", 200, 100, "gpu_user_annotation"),
        event("another range", 0, 300, "gpu_user_annotation"),
        event("nvjet_tst_128x256_64x4", 0, 10),
        event("triton_tem_fused_flex_attention_0", 10, 10),
        event("keys_kernel", 20, 10),
        event("triton_poi_fused_add_0", 30, 5),
        event("void elementwise_kernel<tanh>", 50, 10),
        event("triton_poi_fused_mul_1", 60, 10),
        event("sm90_xmma_gemm_bf16", 70, 10),
        event("Memcpy HtoD", 80, 10, "gpu_memcpy"),
        event("triton_red_fused_backward", 100, 50),
        event("cunn_SoftMaxBackward", 150, 10),
        event("nvjet_of_muon", 200, 100),
        event("aten::mm", 0, 500, "cpu_op"),
    ]
    times = kinds_of_ops(events)
    expected = {"matmul": 20, "attention": 20, "norm and elementwise": 55, "loss": 30, "optimizer": 100, "copies": 10}
    assert times == pytest.approx({name: us / 1e3 for name, us in (expected | {"idle": 65}).items()})
    assert not any(kinds_of_ops([]).values())


def test_the_summary_sets_each_model_beside_swa_and_what_its_flops_allow() -> None:
    rows: list[dict[str, Any]] = [
        {"recipe": BASELINE, "depth": 12, "tokens_per_s": 600.0, "flops_per_token": 10.0, "peak_bytes": 100},
        {"recipe": "maglev", "depth": 12, "tokens_per_s": 285.0, "flops_per_token": 20.0, "peak_bytes": 205},
        {"recipe": "maglev", "depth": 20, "tokens_per_s": 1.0, "flops_per_token": 20.0, "peak_bytes": 205},
    ]
    for row in rows:
        row["mfu"] = 0.5
    swa, maglev = summary(rows)
    assert swa["speed_by_swa"] == swa["of_allowed"] == 1
    assert maglev["allowed_by_flops"] == 0.5 and maglev["of_allowed"] == 0.95 and maglev["memory_by_swa"] == 2.05
    rows[0]["peak_bytes"] = rows[1]["peak_bytes"] = None
    assert summary(rows)[1]["memory_by_swa"] is None


def test_what_the_issue_asks_for_is_what_the_flops_allow() -> None:
    for depth, least in ((12, 0.515), (20, 0.487)):
        swa, maglev = (objective_flops(run_config(name, depth)) for name in (BASELINE, "maglev-shared-0.1"))
        assert 0.95 * swa / maglev == pytest.approx(least, abs=5e-4)


def test_each_axis_of_scaling_changes_one_size() -> None:
    plan = train_plan(scaling=True, context=1024, window=256, rows=8)
    axes = scaling_axes(plan)
    assert [each["train.rows_per_pass"] for each in axes["rows"]] == [2, 4, 8, 16]
    assert [each["model.depth"] for each in axes["layers"]] == [6, 12, 24, 48]
    assert [each["model.context"] for each in axes["context"]] == [512, 1024, 2048, 4096]
    for points in axes.values():
        assert {each["model.width"] for each in points} == {768} and {each["model.window"] for each in points} == {256}
        assert all(
            each["train.tokens_per_step"] == 4 * each["train.rows_per_pass"] * each["model.context"] for each in points
        )
    same = {"recipe": "a", "axis": "rows", "flops_per_token": 2}
    rows = [same | {"rows": n, "seconds_per_step": 3.0 * n, "tokens_per_step": n} for n in (1, 2, 4)]
    (found,) = growth(rows)
    assert found["larger"] == 2 and found["cost_by_size"] == 1 and found["flops_by_size"] == 1


def test_what_is_given_replaces_what_a_plan_has() -> None:
    plan = train_plan(depths=(4,), rows=None)
    assert plan.depths == (4,) and plan.tokens == 524_288 and plan.recipes == COMPARED
    assert [plan.settings("swa-ssss", depth)["train.rows_per_pass"] for depth in (12, 20)] == [32, 16]
    assert train_plan(rows=8).settings("swa-ssss", 20)["train.rows_per_pass"] == 8
    assert (plan.context, plan.window, plan.vocab_size) == (2048, 512, 32_768)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"depths": (0,)}, "--depth has 0"),
        ({"rows": -1}, "--rows has -1"),
        ({"steps": 0}, "--steps has 0"),
        ({"tokens": 1000}, "set it to 65536"),
        ({"window": 4096}, "larger than model.context"),
        ({"recompute": "some"}, "one of none, selective, full"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_runs(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        train_plan(**given)


def test_an_unknown_recipe_is_told_with_the_nearest() -> None:
    assert known_recipes("swa-ssss, lrt-ssss") == ("swa-ssss", "lrt-ssss")
    with pytest.raises(RequestError, match="did you mean 'swa-ssss'"):
        known_recipes("swa-sss")


def test_a_worker_that_fails_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "as_json", lambda order: as_json(order).replace('"cpu"', '"abacus"'))
    with pytest.raises(WorkError, match="abacus") as failed:
        train.run_worker(order(BASELINE))
    assert "\n" not in str(failed.value)


def test_a_worker_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "PATIENCE", 0.01)
    with pytest.raises(WorkError, match=r"stopped after 0\.01 s"):
        train.run_worker(order(BASELINE))


def test_every_worker_has_caches_of_its_own_that_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def run(*command: Any, env: dict[str, str], **options: Any) -> Any:
        folders = [env["TORCHINDUCTOR_CACHE_DIR"], env["TRITON_CACHE_DIR"]]
        assert all(Path(folder).parent.is_dir() for folder in folders)
        seen.extend(folders)
        return subprocess.CompletedProcess(command, 0, "{}", "")

    monkeypatch.setattr(subprocess, "run", run)
    train.run_worker(order(BASELINE))
    train.run_worker(order(BASELINE))
    assert len(set(seen)) == 4 and not any(Path(folder).parent.exists() for folder in seen)


def fail_for(monkeypatch: pytest.MonkeyPatch, *recipes: str) -> None:
    """As a process that ends badly does; the others are measured here."""

    def run_worker(order: Order) -> dict[str, Any]:
        if order.recipe in recipes:
            raise WorkError("no room")
        return train_worker.work(order)

    monkeypatch.setattr(train, "run_worker", run_worker)


def test_a_model_that_fails_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_for(monkeypatch, "lrt-ssss")
    plan = train_plan(True, recipes=("lrt-ssss", BASELINE), depths=(1,), context=32)
    kept: list[list[dict[str, Any]]] = []
    result = train.measure_train(plan, "cpu", lambda line: None, lambda found: kept.append(list(found["rows"])))
    failed, row = result["rows"]
    assert failed["error"] == "no room" and (failed["recipe"], failed["depth"]) == ("lrt-ssss", 1)
    assert "tokens_per_s" not in failed and "mfu" not in failed and row["mfu"] > 0
    assert [each["recipe"] for each in result["summary"]] == [BASELINE]
    # what there was after each of them
    assert kept == [[failed], [failed, row]]


def test_a_size_that_fails_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process; the largest context does not fit."""
    fail_for(monkeypatch, "lrt-ssss")
    figures = {"seconds_per_step": 1.0, "flops_per_token": 1.0, "flops_per_s": 1.0}

    def measure_point(config: RunConfig, *rest: Any) -> dict[str, Any]:
        if config.model.context == 64:
            raise torch.OutOfMemoryError("CUDA out of memory.\nand more")
        return train_worker.sizes_of(config) | figures

    monkeypatch.setattr(train_worker, "measure_point", measure_point)
    plan = train_plan(True, scaling=True, recipes=("lrt-ssss", BASELINE), depths=(1,), context=16)
    result = train.measure_scaling(plan, "cpu", lambda line: None)
    told = {(row["recipe"], row["context"], row["error"]) for row in result["rows"] if "error" in row}
    assert (BASELINE, 64, "OutOfMemoryError: CUDA out of memory.") in told and len(told) == 5
    assert {row["recipe"] for row in train.measured(result["rows"])} == {BASELINE}
    context = {each["axis"]: each for each in result["summary"]}["context"]
    assert context["recipe"] == BASELINE and context["larger"] == 2
