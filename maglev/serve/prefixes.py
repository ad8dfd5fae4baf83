"""States of prompts that were read lately, so that a prompt that extends one goes on from there.

A prompt is read in chunks that begin at fixed positions, and a chunk's outcome depends on nothing but the state it
starts from and its tokens. So a state from here is, to the bit, the one that reading from the start would give.
"""

import hashlib
from array import array
from collections import OrderedDict
from typing import NamedTuple

from maglev.inference.state import State


class Boundary(NamedTuple):
    """After how many tokens of a prompt a chunk ends, and the digest of the tokens up to there."""

    end: int
    key: bytes


def boundaries(tokens: list[int], chunk: int) -> list[Boundary]:
    digest, found = hashlib.sha256(), []
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        digest.update(array("q", part).tobytes())
        found.append(Boundary(first + len(part), digest.digest()))
    return found


class Prefixes:
    """The states used last, within a number of bytes. Of one thread."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: OrderedDict[bytes, State] = OrderedDict()
        self.nbytes = 0

    def longest(self, among: list[Boundary]) -> tuple[int, State | None]:
        """The longest beginning of a prompt that was read. -> its length and a copy of its state"""
        for end, key in reversed(among):
            if key in self.held:
                self.held.move_to_end(key)
                return end, self.held[key].clone()
        return 0, None

    def keep(self, key: bytes, state: State) -> None:
        if key in self.held or state.nbytes > self.budget:
            return
        self.held[key] = state.clone()
        self.nbytes += state.nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self.held.popitem(last=False)[1].nbytes
