"""Rows of the next step, read while the device works on this one's."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from maglev.data.loader import Batch


class ReadAhead:
    """`read` gives the rows of a step; a failure shows when its step comes. Nothing is read from `steps` on."""

    def __init__(self, read: Callable[[int], Batch], steps: int) -> None:
        self.read, self.steps = read, steps
        self.thread = ThreadPoolExecutor(1, "rows-ahead")
        self.waiting: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> Batch:
        read = self.waiting.pop(step, None)
        # steps come one after another; should another one be asked for, what was read for nothing goes
        self.waiting.clear()
        batch = self.read(step) if read is None else read.result()
        if step + 1 < self.steps:
            self.waiting[step + 1] = self.thread.submit(self.read, step + 1)
        return batch
