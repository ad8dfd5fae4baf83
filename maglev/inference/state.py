"""A reader's state as an object: fork it, save it, go on from it. It belongs to one model, by fingerprint."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from maglev.errors import RequestError, WorkError
from maglev.files import atomic_path
from maglev.inference.checks import is_whole
from maglev.inference.reading import ReadingReport
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache

FORMAT = "maglev-state-1"


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
def opened(path: str | Path) -> Iterator[Any]:
    """A saved state as a file of safetensors. One that is cut short or not a state is refused."""
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                raise RequestError(f"{path} is not a saved state; save one with state.save(path)")
            yield file
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist; save a state with state.save(path)") from None
    except (SafetensorError, OSError) as error:
        raise WorkError(f"{path} cannot be read as a state, it is cut short or damaged: {error}") from None


def saved_position(path: str | Path) -> int:
    """Tokens that a saved state has read, without loading it."""
    with opened(path) as file:
        position = file.get_tensor("position")
    if position.numel() != 1:
        raise WorkError(f"{path} is damaged: position is of another shape")
    return int(position)


def load_state(path: str | Path, decoder: Decoder, fingerprint: str) -> State:
    """Read a state back. Another model's is refused, and so is a file that is cut short or not a state."""
    empty = decoder.initial_state(1)
    with opened(path) as file:
        metadata = file.metadata()
        if metadata.get("model") != fingerprint:
            raise RequestError(f"{path} is the state of another model; load it with the model that made it")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
    inner = DecoderState(caches, take("memory", empty.memory), take("position", empty.position).to(torch.int64))
    return State(inner, fingerprint)
