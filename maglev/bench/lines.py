"""Progress of a run as plain lines on stderr, for scripts."""

import sys


class Lines:
    """What training says, and every so many steps; 0 is none."""

    def __init__(self, every: int = 0) -> None:
        self.every = every

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def step(self, done: int, total: int, note: str) -> None:
        if self.every and (done % self.every == 0 or done == total):
            self.say(f"  {done} of {total}: {note}")
