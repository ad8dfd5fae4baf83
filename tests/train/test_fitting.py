"""The micro-batch that fits: found by measuring, halved where memory runs out, named where the user fixed it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maglev import checkpoint
from maglev.data.loader import Batch
from maglev.errors import RequestError, WorkError
from maglev.objectives import Objective
from maglev.objectives.maglev import MaglevObjective
from maglev.recipes import run_config
from maglev.runs import read_metrics
from maglev.train import fitting, launch, loop, passes, setup
from maglev.train.fitting import divisors, find_rows, largest_divisor, smaller, sufficed
from maglev.train.optimizer import Optimizer
from maglev.train.passes import Passes, StepLosses
from maglev.train.recording import Inputs
from maglev.train.task import TextValidation
from tests.small_runs import FAST, SMALL, Unwatched, assert_same_tensors, losses_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("without_speed")


class FakeMemory:
    """A device of `size` bytes, `base` of them in use, where a row of a pass takes `row` and any pass `fixed`."""

    def __init__(self, size: int, row: int, base: int = 0, fixed: int = 0) -> None:
        self.size, self.row, self.base, self.fixed = size, row, base, fixed
        self.tried: list[int] = []

    def usable(self) -> int:
        return self.size

    def held(self) -> int:
        return self.base

    def try_pass(self, rows: int) -> None:
        self.tried.append(rows)
        if self.needs(rows) > 1.1 * self.size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    def needs(self, rows: int) -> int:
        return self.base + self.fixed + rows * self.row

    def peak_of(self, work: Callable[[], None]) -> int | None:
        return self.needs(self.tried[-1]) if fitting.sufficed(work) else None


@pytest.mark.parametrize(
    ("size", "guess", "expected", "tried"),
    [
        (1000, 8, 8, [8]),
        (1000, 1, 8, [1, 8]),
        (1000, 32, 8, [32, 16, 8]),
        (3400, 8, 32, [8, 32]),
        (10**9, 8, 32, [8, 32]),
        (150, 16, 1, [16, 8, 4, 2, 1]),
        (50, 4, 0, [4, 2, 1]),
    ],
)
def test_the_largest_that_fits_is_found(size: int, guess: int, expected: int, tried: list[int]) -> None:
    memory, cleared = FakeMemory(size, row=100), []
    found = find_rows(64, guess, 32, memory, memory.try_pass, lambda: cleared.append(1))
    assert (found, memory.tried) == (expected, tried) and len(cleared) == len(tried)


@pytest.mark.parametrize("base", [0, 37, 400])
@pytest.mark.parametrize("fixed", [0, 55, 300])
@pytest.mark.parametrize("guess", [1, 3, 12, 48])
def test_what_is_found_fits_and_is_near_the_most(guess: int, fixed: int, base: int) -> None:
    memory = FakeMemory(1400, row=100, base=base, fixed=fixed)
    found = find_rows(48, guess, 48, memory, memory.try_pass, lambda: None)
    assert memory.needs(found) <= memory.size
    # what does not grow with the rows is taken for growing, so one divisor may be left out
    following = [divisor for divisor in divisors(48) if divisor > found][1]
    assert memory.needs(following) > memory.size


def test_all_ranks_take_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank can hold four rows, whatever this one can."""
    monkeypatch.setattr(fitting, "largest_over_ranks", lambda value: max(value, -4))
    memory = FakeMemory(10**6, row=100)
    assert find_rows(64, 16, 64, memory, memory.try_pass, lambda: None) == 4
    assert memory.tried == [16, 4]


