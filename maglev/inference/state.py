"""A reader's state as an object: fork it, save it, go on from it. It belongs to one model, by fingerprint."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from maglev.errors import RequestError, WorkError
from maglev.files import atomic_path
from maglev.inference.checks import is_whole
from maglev.inference.reading import ReadingReport
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache

FORMAT = "maglev-state-1"
# bytes of what a file says of its tensors; ours have some thousand
LARGEST_HEADER = 1 << 24


class State:
    """What one reader carries: rings, the memory of the last token read, the position. Constant in size."""

    def __init__(self, inner: DecoderState, fingerprint: str) -> None:
        self.inner = inner
        self.fingerprint = fingerprint
        # what the last reading took; not part of what is saved
        self.reading: ReadingReport | None = None

    @property
    def memory(self) -> Tensor:
        """m of the last token read, (1, D)."""
        return self.inner.memory

    @property
    def position(self) -> int:
        """Tokens read so far."""
        return int(self.inner.position[0])

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def clone(self) -> "State":
        return State(self.inner.clone(), self.fingerprint)

    def fork(self, count: int) -> list["State"]:
        """Independent states that go on from here."""
        if not is_whole(count) or count < 1:
            raise RequestError(f"fork({count!r}): ask for a whole number of states, at least one")
        return [self.clone() for _ in range(count)]

    def save(self, path: str | Path) -> None:
        tensors = {"memory": self.inner.memory, "position": self.inner.position}
        # there are some with a delay alone
        tensors |= {"older": self.inner.older} if self.inner.older.numel() else {}
        for layer, cache in enumerate(self.inner.caches):
            tensors |= {f"key.{layer}": cache.key, f"value.{layer}": cache.value}
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"format": FORMAT, "model": self.fingerprint, "sha256": checksum(own)}
        try:
            with atomic_path(Path(path)) as temporary:
                save_file(own, temporary, metadata=metadata)
        except (OSError, SafetensorError) as error:
            raise WorkError(f"could not save the state to {path}: {error}; nothing was changed there") from error


def checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def opened(path: str | Path) -> Iterator[BinaryIO]:
    """A saved state as a file. It may be replaced by another at any time: what is read of it comes from this one file,
    and not from its name again, as `safe_open` would have it."""
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist; save a state with state.save(path)") from None
    except (SafetensorError, OSError) as error:
        raise WorkError(f"{path} cannot be read as a state, it is cut short or damaged: {error}") from None


def header_of(file: BinaryIO, path: str | Path) -> tuple[dict[str, Any], int]:
    """What the file says of its tensors, and where they begin. One that is cut short or not a state is refused."""
    size = int.from_bytes(file.read(8), "little")
    if size > LARGEST_HEADER:
        raise SafetensorError("its header would be too large")
    content = file.read(size)
    if len(content) < size:
        raise SafetensorError("its header is incomplete")
    try:
        header = json.loads(content)
    except ValueError:
        raise SafetensorError("its header is no JSON") from None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise RequestError(f"{path} is not a saved state; save one with state.save(path)")
    begin = 8 + size
    try:
        end = begin + max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, IndexError):
        raise SafetensorError("its header does not say where tensors are") from None
    if end != os.fstat(file.fileno()).st_size:
        raise SafetensorError("its tensors are incomplete")
    return header, begin


def saved_position(path: str | Path) -> int:
    """Tokens that a saved state has read, without loading it."""
    with opened(path) as file:
        header, begin = header_of(file, path)
        match header.get("position"):
            case {"dtype": "I64", "shape": [1], "data_offsets": [int(first), int()]} if first >= 0:
                file.seek(begin + first)
                content = file.read(8)
            case _:
                raise WorkError(f"{path} is damaged: position is missing or of another shape")
    return int.from_bytes(content, "little", signed=True)


def load_state(path: str | Path, decoder: Decoder, fingerprint: str) -> State:
    """Read a state back. Another model's is refused, and so is a file that is cut short or not a state."""
    empty = decoder.initial_state(1)
    with opened(path) as file:
        metadata = header_of(file, path)[0]["__metadata__"]
        if metadata.get("model") != fingerprint:
            raise RequestError(f"{path} is the state of another model; load it with the model that made it")
        file.seek(0)
        tensors = load(file.read())
    if metadata.get("sha256") != checksum(tensors):
        raise WorkError(f"{path} is damaged: its content does not match its checksum")

    def take(name: str, like: Tensor) -> Tensor:
        found = tensors.get(name)
        if found is None or found.shape != like.shape:
            raise WorkError(f"{path} is damaged: {name} is missing or of another shape")
        return found.to(like.device, like.dtype)

    caches = [
        RingCache(take(f"key.{layer}", cache.key), take(f"value.{layer}", cache.value))
        for layer, cache in enumerate(empty.caches)
    ]
    memory, position = take("memory", empty.memory), take("position", empty.position).to(torch.int64)
    older = take("older", empty.older) if empty.older.numel() else empty.older
    inner = DecoderState(caches, memory, position, older)
    return State(inner, fingerprint)
