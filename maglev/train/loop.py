"""The training loop: the same for every objective and any number of ranks.

A step is a function of the weights, the optimizer's state and the step's index, up to rounding. How sums are divided,
over threads and micro-batches, is restored for that.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from maglev import checkpoint, files
from maglev.config import RunConfig
from maglev.data.loader import Batch
from maglev.errors import RequestError, WorkError
from maglev.evaluate.diagnostics import loop_diagnostics, told_of
from maglev.model.accounting import objective_flops, training_steps
from maglev.objectives import Objective
from maglev.objectives.lrt import LRTObjective
from maglev.objectives.maglev import MaglevObjective
from maglev.ops import attention
from maglev.runs import BAD_BATCHES, read_config, teacher_of
from maglev.train import distributed, saving, schedule
from maglev.train.ahead import ReadAhead
from maglev.train.distributed import Ranks
from maglev.train.fitting import release, sufficed
from maglev.train.metrics import MetricsLog, writing
from maglev.train.optimizer import Optimizer
from maglev.train.param_groups import ParamGroup, RoleOf, build_param_groups, role_of
from maglev.train.passes import Passes, StepLosses
from maglev.train.setup import (
    attention_cases,
    build_for_training,
    compute_dtype,
    meet_teacher,
    remarks,
    rows_of_step,
    start_from,
)
from maglev.train.signals import Interruption
from maglev.train.speed import clock, matrix_rate
from maglev.train.task import Task, Validation

# rows on which the recurrence is disturbed
DIAGNOSTIC_ROWS = 4


class Watch(Protocol):
    """Who is told how the run goes."""

    def say(self, line: str) -> None: ...

    def step(self, done: int, total: int, note: str) -> None: ...


@dataclass
class Progress:
    """What a checkpoint stores beside tensors. `place` is where `rows_per_pass` was found to fit."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bad_steps: int = 0
    bad_in_a_row: int = 0
    threads: int = 0
    rows_per_pass: int = 0
    place: str = ""
    data: str = ""
    # of a frozen prefiller's weights
    teacher: str = ""


