"""`maglev train` as a function: check the request, start the ranks, run, leave the run folder whole."""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from maglev import files
from maglev.config import RunConfig, TrainConfig
from maglev.data.shards import open_data
from maglev.errors import RequestError
from maglev.recipes import run_config
from maglev.runs import BAD_BATCHES, CONFIG, RECALL, TOKENIZER, read_config, teacher_of
from maglev.settings import setting_values
from maglev.train import distributed
from maglev.train.distributed import Ranks
from maglev.train.fitting import trouble_in_one_line
from maglev.train.loop import Trainer, Watch
from maglev.train.metrics import writing
from maglev.train.sharding import make_mesh
from maglev.train.signals import interruption
from maglev.train.task import Task, Text
from maglev.values import canonical_json, parse_value

# what may differ when a run is resumed: it changes where and how fast things are computed, at most their rounding
FREE_ON_RESUME = {
    "device", "checkpoint_every", "keep_checkpoints", "validate_every", "validation_rows", "log_every",
    "tensorboard", "compile", "max_bad_steps", "threads", "rows_per_pass", "recompute", "attention", "sharding",
    "timeout", "graphs",
}  # fmt: skip
# what the tokens of a run mean; each kind of task has its own
MEANINGS = (TOKENIZER, RECALL)


def configure(recipe: str, depth: int, settings: dict[str, Any], task: Task) -> RunConfig:
    """The vocabulary is the task's; a contradicting one is an error, not a silent choice."""
    wanted = settings.get("model.vocab_size", task.vocab_size)
    config = run_config(recipe, depth, {**settings, "model.vocab_size": wanted})
    if config.model.vocab_size != task.vocab_size:
        raise RequestError(
            f"model.vocab_size is {config.model.vocab_size} and the tokenizer of {task.source} has {task.vocab_size} "
            f"tokens; leave model.vocab_size away, or prepare the data with another tokenizer"
        )
    return config


def claim_run(run: Path, config: RunConfig, task: Task, resume: bool, held: ExitStack) -> None:
    """Refuse a folder that is not this run's, and keep other processes out of it as long as `held` lasts."""
    if (run / CONFIG).exists():
        if not resume:
            raise RequestError(f"{run} holds a run already; add --resume to go on with it, or choose another --out")
        refuse_other_run(run, read_config(run), config)
        if any((run / name).exists() for name in MEANINGS):
            task.check(run)
    elif run.exists() and not (run.is_dir() and is_unfinished_claim(run)):
        raise RequestError(f"{run} exists and is not a run folder; choose another --out")
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        held.enter_context(sole_writer(run))
        for folder in (run, run / "checkpoints", run / BAD_BATCHES):
            files.remove_leftovers(folder)


def see_run(run: Path, ranks: Ranks) -> None:
    """All ranks read from it when they resume, and write their parts of checkpoints and their bad batches there."""
    if ranks.world == 1:
        return
    name = distributed.gather_texts(files.TEMPORARY_PREFIX + uuid.uuid4().hex)[0]

    def show() -> None:
        if ranks.is_main:
            with writing(run):
                files.write_text(run / name, "")

    def look() -> None:
        if not (run / name).exists():
            raise RequestError(
                f"does not see what rank 0 writes into {run}; RUN must be a folder that all machines see: choose "
                "another --out"
            )

    try:
        distributed.together(show)
        distributed.together(look)
    finally:
        if ranks.is_main:
            (run / name).unlink(missing_ok=True)


def begin_run(run: Path, config: RunConfig, task: Task) -> None:
    """Only now, when nothing in the request can be wrong any more: a refused one leaves no run behind."""
    with writing(run):
        if not (run / CONFIG).exists() or not (run / task.file).exists():
            task.save(run)
        if not (run / CONFIG).exists():
            files.write_json(run / CONFIG, config.to_dict())
        elif teacher_of(before := read_config(run)) != teacher_of(config):
            files.write_json(run / CONFIG, replace(before, objective=config.objective).to_dict())


