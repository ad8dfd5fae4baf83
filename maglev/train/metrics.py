"""What a run writes down while it goes: JSON lines, and TensorBoard where it is installed."""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from maglev.errors import WorkError
from maglev.files import write_text
from maglev.runs import METRICS, read_metrics

TENSORBOARD = "tensorboard"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk costs the run what came after its last checkpoint, and says where it struck."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WorkError(
            f"could not write {path}: {error}; free some space or mend permissions, then go on with --resume"
        ) from error


class Appender:
    """A file without a buffer: what was written is on its way, and nothing is left to fail at exit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, content: bytes) -> None:
        with writing(self.path):
            while content:
                content = content[self.file.write(content) :]

    def sync(self) -> None:
        with writing(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def finite(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """RUN/metrics.jsonl. Resuming at a step drops the rows after it, so that each step stands there once."""

    def __init__(self, run: Path, resume_step: int, tensorboard: bool, say: Callable[[str], None]) -> None:
        path = run / METRICS
        kept = [row for row in read_metrics(run) if row["step"] <= resume_step]
        self.validated = {row["step"] for row in kept if row.get("kind") == "validation"}
        content = "".join(json.dumps(row) + "\n" for row in kept)
        with writing(path):
            if not path.is_file() or path.read_bytes() != content.encode():
                write_text(path, content)
        self.lines = Appender(path)
        self.board = Board(run / TENSORBOARD, resume_step) if tensorboard and has_tensorboard(say) else None

    def append(self, row: dict[str, Any]) -> None:
        row = {
            name: [finite(v) for v in value] if isinstance(value, list) else finite(value)
            for name, value in row.items()
        }
        self.lines.write((json.dumps(row, allow_nan=False) + "\n").encode())
        if self.board is not None:
            self.board.append(row)

    def sync(self) -> None:
        """As durable as the checkpoint that follows."""
        self.lines.sync()

    def close(self) -> None:
        self.lines.close()
        if self.board is not None:
            self.board.close()


def has_tensorboard(say: Callable[[str], None]) -> bool:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        say(f"tensorboard is not installed, so metrics go to {METRICS} alone (maglev's extra 'tensorboard' brings it)")
        return False
    return True


def numbers(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A list's under names of their own: of every layer, or in their order."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}/{place}", each) for place, each in enumerate(value))
        else:
            yield name, value


class Board:
    """TensorBoard's event file, written at once: its own writer leaves that to a thread, whose errors nobody handles.

    The file is made with the first row, so that a finished run which is resumed stays as it is.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.folder, self.resume_step = folder, resume_step
        self.records: Any = None

    def append(self, row: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self.records is None:
            self.open()
        values = [
            Summary.Value(tag=f"{row['kind']}/{name}", simple_value=value)
            for name, value in numbers(row)
            if isinstance(value, float)
        ]
        self.write(Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values)))

    def open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.records = RecordWriter(Appender(self.folder / name))
        self.write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # TensorBoard drops what earlier files hold from this step on
        start = SessionLog(status=SessionLog.START)
        self.write(Event(wall_time=time.time(), step=self.resume_step + 1, session_log=start))

    def write(self, event: Any) -> None:
        self.records.write(event.SerializeToString())

    def close(self) -> None:
        if self.records is not None:
            self.records.close()
