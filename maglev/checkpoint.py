"""Checkpoints of a run: RUN/checkpoints/step-00000100/ with safetensors, JSON and a manifest of checksums.

A checkpoint is written under a temporary name, synced and renamed, so a kill leaves it whole or absent;
the manifest shows what a disk does to it later. One process writes a file per stem (decoder, optimizer, ...); ranks
among which tensors are divided write one each, and parts.json says which rows of which tensor lie in which file.
Both read alike.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from maglev.errors import RequestError, WorkError
from maglev.files import TEMPORARY_PREFIX, atomic_folder, remove_leftovers, sha256_of_file, sync

FOLDER_NAME = re.compile(r"step-(\d{8,})")
STATE, MANIFEST, PARTS = "state.json", "manifest.json", "parts.json"
SUFFIX = ".safetensors"
# an export's weights, and what stands before the stem in the names of its tensors
EXPORTED, EXPORT_PREFIX = "model.safetensors", "objective."


class Readable(Protocol):
    """A tensor, or one that is read when it is asked for: its rows by a slice, all of it by `[...]`."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, rows: Any, /) -> Tensor: ...


@dataclass(frozen=True)
class Part:
    """Rows of a tensor from `start` on; `shape` is that of the whole one."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.tensor.shape[0])


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: (file, first row) of all of its parts, in the order of their rows."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[Path, int], ...]

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        with reading(self.parts[0][0].parent):
            if isinstance(rows, EllipsisType):
                return join([take(path, self.name, rows) for path, _ in self.parts])
            first, last, _ = rows.indices(self.shape[0])
            starts = [start for _, start in self.parts]
            wanted = [
                take(path, self.name, slice(max(first, start) - start, min(last, end) - start))
                for (path, start), end in zip(self.parts, [*starts[1:], self.shape[0]])
                if max(first, start) < min(last, end)
            ]
            return join(wanted) if wanted else take(self.parts[0][0], self.name, slice(0, 0))


def take(path: Path, name: str, rows: slice | EllipsisType) -> Tensor:
    with safe_open(path, framework="pt", device="cpu") as file:
        return file.get_tensor(name) if isinstance(rows, EllipsisType) else file.get_slice(name)[rows]


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WorkError(f"{path} was whole and cannot be read any more: {error}; start again") from error


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole. `divided` holds what ranks wrote in parts, by stem and name."""

    folder: Path
    step: int
    state: dict[str, Any]
    stems: frozenset[str]
    divided: dict[str, dict[str, Stored]] = field(default_factory=dict)

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of one stem, on the CPU; none where the checkpoint was saved without it."""
        if stem not in self.stems:
            return {}
        if stem in self.divided:
            return {name: stored[...] for name, stored in self.divided[stem].items()}
        path = self.folder / (stem + SUFFIX)
        with reading(path):
            return load_file(path, device="cpu")

    def stored(self, stem: str) -> dict[str, Stored]:
        """The same, to be read tensor by tensor, or only some rows of it."""
        if stem not in self.stems or stem in self.divided:
            return self.divided.get(stem, {})
        path = self.folder / (stem + SUFFIX)
        with reading(path), safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        return {name: Stored(name, shape, ((path, 0),)) for name, shape in shapes.items()}


def check_shapes(run: Path, expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Every tensor that the model has, in its shape, and no other."""
    for name in sorted(set(expected) | set(given)):
        shape = tuple(given[name].shape) if name in given else "missing"
        wanted = tuple(expected[name].shape) if name in expected else "no such tensor"
        if shape != wanted:
            raise RequestError(f"{run}: {name} is {shape} and the model has {wanted}; these are not its weights")


def load_weights(module: nn.Module, run: Path, found: Checkpoint, stem: str) -> None:
    """The tensors of one stem into what they are the weights of."""
    tensors = found.tensors(stem)
    check_shapes(
        run,
        {f"{stem}.{name}": tensor for name, tensor in module.state_dict().items()},
        {f"{stem}.{name}": tensor for name, tensor in tensors.items()},
    )
    module.load_state_dict(tensors)


