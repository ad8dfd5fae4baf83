"""What a checkpoint of a run holds: written by rank 0, or by every rank its own part; read on any number of ranks."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maglev import checkpoint
from maglev.checkpoint import Part, Readable
from maglev.config import RunConfig
from maglev.errors import RequestError
from maglev.objectives import Objective, build_objective
from maglev.objectives.maglev import MaglevObjective
from maglev.train import distributed
from maglev.train.optimizer import Optimizer
from maglev.train.sharding import local, own_rows, whole
from maglev.values import canonical_json


def modules_of(objective: Objective) -> dict[str, nn.Module]:
    """By the stem of their file: what is deployed, and what is not, apart."""
    modules: dict[str, nn.Module] = {"decoder": objective.decoder}
    if isinstance(objective, MaglevObjective):
        modules["prefiller"] = objective.prefiller
    return modules


def save_whole(
    run: Path, step: int, objective: Objective, optimizer: dict[str, Tensor], state: dict[str, Any], keep: int
) -> None:
    """For the rank that holds everything."""
    weights = {stem: module.state_dict() for stem, module in modules_of(objective).items()}
    checkpoint.save(run, step, weights | {"optimizer": optimizer}, state, keep)


def save_divided(
    run: Path,
    step: int,
    objective: Objective,
    optimizer: Optimizer,
    state: dict[str, Any],
    keep: int,
    before: Callable[[], None],
) -> None:
    """Every rank calls it and writes what it holds; `before` is rank 0's, ahead of the first byte."""
    rank, _ = distributed.rank_and_world()

    def begin() -> bool:
        if rank:
            return False
        before()
        return checkpoint.begin_parts(run, step, keep)

    wanted = distributed.together(begin)
    if not distributed.largest_over_ranks(int(wanted)):
        return
    try:
        parts = parts_of(objective, optimizer)
        written = distributed.together(lambda: checkpoint.write_parts(run, step, rank, parts))
        entries = [json.loads(text) for text in distributed.gather_texts(json.dumps(written))]
        distributed.together(lambda: checkpoint.finish_parts(run, step, entries, state, keep) if not rank else None)
    finally:
        if not rank:
            shutil.rmtree(checkpoint.parts_folder(run, step), ignore_errors=True)


def parts_of(objective: Objective, optimizer: Optimizer) -> dict[str, dict[str, Part]]:
    parts = {
        stem: {
            name: Part(local(parameter), own_rows(parameter).start, tuple(parameter.shape))
            for name, parameter in module.named_parameters()
        }
        for stem, module in modules_of(objective).items()
    }
    parts["optimizer"] = optimizer.parts()
    if distributed.rank_and_world()[0] == 0:
        parts["optimizer"]["step"] = Part(torch.tensor(optimizer.steps), 0, ())
    return parts


def newest(run: Path, report: Callable[[str], None]) -> checkpoint.Checkpoint | None:
    """The newest whole checkpoint, on every rank; all ranks call it together.

    Rank 0 alone looks whether its files are whole: the others read no more than they need.
    """
    rank, _ = distributed.rank_and_world()
    own = distributed.together(lambda: None if rank else checkpoint.newest(run, report))
    step = distributed.largest_over_ranks(-1 if own is None else own.step)
    if step < 0:
        return None
    found = distributed.together(lambda: own or checkpoint.found_whole(run, step))
    distributed.all_agree(canonical_json(found.state), "checkpoint")
    return found


def restore(found: checkpoint.Checkpoint, objective: Objective, optimizer: Optimizer) -> None:
    """Each rank reads the rows that it holds and no others."""
    for stem, module in modules_of(objective).items():
        load_weights(module, found.stored(stem), found.folder)
    optimizer.load_state_tensors(found.stored("optimizer"))


@torch.no_grad()
def load_weights(module: nn.Module, given: Mapping[str, Readable], source: Path) -> None:
    parameters = dict(module.named_parameters())
    differing = sorted(set(parameters) ^ set(given))
    differing += [name for name in parameters if not differing and tuple(given[name].shape) != parameters[name].shape]
    if differing:
        raise RequestError(
            f"{source} holds another model: {differing[0]} and {len(differing) - 1} more differ; "
            "resume with the settings that the run was started with"
        )
    for name, parameter in parameters.items():
        fill(parameter, given[name])


@torch.no_grad()
def fill(parameter: Tensor, given: Readable) -> None:
    """Copy a whole tensor's rows that this rank holds."""
    local(parameter).copy_(given[own_rows(parameter)])


@torch.no_grad()
def whole_copy(config: RunConfig, objective: Objective, device: torch.device) -> Objective | None:
    """For rank 0 an objective that `gather_into` fills with whole parameters, for the others None.

    Stepping through a divided one would gather its blocks for every token. Memory runs out here or not at all: in the
    middle of gathering the other ranks would wait in vain.
    """
    copy = build_objective(config).to(device) if distributed.rank_and_world()[0] == 0 else None
    # one parameter at a time is whole on every rank, and may be padded on its way
    largest = max(parameter.numel() * parameter.element_size() for parameter in objective.parameters())
    torch.empty(2 * largest, dtype=torch.uint8, device=device)
    return copy


@torch.no_grad()
def gather_into(copy: Objective | None, objective: Objective) -> None:
    """All ranks call it together; rank 0 has a copy."""
    targets = dict(copy.named_parameters()) if copy is not None else {}
    for name, parameter in objective.named_parameters():
        tensor = whole(parameter)
        if name in targets:
            targets[name].copy_(tensor)
    if copy is not None:
        copy.decoder.embedding.compute_dtype = objective.decoder.embedding.compute_dtype