def test_passes_of_one_shape() -> None:
    assert [largest_divisor(12, most) for most in (0, 1, 5, 6, 11, 99)] == [1, 1, 4, 6, 6, 12]
    assert [smaller(12, rows) for rows in (12, 6, 4, 3, 2, 1)] == [6, 3, 2, 1, 1, 0]


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("rows", "better"), [(17, 16), (23, 24), (31, 32), (37, 40), (34, 32), (16, 0), (32, 0), (40, 0), (13, 0), (1, 0)]
)
def test_rows_that_do_not_divide_into_large_passes_are_told_with_what_to_set(
    rows: int, better: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where 16 fit, as on this device or by the user's word."""
    monkeypatch.setattr(setup, "CPU_TOKENS_PER_PASS", 16 * 2048)
    settings = {"train.tokens_per_step": 2 * rows * 2048, "train.rows_per_pass": 16 if fixed else 0}
    config = run_config("swa-ssss", 2, settings)
    size = setup.rows_per_pass(config, rows, CPU)
    told = setup.remarks(config, rows, size, CPU)
    assert bool(better) == (2 * size < min(rows, 16)) == bool(told)
    if told:
        assert told[0].startswith(f"a pass has {size} of the rank's {rows} rows, ") and "where 16 should" in told[0]
        assert f"set train.tokens_per_step to {2 * better * 2048} for" in told[0]
        assert 2 * largest_divisor(better, 16) >= 16


def test_small_passes_for_want_of_memory_are_not_the_fault_of_the_rows() -> None:
    config = run_config("swa-ssss", 2, {"train.rows_per_pass": 16})
    assert setup.remarks(config, 64, 2, CPU) == []


def limit_passes(monkeypatch: pytest.MonkeyPatch, most: int, from_pass: int = 0) -> list[int]:
    """Passes of more than `most` rows run out of memory in their backward; how many rows each pass had."""
    plain, seen = Passes.add_pass, []

    def add_pass(self: Passes, inputs: Inputs) -> Tensor:
        seen.append(len(inputs.tokens))
        losses = plain(self, inputs)
        if len(inputs.tokens) > most and len(seen) > from_pass:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses

    monkeypatch.setattr(Passes, "add_pass", add_pass)
    return seen


def train(data: Path, run: Path, settings: dict[str, Any] | None = None, resume: bool = False) -> list[str]:
    watch = Unwatched()
    chosen = SMALL | FAST | (settings or {})
    launch.train("maglev-shared-0.1", data, run, watch, depth=1, settings=chosen, resume=resume)
    return watch.lines


def test_a_step_that_runs_out_of_memory_is_made_with_smaller_passes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third of six steps: nothing is lost, nothing counts twice."""
    train(data, tmp_path / "plain")
    seen = limit_passes(monkeypatch, most=1, from_pass=2)
    said = train(data, tmp_path / "short")
    assert seen == [4, 4, 4, 2] + 4 * [1, 1, 1, 1]
    assert [line for line in said if "out of memory with 4 rows per pass; the step begins anew with 2" in line]
    np.testing.assert_allclose(losses_of(tmp_path / "short"), losses_of(tmp_path / "plain"), rtol=0, atol=1e-5)
    assert [step for step, *_ in losses_of(tmp_path / "short")] == [1, 2, 3, 4, 5, 6]


def half_of(run: Path, copy: Path, **state: Any) -> Path:
    """The run as it was at step 4, with another state."""
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(run / "checkpoints" / "step-00000004", copy / "checkpoints" / "step-00000004")
    found = checkpoint.newest(copy, pytest.fail)
    assert found is not None
    tensors = {stem: found.tensors(stem) for stem in found.stems}
    shutil.rmtree(found.folder)
    changed = {name: value for name, value in (found.state | state).items() if value is not None}
    checkpoint.save(copy, found.step, tensors, changed, keep=1)
    return copy


def test_a_resumed_run_keeps_the_micro_batch_it_had(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halved twice in the third step, and again free when it is resumed after the fourth."""
    with pytest.MonkeyPatch.context() as patch:
        limit_passes(patch, most=1, from_pass=2)
        train(data, tmp_path / "run")
    seen = limit_passes(monkeypatch, most=4)

    def passes_of(name: str, settings: dict[str, Any] | None = None, **state: Any) -> list[int]:
        seen.clear()
        train(data, half_of(tmp_path / "run", tmp_path / name, **state), settings, resume=True)
        return seen

    assert passes_of("again") == 8 * [1]
    assert losses_of(tmp_path / "again") == losses_of(tmp_path / "run")
    assert_same_tensors(tmp_path / "again", tmp_path / "run")
    # unless the user says otherwise, or other ranks or devices go on
    assert passes_of("fixed", {"train.rows_per_pass": 2}) == 4 * [2]
    assert passes_of("fewer ranks", place="2 x cpu") == passes_of("other device", place="1 x cuda") == 2 * [4]
    assert passes_of("recomputed", {"train.recompute": "full"}) == 2 * [4]
    train(data, tmp_path / "was fixed", {"train.rows_per_pass": 1})
    seen.clear()
    train(data, half_of(tmp_path / "was fixed", tmp_path / "open again"), resume=True)
    assert seen == 2 * [4]
    # as they were written before
    assert passes_of("older", place=None, rows_per_pass=None) == 2 * [4]


def test_a_validation_that_runs_out_of_memory_is_left_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of step 3, not that of step 6: a line says so, nothing is recorded, and training is as it was."""
    train(data, tmp_path / "plain")
    measure, step = TextValidation.measure, Passes.gradients
    failed: list[Objective] = []

    def measure_later(self: TextValidation, objective: Objective, *rest: Any) -> dict[str, float]:
        if not failed:
            failed.append(objective)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return measure(self, objective, *rest)

    def gradients(self: Passes, batch: Batch) -> tuple[StepLosses, int]:
        assert self.objective.training
        return step(self, batch)

    monkeypatch.setattr(TextValidation, "measure", measure_later)
    monkeypatch.setattr(Passes, "gradients", gradients)
    said = train(data, tmp_path / "short", {"train.validate_every": 3})
    (line,) = [line for line in said if "out of memory in the validation" in line]
    assert line.startswith("step 3:") and "train.validate_every" in line and "train.validation_rows" in line
    assert [row["step"] for row in read_metrics(tmp_path / "short") if row["kind"] == "validation"] == [6]
    assert_same_tensors(tmp_path / "short", tmp_path / "plain")


def test_a_micro_batch_that_the_user_fixed_ends_in_a_line_that_names_what_fits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_passes(monkeypatch, most=2)
    with pytest.raises(WorkError, match="passes of 4 rows do not fit into the memory of cpu; 2 fit: set it to that"):
        train(data, tmp_path / "run", {"train.rows_per_pass": 4})
    assert losses_of(tmp_path / "run") == []
    with pytest.MonkeyPatch.context() as patch:
        limit_passes(patch, most=0)
        with pytest.raises(WorkError, match=r"not even a micro-batch of one row fits; set train.recompute to full"):
            train(data, tmp_path / "none")


def measure_passes(monkeypatch: pytest.MonkeyPatch, memory: FakeMemory, divided: bool = False) -> None:
    """The trainer's passes take that memory; `divided`, as if ranks divided the parameters."""

    class Measured(Passes):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given[:-2], divided, given[-1])

        def add_pass(self, inputs: Inputs) -> Tensor:
            memory.try_pass(len(inputs.tokens))
            return super().add_pass(inputs)

    monkeypatch.setattr(loop, "Passes", Measured)
    monkeypatch.setattr(passes, "memory_of", lambda device: memory)


