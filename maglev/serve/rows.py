"""One prompt of a request and the texts that go on from it, as the engine's thread sees them."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maglev.inference.batch import Row
from maglev.inference.state import State
from maglev.model_config import ModelConfig
from maglev.serve.faults import Fault
from maglev.serve.prefixes import Boundary

MEMORY_FACTS = ("memory_change", "memory_gate")


def memory_facts(config: ModelConfig) -> list[str]:
    """What there is to tell of each token: a network may have no memory, or take it in without gates."""
    return [
        name for name in MEMORY_FACTS if config.tells_gates or (config.memory != "none" and name == "memory_change")
    ]


@dataclass(frozen=True)
class TokenScore:
    """A token with its logprob before temperature and limits, the likeliest ones beside it, and where it begins."""

    token: int
    logprob: float
    likeliest: list[tuple[int, float]]
    offset: int


@dataclass(frozen=True)
class Piece:
    """What one choice gained; `finished` is empty until its end. The state comes along where it is to be saved."""

    choice: int
    text: str
    scores: list[TokenScore]
    tokens: int
    finished: str = ""
    state: State | None = None
    # what each token did to the memory, by its name in the answer, as far as it was asked for
    watched: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptRead:
    """`scores` of the prompt's own tokens where they were asked for, `cached` tokens did not have to be read."""

    choices: range
    scores: list[TokenScore]
    cached: int


Event = Piece | PromptRead | Fault


def score(logits: Tensor, token: int, top: int, offset: int) -> TokenScore:
    """logits (V,)"""
    logprobs = logits.double().log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenScore(token, float(logprobs[token]), list(zip(ids.tolist(), values.tolist())), offset)


@dataclass
class ServedRow(Row):
    """A text whose pieces go out as they come. `top` is how many likely tokens to name beside each, None for no
    logprobs at all."""

    choice: int = 0
    max_tokens: int = 16
    top: int | None = None
    shown: int = 0
    unsent: list[TokenScore] = field(default_factory=list)
    # what each token did to the memory since the last piece, of every name in MEMORY_FACTS that was asked for
    watched: dict[str, list[float]] = field(default_factory=dict)

    @property
    def scored(self) -> bool:
        return self.top is not None

    def take(self, token: int, logits: Tensor | None, piece: bytes) -> None:
        if self.top is not None and logits is not None:
            self.unsent.append(score(logits, token, self.top, len(self.text) + len(self.stream.held)))
        self.tokens.append(token)
        self.recent.append(token)
        self.text += self.stream.feed(piece)
        if self.stream.stopped:
            self.finished = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finished = "length"

    def piece(self, state: State | None = None) -> Piece | None:
        """What was not sent yet, if there is anything to say."""
        if self.finished in ("end", "length"):
            self.text += self.stream.feed(b"", final=True)
        text = self.text[self.shown :]
        if not text and not self.finished:
            return None
        self.shown = len(self.text)
        # tokens of what is still held back, or was cut off by a stop string, are not shown
        cut = self.shown if self.finished in ("", "stop") else self.shown + 1
        ready = [each for each in self.unsent if each.offset < cut]
        self.unsent = self.unsent[len(ready) :]
        watched, self.watched = self.watched, {name: [] for name in self.watched}
        return Piece(self.choice, text, ready, len(self.tokens), self.finished, state, watched)


@dataclass(eq=False, repr=False)
class Job:
    """A prompt, the state it goes on from, and its rows. Everything after `events` belongs to the engine's thread."""

    tokens: list[int]
    boundaries: list[Boundary]
    rows: list[ServedRow]
    start: State | None
    # how many likely tokens to name beside each token of the prompt; None: its logprobs are not wanted
    prompt_top: int | None
    prompt_offsets: list[int]
    wants_state: bool
    deadline: float
    events: asyncio.Queue[Event]
    cancelled: bool = False
    began: float = 0.0
    state: State | None = None
    read: int = 0
    cached: int = 0
    waiting: deque[ServedRow] = field(default_factory=deque)
    prompt_scores: list[TokenScore] = field(default_factory=list)

    @property
    def choices(self) -> range:
        return range(self.rows[0].choice, self.rows[-1].choice + 1)


@torch.inference_mode()
def score_prompt(logits: Tensor, tokens: list[int], top: int, offsets: list[int]) -> list[TokenScore]:
    """logits (T, V), of these tokens"""
    return [score(own, token, top, offset) for own, token, offset in zip(logits, tokens, offsets, strict=True)]
