"""States by name, on disk: written whole or not at all, counted, and forgotten after a while.

The name of a file is the hexadecimal form of the session's name: nothing that a client sends reaches the file system
as it is, and names that differ in case alone are two everywhere.
"""

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maglev.errors import RequestError, WorkError
from maglev.files import TEMPORARY_PREFIX, write_bytes
from maglev.inference.engine import LanguageModel
from maglev.inference.state import State, saved_position
from maglev.serve.faults import Fault

log = logging.getLogger("maglev.serve")

SESSION_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
NAME = re.compile(SESSION_NAME)
SUFFIX = ".safetensors"
DAY = 86_400
# no save takes that long: what is older was left by a server that was killed
LEFTOVER_SECONDS = 600


@dataclass(frozen=True)
class Session:
    name: str
    nbytes: int
    used: float


def check_name(name: str, param: str) -> str:
    if not NAME.fullmatch(name):
        raise Fault(
            400,
            "a session's name has 1 to 64 letters, digits, - and _, and begins with a letter or digit",
            param=param,
            code="invalid_session_name",
        )
    return name


class Sessions:
    """Of one folder. Calls block on the disk: an event loop leaves them to threads."""

    def __init__(self, folder: Path, lm: LanguageModel, most: int, days: float) -> None:
        self.folder, self.lm, self.most, self.seconds = Path(folder), lm, most, days * DAY
        self.lock = threading.Lock()
        # names that a request on its way is going to use
        self.promised: list[str] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.remove_leftovers()
        except OSError as error:
            raise RequestError(
                f"sessions cannot be kept in {folder} ({error.strerror}); name another folder with --sessions DIR"
            ) from None

    def remove_leftovers(self) -> None:
        for path in self.folder.glob(TEMPORARY_PREFIX + "*"):
            if age(path) > LEFTOVER_SECONDS:
                path.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / (check_name(name, "session").encode("ascii").hex() + SUFFIX)

    def all(self) -> list[Session]:
        """Those that are not too old; the others are removed."""
        found = []
        for path in self.folder.glob("*" + SUFFIX):
            name = name_of(path)
            if name is None:
                continue
            try:
                facts = path.stat()
                if time.time() - facts.st_mtime > self.seconds:
                    path.unlink()
                    continue
            except FileNotFoundError:
                continue
            found.append(Session(name, facts.st_size, facts.st_mtime))
        return sorted(found, key=lambda session: session.name)

    def find(self, name: str) -> Session:
        path = self.path(name)
        try:
            facts = path.stat()
        except FileNotFoundError:
            raise unknown(name) from None
        if time.time() - facts.st_mtime > self.seconds:
            path.unlink(missing_ok=True)
            raise unknown(name)
        return Session(name, facts.st_size, facts.st_mtime)

    def load(self, name: str) -> State:
        with self.readable(name) as path:
            state = self.lm.load_state(path)
            # its time begins anew with every use
            path.touch()
        return state

    def tokens(self, name: str) -> int:
        """How many it has read, those it wrote among them; BOS does not count, as in a prompt."""
        with self.readable(name) as path:
            return max(0, saved_position(path) - 1)

    @contextmanager
    def readable(self, name: str) -> Iterator[Path]:
        self.find(name)
        path = self.path(name)
        try:
            yield path
        except (RequestError, WorkError) as error:
            if not path.exists():
                raise unknown(name) from None
            log.error("session %s: %s", name, error)
            raise Fault(
                409,
                f"session '{name}' is damaged or belongs to another model; remove it or use another name",
                param="session",
                code="session_unusable",
            ) from None

    @contextmanager
    def promise(self, name: str) -> Iterator[None]:
        """Keep a place for a session that is about to be saved. One that exists may be written again."""
        check_name(name, "save_as")
        with self.lock:
            kept = {session.name for session in self.all()} | set(self.promised)
            if name not in kept and len(kept) >= self.most:
                raise Fault(
                    409,
                    f"there are {self.most} sessions, which is this server's limit; remove one",
                    param="save_as",
                    code="session_quota",
                )
            self.promised.append(name)
        try:
            yield
        finally:
            with self.lock:
                self.promised.remove(name)

    def save(self, name: str, state: State) -> Session:
        """On disk when this returns, whatever happens to the server."""
        try:
            state.save(self.path(name))
        except WorkError as error:
            log.error("session %s: %s", name, error)
            raise Fault(
                500, f"session '{name}' could not be saved; it is as it was", code="session_not_saved"
            ) from None
        return Session(name, state.nbytes, time.time())

    def fork(self, name: str, to: str) -> Session:
        with self.promise(to):
            self.find(name)
            try:
                content = self.path(name).read_bytes()
            except FileNotFoundError:
                raise unknown(name) from None
            write_bytes(self.path(to), content)
            return self.find(to)

    def remove(self, name: str) -> None:
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            raise unknown(name) from None


def age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def name_of(path: Path) -> str | None:
    """None for a file that is no session of ours."""
    try:
        name = bytes.fromhex(path.stem).decode("ascii")
    except ValueError:
        return None
    return name if NAME.fullmatch(name) else None


def unknown(name: str) -> Fault:
    return Fault(404, f"there is no session '{name}'", param="session", code="session_not_found")