def test_the_trainer_measures_before_its_first_step_and_changes_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(data, tmp_path / "plain", {"train.rows_per_pass": 2})
    memory = FakeMemory(250, row=100)
    measure_passes(monkeypatch, memory)
    said = train(data, tmp_path / "found")
    assert memory.tried[:2] == [4, 2] and memory.tried[2:] == 12 * [2]
    assert [line for line in said if "2 x 2 rows per rank" in line]
    assert_same_tensors(tmp_path / "found", tmp_path / "plain")
    # what the user fixed is not looked for
    memory.tried.clear()
    train(data, tmp_path / "fixed", {"train.rows_per_pass": 1})
    assert set(memory.tried) == {1} and len(memory.tried) == 24


def test_divided_parameters_are_fitted_from_fewer_rows(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never by a pass that is too large: the other ranks would wait for the end of it."""
    memory = FakeMemory(250, row=100)
    measure_passes(monkeypatch, memory, divided=True)
    said = train(data, tmp_path / "found")
    assert memory.tried == [1] + 12 * [2] and [line for line in said if "2 x 2 rows per rank" in line]
    memory.size, memory.tried = 50, []
    with pytest.raises(WorkError, match="not even a micro-batch of one row fits"):
        train(data, tmp_path / "none")
    assert memory.tried == [1]


def test_a_run_tells_of_small_passes_in_its_first_lines(data: Path, tmp_path: Path) -> None:
    said = train(data, tmp_path / "run", {"train.tokens_per_step": 7 * 32, "train.steps": 1, "train.rows_per_pass": 4})
    assert [line for line in said if "where 4 should fit" in line and "train.tokens_per_step to 256" in line]


def test_the_guess_follows_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("maglev-shared-0.1", 12)
    found = {}
    for free in (20, 70, 140):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free << 30, 141 << 30))
        found[free] = setup.rows_per_pass(config, 256, torch.device("cuda"))
    assert found[20] < found[70] <= found[140] == 32 == setup.most_rows(config)


def test_a_gpu_without_bfloat16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    with pytest.raises(RequestError, match="Old GPU has no bfloat16; set"):
        setup.compute_dtype(run_config("swa-ssss", 1), torch.device("cuda"))
    exact = run_config("swa-ssss", 1, {"train.precision": "float32"})
    assert setup.compute_dtype(exact, torch.device("cuda")) == torch.float32


class InductorError(RuntimeError):
    pass


InductorError.__module__ = "torch._inductor.exc"


def raising(error: Exception) -> Callable[..., None]:
    def fail(*arguments: Any) -> None:
        raise error

    return fail


def fail_in_the_compiler(monkeypatch: pytest.MonkeyPatch, message: str, times: int) -> None:
    plain, count = MaglevObjective.forward, [0]

    def forward(self: MaglevObjective, *arguments: Any) -> Any:
        count[0] += 1
        if count[0] <= times:
            raise InductorError(message)
        return plain(self, *arguments)

    monkeypatch.setattr(MaglevObjective, "forward", forward)


def test_a_kernel_that_cannot_be_built_is_told_in_one_line(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_the_compiler(monkeypatch, "out of resource: shared memory\nand a long trace", times=1)
    with pytest.raises(WorkError, match="InductorError: out of resource: shared memory; set") as told:
        train(data, tmp_path / "run")
    assert "attention on cpu" in str(told.value) and "\n" not in str(told.value)
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_memory_that_the_compiler_lacks_is_memory_that_is_lacking(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_the_compiler(monkeypatch, "OutOfMemoryError: CUDA out of memory.", times=1)
    said = train(data, tmp_path / "run")
    assert [line for line in said if "out of memory with 4 rows per pass" in line]
    assert len(losses_of(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            InductorError("No valid triton configs.\nand more"),
            "InductorError: No valid triton configs.; set train.compile",
        ),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "Triton Error .*; set train.compile to off"),
        (
            torch.AcceleratorError("CUDA error: no kernel image is available"),
            "available; install a PyTorch that is built",
        ),
        (
            RuntimeError("NCCL error in: a.cpp\nCuda failure 700 'illegal'"),
            "RuntimeError: Cuda failure 700 'illegal'; set",
        ),
    ],
)
@pytest.mark.parametrize("place", [(MaglevObjective, "forward"), (Optimizer, "step")])
def test_a_kernel_that_fails_is_told_wherever_it_runs(
    place: tuple[type, str], error: Exception, says: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, raising(error))
    with pytest.raises(WorkError, match=f"a kernel failed on cpu: .*{says}"):
        train(data, tmp_path / "run")


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has"),
            "memory. Tried to allocate 2 GiB",
        ),
        (MemoryError(), "MemoryError"),
    ],
)
def test_memory_that_is_lacking_outside_of_passes_comes_with_a_remedy(
    error: Exception, detail: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizer, "step", raising(error))
    with pytest.raises(WorkError, match=rf"outside of a pass \(.*{detail}\); .*train.sharding=full"):
        train(data, tmp_path / "run")


def test_lacking_memory_is_known_by_all_its_names() -> None:
    for message in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory: 8"):
        assert not sufficed(raising(RuntimeError(message)))
    # shared memory of a kernel is none that a smaller pass would spare
    for other in (RuntimeError("out of resource: shared memory"), WorkError("out of memory, as was said")):
        with pytest.raises(type(other), match="memory"):
            sufficed(raising(other))


@pytest.mark.gpu
def test_on_a_gpu_with_little_memory_fewer_rows_are_taken(data: Path, tmp_path: Path) -> None:
    """PyTorch gives no more than a share of the GPU's memory, and refuses the rest as it would on a full one."""
    total = torch.cuda.get_device_properties(0).total_memory
    settings = SMALL | {"model.context": 1024, "model.window": 128, "train.tokens_per_step": 64 * 1024}
    settings |= {"train.steps": 2, "train.device": "cuda", "train.validate_every": 0, "train.compile": "off"}
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2**29 / total)
    try:
        launch.train("maglev-shared-0.1", data, tmp_path / "found", Unwatched(), depth=2, settings=settings)
        state = json.loads((tmp_path / "found/checkpoints/step-00000002/state.json").read_text())
        rows = state["rows_per_pass"]
        assert 1 <= rows < 64
        fixed = settings | {"train.rows_per_pass": 64}
        with pytest.raises(WorkError, match=r"train\.rows_per_pass is 64 .* fit: set it to that"):
            launch.train("maglev-shared-0.1", data, tmp_path / "fixed", Unwatched(), depth=2, settings=fixed)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
