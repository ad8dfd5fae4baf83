"""SIGTERM and Ctrl-C ask a run to save and leave; a second Ctrl-C leaves at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

WANTED = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """The first signal that arrived, if any."""

    def __init__(self) -> None:
        self.signal: int = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Only the main thread of a process may install handlers; elsewhere signals keep their meaning."""
    noted = Interruption()
    try:
        previous = {number: signal.signal(number, noted.note) for number in WANTED}
    except ValueError:
        previous = {}
    try:
        yield noted
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