def checkpoint_folder(run: Path, step: int) -> Path:
    return Path(run) / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first, whole or not."""
    parent = Path(run) / "checkpoints"
    if not parent.is_dir():
        return []
    matches = [(FOLDER_NAME.fullmatch(folder.name), folder) for folder in parent.iterdir() if folder.is_dir()]
    return sorted((int(match[1]), folder) for match, folder in matches if match)


def save(
    run: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step`, then remove all but the newest `keep` up to it.

    `tensors` maps a file's stem to its tensors; a stem without tensors gets no file. `state` is JSON without
    NaN. A whole checkpoint of this step is left as it is, a damaged one is replaced. Only one process may
    save into a run.
    """
    assert keep >= 1
    check_stored_once(tensors)
    folder = checkpoint_folder(run, step)
    with saving(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        if not folder.exists() or find_damage(folder) is not None:
            write(folder, tensors, state)
    remove_older(run, step, keep)
    return folder


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WorkError(
            f"could not save checkpoint {folder}: {error}; free some space, then resume from the one before"
        ) from error


def begin_parts(run: Path, step: int, keep: int) -> bool:
    """For one of the ranks: make the folder that all of them write into; False where the step is saved already."""
    folder = checkpoint_folder(run, step)
    with saving(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        wanted = not folder.exists() or find_damage(folder) is not None
        if wanted:
            parts_folder(run, step).mkdir()
    if not wanted:
        remove_older(run, step, keep)
    return wanted


def parts_folder(run: Path, step: int) -> Path:
    """A name that every rank knows."""
    return checkpoint_folder(run, step).with_name(f"{TEMPORARY_PREFIX}parts-{step:08d}")


def write_parts(run: Path, step: int, rank: int, parts: Mapping[str, Mapping[str, Part]]) -> dict[str, Any]:
    """For every rank: a file per stem. Returns what `finish_parts` has to know of them, as JSON."""
    folder = parts_folder(run, step)
    files, tensors = {}, {}
    with saving(checkpoint_folder(run, step)):
        for stem, named in parts.items():
            held = {name: part for name, part in named.items() if part.tensor.numel()}
            path = folder / f"{stem}.{rank:05d}{SUFFIX}"
            tensors[stem] = {
                name: {"shape": part.shape, "parts": [(path.name, part.start)]} for name, part in held.items()
            }
            if held:
                write_tensors(path, {name: part.tensor for name, part in held.items()})
                sync(path)
                files[path.name] = describe(path)
    return {"files": files, "tensors": tensors}


def finish_parts(run: Path, step: int, written: Sequence[dict[str, Any]], state: dict[str, Any], keep: int) -> None:
    """For one of the ranks, when all have written: the checkpoint is whole with the last rename."""
    folder, temporary = checkpoint_folder(run, step), parts_folder(run, step)
    divided: dict[str, dict[str, Any]] = {}
    for entry in written:
        for stem, named in entry["tensors"].items():
            for name, part in named.items():
                known = divided.setdefault(stem, {}).setdefault(name, {"shape": part["shape"], "parts": []})
                known["parts"] = sorted(known["parts"] + part["parts"], key=lambda item: item[1])
    with saving(folder):
        write_json(temporary / PARTS, divided)
        write_json(temporary / STATE, state)
        files = {name: value for entry in written for name, value in entry["files"].items()}
        files |= {name: describe(temporary / name) for name in (PARTS, STATE)}
        write_json(temporary / MANIFEST, {"files": files})
        for name in (PARTS, STATE, MANIFEST):
            sync(temporary / name)
        sync(temporary)
        if folder.exists():
            discard(folder)
        os.rename(temporary, folder)
        sync(folder.parent)
    remove_older(run, step, keep)


def write(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    with atomic_folder(folder) as temporary:
        fill(temporary, tensors, state)
        if folder.exists():
            discard(folder)


def fill(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    for stem, named in tensors.items():
        if named:
            write_tensors(folder / (stem + SUFFIX), named)
    write_json(folder / STATE, state)
    write_json(folder / MANIFEST, {"files": {path.name: describe(path) for path in sorted(folder.iterdir())}})


def write_tensors(path: Path, named: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in named.items()}, path)


def describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8")


def check_stored_once(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for stem, named in tensors.items():
        for name, tensor in named.items():
            if tensor.numel() == 0:
                continue
            storage = (str(tensor.device), tensor.untyped_storage().data_ptr())
            label = f"{stem}/{name}"
            assert storage not in seen, f"{label} and {seen[storage]} share their storage; save it once"
            seen[storage] = label


def discard(folder: Path) -> None:
    """Remove a checkpoint; killed half-way, only a temporary name is left over."""
    doomed = folder.with_name(TEMPORARY_PREFIX + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    sync(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_older(run: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` up to `step`; later ones are not of this run's past, so they do not count."""
    past = [folder for own_step, folder in list_checkpoints(run) if own_step <= step]
    for folder in past[:-keep]:
        try:
            discard(folder)
        except OSError as error:
            raise WorkError(
                f"could not remove the old checkpoint {folder}: {error}; the new one is saved, "
                "remove the old one by hand and resume"
            ) from error


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None for a whole one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    for name in [STATE, *expected]:
        if name not in expected:
            return f"{MANIFEST} does not list {name}"
        damage = find_file_damage(folder / name, *expected[name])
        if damage is not None:
            return f"{name} {damage}"
    return None


def find_file_damage(path: Path, size: int, checksum: str) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"holds {found} bytes instead of {size}"
        return None if sha256_of_file(path) == checksum else "does not match its checksum"
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"


def newest(run: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, None where there are none; each damaged one is reported in a line.

    Of an exported folder, its weights.
    """
    if (weights := exported(Path(run))) is not None:
        return weights
    found = list_checkpoints(run)
    for step, folder in reversed(found):
        damage = find_damage(folder)
        if damage is None:
            return open_whole(folder, step)
        report(f"checkpoint {folder} is damaged: {damage}; trying the one before")
    if found:
        raise WorkError(
            f"none of the {len(found)} checkpoints in {Path(run) / 'checkpoints'} is whole; "
            "restore one from a copy, or start again with another output folder"
        )
    return None


def found_whole(run: Path, step: int) -> Checkpoint:
    """What `newest` found on another rank: its files are not checked again."""
    if (weights := exported(Path(run))) is not None:
        return weights
    folder = checkpoint_folder(run, step)
    if not folder.is_dir():
        raise WorkError(f"{folder} is whole for another rank and absent for this one; put the run where all see it")
    return open_whole(folder, step)


def open_whole(folder: Path, step: int) -> Checkpoint:
    with reading(folder):
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        divided = read_divided(folder)
    stems = frozenset(divided) or frozenset(path.stem for path in folder.glob("*" + SUFFIX))
    return Checkpoint(folder, step, state, stems, divided)


def exported(folder: Path) -> Checkpoint | None:
    """The weights of an export, which has one file for all stems; None for a folder that is none."""
    path = folder / EXPORTED
    if (folder / "checkpoints").is_dir():
        return None
    if path.is_file():
        state = json.loads((folder / "config.json").read_bytes()).get("progress")
        # a model that transformers made has no run behind it
        state = state if isinstance(state, dict) and isinstance(state.get("step"), int) else {"step": 0}
        stems = read_exported(path)
        return Checkpoint(folder, state["step"], state, frozenset(stems), stems)
    others = [name for name in (EXPORTED + ".index.json", "pytorch_model.bin") if (folder / name).is_file()]
    if others:
        raise RequestError(
            f"{folder} holds its weights as {others[0]}; save them as one {EXPORTED} "
            "(save_pretrained with a large max_shard_size): parts and pickles are not read"
        )
    return None


def read_exported(path: Path) -> dict[str, dict[str, Stored]]:
    """By stem and name; in the file they are called objective.STEM.NAME."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WorkError(f"{path} is cut short or damaged: {error}; export the run again") from None
    stems: dict[str, dict[str, Stored]] = {}
    for whole, shape in shapes.items():
        if whole.startswith(EXPORT_PREFIX):
            stem, _, name = whole.removeprefix(EXPORT_PREFIX).partition(".")
            stems.setdefault(stem, {})[name] = Stored(whole, shape, ((path, 0),))
    return stems


def read_divided(folder: Path) -> dict[str, dict[str, Stored]]:
    """What ranks wrote in parts, by stem and name; nothing where one process wrote all."""
    if not (folder / PARTS).exists():
        return {}
    divided = json.loads((folder / PARTS).read_text(encoding="utf-8"))
    return {
        stem: {
            name: Stored(name, tuple(entry["shape"]), tuple((folder / file, start) for file, start in entry["parts"]))
            for name, entry in named.items()
        }
        for stem, named in divided.items()
    }