class Trainer:
    """`mesh` holds the ranks that parameters are divided over; without one each rank holds all of them."""

    def __init__(
        self, config: RunConfig, task: Task, run: Path, ranks: Ranks, watch: Watch, mesh: DeviceMesh | None = None
    ) -> None:
        self.config, self.task, self.run, self.ranks, self.watch = config, task, run, ranks, watch
        self.divided = mesh is not None
        self.device = ranks.device
        self.steps = training_steps(config)
        self.loader = task.rows(config.model.context, config.train.seed)
        self.validation = self.open_validation()
        self.rows = rows_of_step(config, ranks.world)
        self.objective = self.build(mesh)
        teacher = meet_teacher(self.objective, task)
        compiled = self.device.type == "cuda" and config.train.compile != "off"
        self.optimizer = Optimizer(self.param_groups(), compiled=compiled)
        self.passes = Passes(config, self.objective, self.optimizer, ranks, self.rows, self.divided, watch.say)
        self.ahead = ReadAhead(lambda step: self.loader.batch(self.rows_of(step)), self.steps)
        self.progress = Progress(data=self.loader.fingerprint, teacher=teacher)
        self.saved_step = self.validated_step = -1
        self.memory_source = training_source(self.objective)
        self.metrics: MetricsLog | None = None
        self.matrix_rate = 0.0

    def build(self, mesh: DeviceMesh | None) -> Objective:
        return build_for_training(self.config, self.device, mesh)

    def param_groups(self, role_of: RoleOf = role_of) -> list[ParamGroup]:
        config = self.config
        return build_param_groups(
            self.objective.named_parameters(),
            config.optimizer,
            config.model.width,
            config.model.depth,
            config.train.tokens_per_step,
            role_of,
        )

    def open_validation(self) -> Validation | None:
        train = self.config.train
        if not (self.ranks.is_main and train.validate_every and train.validation_rows):
            return None
        return self.task.validation(self.config.model.context, train.validation_rows)

    def load(self) -> None:
        """Continue from the newest whole checkpoint, or begin, from another run's decoder if that is wished."""
        self.passes.join()
        found = saving.newest(self.run, self.watch.say)
        if found is not None:
            distributed.together(lambda: self.restore(found))
        elif self.config.train.init_from:
            source = Path(self.config.train.init_from)
            given = saving.newest(source, self.watch.say)
            kept = distributed.together(lambda: start_from(self.objective, source, given, self.task, self.watch.say))
            self.watch.say(f"decoder taken from {source}; {len(kept)} tensors start anew")

    def start(self) -> None:
        self.progress.threads = self.choose_threads()
        distributed.together(self.open_metrics)
        validated = self.metrics is not None and self.progress.step in self.metrics.validated
        if distributed.largest_over_ranks(int(validated)):
            self.validated_step = self.progress.step
        # the first kernel of all
        dtype = compute_dtype(self.config, self.device)
        self.matrix_rate = distributed.together(lambda: matrix_rate(self.device, dtype))
        self.fit_rows()

    @property
    def place(self) -> str:
        """What decides how many rows fit."""
        train, room = self.config.train, ""
        if self.device.type == "cuda":
            room = f" of {torch.cuda.get_device_properties(self.device).total_memory} bytes"
        return f"{self.ranks.world} x {self.device.type}{room}, sharding {train.sharding}, recompute {train.recompute}"

    def fit_rows(self) -> None:
        """Sums depend on the micro-batch, so a run that is resumed in the same place keeps the one that was found."""
        is_open = not self.config.train.rows_per_pass and self.progress.place == self.place
        kept = self.progress.rows_per_pass if is_open else 0
        self.passes.fit(lambda: self.loader.batch(self.rows_of(self.progress.step)), kept)

    def open_metrics(self) -> None:
        if self.ranks.is_main:
            self.metrics = MetricsLog(self.run, self.progress.step, self.config.train.tensorboard, self.watch.say)

    def choose_threads(self) -> int:
        """Sums depend on the number of threads, so a resumed run keeps the one it began with."""
        wanted = self.config.train.threads or self.progress.threads
        if wanted:
            torch.set_num_threads(wanted)
        return torch.get_num_threads()

    def restore(self, found: checkpoint.Checkpoint) -> None:
        try:
            progress = Progress(**found.state)
        except TypeError:
            raise RequestError(
                f"{found.folder} was written by another version of Maglev; resume it with that version"
            ) from None
        if progress.data != self.loader.fingerprint:
            raise RequestError(
                f"{self.run} was trained on other data than {self.task.source}; resume it with the same data"
            )
        moved = teacher_of(read_config(self.run)) != teacher_of(self.config)
        if progress.teacher != self.progress.teacher and (progress.teacher or moved):
            raise RequestError(
                f"{self.run} was begun with other weights in objective.prefiller_from; put those back, or begin anew"
            )
        saving.restore(found, self.objective, self.optimizer)
        progress.teacher = self.progress.teacher
        self.progress = progress
        self.saved_step = progress.step
        self.watch.say(f"resumed at step {progress.step} of {self.steps}")

    def save(self) -> None:
        step = self.progress.step
        if self.saved_step == step:
            return
        # while steps fail the weights may be broken: older checkpoints stay until one succeeds
        keep = sys.maxsize if self.progress.bad_in_a_row else self.config.train.keep_checkpoints
        fixed = self.config.train.rows_per_pass
        self.progress.rows_per_pass, self.progress.place = 0 if fixed else self.passes.rows_per_pass, self.place
        state = asdict(self.progress)
        if self.divided:
            saving.save_divided(self.run, step, self.objective, self.optimizer, state, keep, self.sync_metrics)
        else:
            optimizer = self.optimizer.state_tensors()
            distributed.together(lambda: self.save_whole(optimizer, state, keep))
        self.saved_step = step

    def save_whole(self, optimizer: dict[str, Tensor], state: dict[str, Any], keep: int) -> None:
        if self.ranks.is_main:
            self.sync_metrics()
            saving.save_whole(self.run, self.progress.step, self.objective, optimizer, state, keep)

    def sync_metrics(self) -> None:
        if self.metrics is not None:
            self.metrics.sync()

    def train(self, interruption: Interruption) -> int:
        """Run to the end, or to a signal, whose number is returned. What was done is saved either way."""
        while True:
            signal = distributed.largest_over_ranks(interruption.signal)
            finished = self.progress.step == self.steps
            if finished and not self.validation_due():
                return 0
            if signal:
                self.save()
                return signal
            if self.validation_due():
                self.validate()
                continue
            self.one_step()
            if self.progress.step == self.steps or self.progress.step % self.config.train.checkpoint_every == 0:
                self.save()

    def one_step(self) -> None:
        began = clock(self.device)
        step = self.progress.step
        batch = distributed.together(lambda: self.ahead.batch(step))
        self.objective.progress = step / self.steps
        losses, targets = self.passes.gradients(batch)
        self.progress.step = step + 1
        self.progress.tokens += targets
        skipped = not losses.finite
        if not skipped:
            self.progress.bad_in_a_row = 0
            self.optimizer.step(
                schedule.lr_scale(step, self.steps, self.config.optimizer),
                schedule.muon_momentum(step),
                schedule.weight_decay_scale(step, self.steps),
            )
        else:
            self.progress.bad_steps += 1
            self.progress.bad_in_a_row += 1
        self.passes.zero_gradients()
        seconds = clock(self.device) - began
        self.progress.seconds += seconds
        distributed.together(lambda: self.write_down(batch, losses, skipped, seconds))

    def write_down(self, batch: Batch, losses: StepLosses, skipped: bool, seconds: float) -> None:
        if skipped:
            self.keep_bad_batch(batch)
        self.record(losses, skipped, seconds)
        progress = self.progress
        if progress.bad_in_a_row >= self.config.train.max_bad_steps:
            raise WorkError(
                f"the loss or its gradient was not finite {progress.bad_in_a_row} steps in a row, up to step "
                f"{progress.step}; the batches are in {self.run / BAD_BATCHES}; begin another run with lower "
                "learning rates, or raise train.max_bad_steps and resume"
            )

    def rows_of(self, step: int) -> range:
        """Every rank takes its own rows of the step; together they are the same rows for any number of ranks."""
        first = step * self.rows * self.ranks.world + self.ranks.rank * self.rows
        return range(first, first + self.rows)

    def keep_bad_batch(self, batch: Batch) -> None:
        """Skip the step, keep what led there."""
        step = self.progress.step
        self.watch.say(f"step {step}: the loss or its gradient is not finite; the step is skipped, its batch kept")
        path = self.run / BAD_BATCHES / f"step-{step:08d}-rank-{self.ranks.rank}.safetensors"
        tensors = {name: torch.from_numpy(array) for name, array in batch._asdict().items()}
        with writing(path), files.atomic_path(path) as temporary:
            save_file(tensors, temporary)

    def record(self, losses: StepLosses, skipped: bool, seconds: float) -> None:
        step, rate = self.progress.step, self.config.train.tokens_per_step / seconds
        done = 3 * objective_flops(self.config) * rate / self.ranks.world
        # a limit that was measured while the machine did other things too is no limit
        self.matrix_rate = max(self.matrix_rate, done)
        mfu = done / self.matrix_rate
        self.watch.step(step, self.steps, self.note(losses, rate, mfu))
        wanted = step % self.config.train.log_every == 0 or step == self.steps or skipped
        if self.metrics is None or not wanted:
            return
        row: dict[str, Any] = {"kind": "train", "step": step, "memory": self.memory_source}
        row |= {"total_loss": losses.total, "next_token_loss": losses.next_token}
        row |= {"consistency_loss": losses.consistency, "gradient_norm": losses.gradient_norm}
        row |= {"skipped": skipped, "tokens": self.progress.tokens}
        row |= {"tokens_per_second": rate, "mfu": mfu, "seconds": self.progress.seconds}
        row |= {"lr_scale": schedule.lr_scale(step - 1, self.steps, self.config.optimizer)}
        row |= {"bad_steps": self.progress.bad_steps}
        self.metrics.append(row)

    def note(self, losses: StepLosses, rate: float, mfu: float) -> str:
        source = "" if self.memory_source == "none" else f" ({self.memory_source})"
        apart = f" consistency {losses.consistency:.4f}" if self.memory_source == "lifted" else ""
        return f"loss {losses.next_token:.4f}{source}{apart} {rate:,.0f} tokens/s MFU {100 * mfu:.0f}%"

    def validation_due(self) -> bool:
        train, step = self.config.train, self.progress.step
        if not (train.validate_every and train.validation_rows and step) or step == self.validated_step:
            return False
        return step % train.validate_every == 0 or step == self.steps

    def validate(self) -> None:
        """All ranks together; rank 0 measures, with the weights of all. Where memory does not suffice, nobody does."""
        enough, whole = self.gather() if self.divided else (True, self.objective)
        if not (enough and distributed.together(lambda: sufficed(lambda: self.measure(whole)))):
            release(self.device)
            self.watch.say(
                f"step {self.progress.step}: out of memory in the validation, which is left out; set "
                "train.validation_rows to fewer, or train.validate_every to 0 for none"
            )
        self.validated_step = self.progress.step

    def gather(self) -> tuple[bool, Objective | None]:
        """Whether there is room on every rank, and for rank 0 the objective with whole parameters."""
        copies: list[Objective | None] = []

        def build() -> None:
            copies.append(saving.whole_copy(self.config, self.objective, self.device))

        enough = distributed.together(lambda: sufficed(build))
        if distributed.largest_over_ranks(int(not enough)):
            return False, None
        saving.gather_into(copies[0], self.objective)
        return True, copies[0]

    def measure(self, objective: Objective | None) -> None:
        """By memory source, on part of what was held back."""
        validation, step = self.validation, self.progress.step
        if self.metrics is None or validation is None or objective is None:
            return
        objective.eval()
        try:
            values = validation.measure(objective, self.passes.rows_per_pass, self.config.data)
            loop = self.measure_loop(objective, validation)
        finally:
            objective.train()
        named = {f"{validation.metric}_{source}": value for source, value in values.items()}
        if "lifted" in values:
            named[f"{validation.metric}_recurrent_minus_lifted"] = values["recurrent"] - values["lifted"]
        self.metrics.append({"kind": "validation", "step": step} | named | loop)
        shown = ", ".join(f"{source} {value:.4f}" for source, value in values.items())
        if loop:
            shown += f"; {told_of(loop)}"
        self.watch.say(f"step {step}: {validation.words} {shown}")

    def measure_loop(self, objective: Objective, validation: Validation) -> dict[str, Any]:
        """Whether the recurrence holds, where there is one."""
        if objective.decoder.injection is None:
            return {}
        tokens = validation.tokens(DIAGNOSTIC_ROWS).to(self.device)
        return asdict(loop_diagnostics(objective.decoder, tokens))

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def describe(self) -> list[str]:
        """What a user should know before the first step."""
        recipe, depth, tokens = self.config.recipe, self.config.model.depth, self.config.train.tokens_per_step
        epochs = self.steps * tokens / self.loader.tokens_per_epoch
        share = f"{epochs:.2f} passes over the data" if epochs else f"no row twice, of {self.task.source}"
        size = self.passes.rows_per_pass
        return [
            f"{recipe}, depth {depth}: {self.steps} steps of {tokens:,} tokens ({share}), "
            f"{self.rows // size} x {size} rows per rank on {self.device}"
            + (f", parameters divided over {self.ranks.world} ranks" if self.divided else ""),
            attention.describe(
                self.device.type,
                attention_cases(self.config, self.objective, self.device),
                self.objective.decoder.attention_kernel,
            ),
            *remarks(self.config, self.rows, size, self.device),
        ]

    def summary(self) -> dict[str, Any]:
        return {
            "run": str(self.run),
            "recipe": self.config.recipe,
            "step": self.progress.step,
            "steps": self.steps,
            "finished": self.progress.step == self.steps,
            "tokens": self.progress.tokens,
            "seconds": self.progress.seconds,
            "bad_steps": self.progress.bad_steps,
        }


def training_source(objective: torch.nn.Module) -> str:
    """Where the memories of the training loss come from."""
    if isinstance(objective, MaglevObjective):
        return "lifted"
    return "refined" if isinstance(objective, LRTObjective) else "none"
