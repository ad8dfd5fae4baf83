"""A text on its way: pieces as they come, and the state to go on from."""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from types import TracebackType

import torch

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference.sampling import Sampling, next_token
from maglev.inference.state import State
from maglev.inference.stepper import Stepper, Steppers
from maglev.inference.streaming import TextStream


@dataclass
class Progress:
    """Where a text is: at `state` before its first piece and after its end, inside of `stepper` in between."""

    state: State | None
    fingerprint: str
    stepper: Stepper | None = None
    finished: str = ""

    def now(self) -> State | None:
        """A copy, if nothing broke off in between."""
        if self.stepper is not None:
            return State(self.stepper.state(), self.fingerprint)
        return None if self.state is None else self.state.clone()


@dataclass(frozen=True)
class Draws:
    """How the tokens of one text are chosen and where they end."""

    max_tokens: int
    sampling: Sampling
    stream: TextStream
    generator: torch.Generator
    recent: deque[int]


class Writing:
    """Iterate over it for the text. It takes a stepper at the first piece and gives it back when it ends, is closed or
    is forgotten. `state` is where it stands at any time: after the last token that was read in, which may be ahead of
    the text while a character is not whole or may belong to a stop string.
    """

    def __init__(self, steppers: Steppers, tokenizer: Tokenizer, state: State, draws: Draws) -> None:
        self._progress = Progress(state, state.fingerprint)
        # knows nothing of this object: when that is forgotten, the generator is too, and closes
        self._pieces = write(steppers, tokenizer, self._progress, draws)

    def __iter__(self) -> "Writing":
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> "Writing":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write no more; `state` stays."""
        if self._progress.stepper is not None:
            self._progress.state = self._progress.now()
        self._pieces.close()

    @property
    def state(self) -> State:
        """A copy of its own: go on from it, fork it, save it."""
        found = self._progress.now()
        if found is None:
            raise RequestError("this text was broken off by an error, so it has no state; go on from an earlier one")
        return found

    @property
    def finished(self) -> str:
        """ "length" (max_tokens), "stop" (a stop string) or "end" (of the document); empty until then."""
        return self._progress.finished


def write(steppers: Steppers, tokenizer: Tokenizer, progress: Progress, draws: Draws) -> Generator[str]:
    stream, recent = draws.stream, draws.recent
    with steppers.lend(1) as stepper:
        assert progress.state is not None
        stepper.begin(progress.state.inner)
        progress.state, progress.stepper = None, stepper
        try:
            logits = stepper.logits()[0]
            for _ in range(draws.max_tokens):
                token = next_token(logits, draws.sampling, draws.generator, recent)
                # drawn and not read
                if token == tokenizer.bos_id:
                    progress.finished = "end"
                    break
                recent.append(token)
                logits = stepper.step(torch.tensor([token]))[0]
                piece = stream.feed(tokenizer.token_bytes[token])
                if stream.stopped:
                    progress.finished = "stop"
                if piece:
                    yield piece
                if stream.stopped:
                    break
            progress.state = progress.now()
        finally:
            progress.stepper = None
    progress.finished = progress.finished or "length"
    if rest := stream.feed(b"", final=True):
        yield rest
