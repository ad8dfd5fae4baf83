"""Checkpoints of a run: RUN/checkpoints/step-00000100/ with safetensors, JSON and a manifest of checksums.

A checkpoint is written under a temporary name, synced and renamed, so a kill leaves it whole or absent;
the manifest shows what a disk does to it later.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from maglev.errors import RequestError, WorkError
from maglev.files import TEMPORARY_PREFIX, atomic_folder, remove_leftovers, sha256_of_file, sync

FOLDER_NAME = re.compile(r"step-(\d{8,})")
STATE, MANIFEST = "state.json", "manifest.json"
SUFFIX = ".safetensors"
# an export's weights, and what stands before the name of a part's tensors there
EXPORTED, EXPORT_PREFIX = "model.safetensors", "objective"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found whole."""

    folder: Path
    step: int
    state: dict[str, Any]
    stems: frozenset[str]

    def tensors(self, stem: str) -> dict[str, Tensor]:
        """The tensors of one file, on the CPU; none where the checkpoint was saved without that file."""
        if stem not in self.stems:
            return {}
        path = self.folder / (stem + SUFFIX)
        try:
            return load_file(path, device="cpu")
        except (OSError, SafetensorError) as error:
            raise WorkError(f"{path} was whole and cannot be read any more: {error}; start again") from error


@dataclass(frozen=True)
class Exported(Checkpoint):
    """The one file of weights in an export, in place of a checkpoint."""

    def tensors(self, stem: str) -> dict[str, Tensor]:
        prefix = f"{EXPORT_PREFIX}.{stem}."
        try:
            with safe_open(self.folder / EXPORTED, framework="pt", device="cpu") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise WorkError(
                f"{self.folder / EXPORTED} is cut short or damaged: {error}; export the run again"
            ) from None


def exported(folder: Path) -> Exported | None:
    """The weights of an export; None for a folder that is none."""
    if (folder / EXPORTED).is_file() and not (folder / "checkpoints").is_dir():
        state = json.loads((folder / "config.json").read_bytes()).get("progress")
        # a model that transformers made has no run behind it
        state = state if isinstance(state, dict) and isinstance(state.get("step"), int) else {"step": 0}
        return Exported(folder, state["step"], state, frozenset())
    others = [name for name in (EXPORTED + ".index.json", "pytorch_model.bin") if (folder / name).is_file()]
    if others:
        raise RequestError(
            f"{folder} holds its weights as {others[0]}; save them as one {EXPORTED} "
            "(save_pretrained with a large max_shard_size): parts and pickles are not read"
        )
    return None


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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder.parent)
        if not folder.exists() or find_damage(folder) is not None:
            write(folder, tensors, state)
    except (OSError, SafetensorError) as error:
        raise WorkError(
            f"could not save checkpoint {folder}: {error}; free some space, then resume from the one before"
        ) from error
    remove_older(run, step, keep)
    return folder


def write(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    with atomic_folder(folder) as temporary:
        fill(temporary, tensors, state)
        if folder.exists():
            discard(folder)


def fill(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    for stem, named in tensors.items():
        if named:
            own = {name: tensor.detach().contiguous() for name, tensor in named.items()}
            save_file(own, folder / (stem + SUFFIX))
    write_json(folder / STATE, state)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256_of_file(path)} for path in sorted(folder.iterdir())
    }
    write_json(folder / MANIFEST, {"files": files})


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
    weights = exported(Path(run))
    if weights is not None:
        return weights
    found = list_checkpoints(run)
    for step, folder in reversed(found):
        damage = find_damage(folder)
        if damage is None:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            stems = frozenset(path.stem for path in folder.glob("*" + SUFFIX))
            return Checkpoint(folder, step, state, stems)
        report(f"checkpoint {folder} is damaged: {damage}; trying the one before")
    if found:
        raise WorkError(
            f"none of the {len(found)} checkpoints in {Path(run) / 'checkpoints'} is whole; "
            "restore one from a copy, or start again with another output folder"
        )
    return None