def remove_empty(run: Path) -> None:
    """The folder that was made for a run which then was refused."""
    with suppress(OSError):
        run.rmdir()


@contextmanager
def sole_writer(run: Path) -> Iterator[None]:
    """Two processes in one run folder would delete each other's files. However a process ends, its lock ends too."""
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RequestError(f"{run} is being trained by another process; wait for it to end, or stop it") from None
    except OSError:
        # a file system without locks: the user's care has to do
        pass
    try:
        yield
    finally:
        os.close(descriptor)


def is_unfinished_claim(run: Path) -> bool:
    """An empty folder, or what a kill between the first two files of a run leaves."""
    names = {path.name for path in run.iterdir()}
    return all(name in MEANINGS or name.startswith(files.TEMPORARY_PREFIX) for name in names)


def refuse_other_run(run: Path, before: RunConfig, now: RunConfig) -> None:
    if before.recipe != now.recipe:
        raise RequestError(f"{run} is a run of {before.recipe}, not of {now.recipe}; choose another --out")
    old, new = before.to_dict(), now.to_dict()
    for section, values in new.items():
        if not isinstance(values, dict):
            continue
        for name, value in values.items():
            if section == "train" and name in FREE_ON_RESUME:
                continue
            was = old[section].get(name)
            # a frozen Q may have moved: that it is the same is seen by its weights, when the checkpoint is read
            if was != value and not (was and value and name == "prefiller_from"):
                raise RequestError(
                    f"{run} was begun with {section}.{name} = {was}, now it is {value}; "
                    f"resume with the same settings, or choose another --out"
                )


def first_difference(ours: str, theirs: str) -> str:
    """Of two sets of settings as JSON: the first that is not the same."""
    one, other = json.loads(ours), json.loads(theirs)
    name = next(name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name))
    return f" in {name} ({one.get(name)} and {other.get(name)})"


def longest_wait(settings: dict[str, Any]) -> timedelta:
    """Read ahead of all else, since it is how long ranks wait to meet, too. What is wrong with it is told later."""
    try:
        seconds = parse_value("train.timeout", settings.get("train.timeout", TrainConfig.timeout), int)
        return timedelta(seconds=TrainConfig(timeout=seconds).timeout)
    except RequestError:
        return timedelta(seconds=TrainConfig.timeout)


def train(
    recipe: str,
    data: str | Path | Task,
    run: Path,
    watch: Watch,
    *,
    depth: int,
    settings: dict[str, Any] | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train to the end or to a signal; the summary says which. Under torchrun every rank calls this.

    `data` is the folder of a text, or a task of another kind.
    """
    wanted = settings or {}
    ranks = distributed.start(str(wanted.get("train.device", "auto")), longest_wait(wanted))

    def request() -> tuple[Task, RunConfig]:
        task: Task = Text(open_data(data)) if isinstance(data, str | Path) else data
        return task, configure(recipe, depth, wanted, task)

    with ExitStack() as held:
        held.push(distributed.leave)
        held.enter_context(trouble_in_one_line(ranks.device))
        task, config = distributed.together(request)
        everything = {"recipe": config.recipe} | setting_values(config)
        distributed.all_agree(canonical_json(everything), "configuration", first_difference)
        distributed.all_agree(task.fingerprint, "data")
        if ranks.is_main and not run.exists():
            held.callback(remove_empty, run)
        distributed.together(lambda: claim_run(run, config, task, resume, held) if ranks.is_main else None)
        see_run(run, ranks)
        noted = held.enter_context(interruption())
        mesh = make_mesh(config, ranks)
        trainer = distributed.together(lambda: Trainer(config, task, run, ranks, watch, mesh))
        held.callback(trainer.close)
        trainer.load()
        distributed.together(lambda: begin_run(run, config, task) if ranks.is_main else None)
        trainer.start()
        for line in trainer.describe():
            watch.say(line)
        signal = trainer.train(noted)
        if signal:
            watch.say(f"stopped at step {trainer.progress.step} and saved")
        return trainer.summary() | {"signal": signal}
