"""Rows that are read ahead are those of their step, once each."""

import threading

import numpy as np
import pytest

from maglev.data.loader import Batch
from maglev.train.ahead import ReadAhead


def rows(step: int) -> Batch:
    array = np.full((1, 2), step)
    return Batch(array, array, array)


def test_every_step_has_its_own_rows_and_the_next_ones_are_read_meanwhile() -> None:
    read: list[tuple[int, str]] = []
    begun = threading.Event()

    def load(step: int) -> Batch:
        read.append((step, threading.current_thread().name))
        if step == 3:
            begun.set()
        return rows(step)

    ahead = ReadAhead(load, 5)
    assert ahead.batch(2).tokens[0, 0] == 2
    # nobody asked for it yet
    assert begun.wait(10)
    assert [ahead.batch(step).tokens[0, 0] for step in (3, 4)] == [3, 4]
    assert [step for step, _ in read] == [2, 3, 4]
    assert read[0][1] == threading.current_thread().name and read[1][1] != read[0][1]


def test_a_step_that_does_not_follow_is_read_anew() -> None:
    ahead = ReadAhead(rows, 100)
    assert [ahead.batch(step).tokens[0, 0] for step in (0, 1, 0, 7, 8)] == [0, 1, 0, 7, 8]
    assert len(ahead.waiting) == 1


def test_a_failure_comes_with_its_step_and_may_be_tried_again() -> None:
    broken = {1}

    def load(step: int) -> Batch:
        if step in broken:
            raise OSError("the disk is gone")
        return rows(step)

    ahead = ReadAhead(load, 9)
    assert ahead.batch(0).tokens[0, 0] == 0
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.batch(1)
    broken.clear()
    assert ahead.batch(1).tokens[0, 0] == 1
