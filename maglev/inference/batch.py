"""Write several texts at once: one step for all rows, draws of each row's own."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.checks import check_max_tokens, check_text, items_of
from maglev.inference.engine import RECENT_TOKENS, LanguageModel, seeded
from maglev.inference.fast_step import BUCKETS
from maglev.inference.sampling import Draw, Sampling, next_tokens
from maglev.inference.state import State
from maglev.inference.streaming import Stop, TextStream, stop_strings
from maglev.model.state import DecoderState


@dataclass
class Row:
    """One text being written."""

    generator: torch.Generator
    stream: TextStream
    recent: deque[int]
    sampling: Sampling
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: str = ""

    @property
    def scored(self) -> bool:
        """Whether `take` needs the logits."""
        return True

    def take(self, token: int, logits: Tensor | None, piece: bytes) -> None:
        """The token that was drawn from logits (V,), and its bytes."""
        assert logits is not None
        self.tokens.append(token)
        self.logprobs.append(float(logits.double().log_softmax(-1)[token]))
        self.recent.append(token)
        self.text += self.stream.feed(piece)
        if self.stream.stopped:
            self.finished = "stop"


@dataclass(frozen=True)
class Completion:
    """`finished`: "length" (max_tokens), "stop" (a stop string) or "end" (of the document)."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finished: str
    state: State


def generate_batch(
    lm: LanguageModel,
    prompts: Iterable[str],
    *,
    states: Iterable[State] | None = None,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Stop = (),
    seeds: Iterable[int] | None = None,
) -> list[Completion]:
    """A text per prompt. A row draws from its own seed, so that its text does not depend on its neighbours.

    With `states`, one per prompt, each prompt goes on from its state, and "" adds nothing to it; the states given stay
    as they are.

    `logprobs` are those of the model, before temperature and limits. The batch keeps its size to the end, on a GPU that
    of the smallest bucket of `fast_step` which holds it: where that is the same, two calls add up in the same order, so
    their texts agree to the bit. More prompts than the largest bucket holds are written in groups.
    """
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise RequestError(f"sampling is a {type(sampling).__name__}; give a Sampling")
    prompts = items_of("prompts", prompts, "texts, or use generate for one")
    if not prompts:
        raise RequestError("no prompts; give at least one")
    for index, prompt in enumerate(prompts):
        check_text(f"prompt {index} of {len(prompts)}", prompt)
    begins = beginnings(lm, states, len(prompts))
    seeds = list(range(len(prompts))) if seeds is None else items_of("seeds", seeds, "whole numbers")
    if len(seeds) != len(prompts):
        raise RequestError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one per prompt")
    check_max_tokens(max_tokens)
    stops = stop_strings(stop)
    rows = [
        Row(
            seeded(seed),
            TextStream(stops),
            deque(lm.tokenizer.encode(prompt), maxlen=RECENT_TOKENS),
            sampling,
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    found = []
    for first in range(0, len(rows), max(BUCKETS)):
        group = slice(first, first + max(BUCKETS))
        inner = DecoderState.join([lm.read(*begin).inner for begin in zip(prompts[group], begins[group], strict=True)])
        ends = write_rows(lm, rows[group], inner, max_tokens)
        found += [finish(lm, row, end) for row, end in zip(rows[group], ends, strict=True)]
    return found


def beginnings(lm: LanguageModel, states: Iterable[State] | None, count: int) -> list[State | None]:
    """What each of so many prompts goes on from."""
    if states is None:
        return [None] * count
    found = [lm.own(state) for state in items_of("states", states, "states")]
    if len(found) != count:
        raise RequestError(f"{len(found)} states for {count} prompts; give one per prompt")
    return list(found)


def write_rows(lm: LanguageModel, rows: list[Row], inner: DecoderState, max_tokens: int) -> list[DecoderState]:
    """All rows to their end. -> the state of each after its last token"""
    ends: list[DecoderState | None] = [None] * len(rows)
    with lm.steppers.lend(len(rows)) as stepper:
        stepper.begin(inner)
        logits = stepper.logits()
        for _ in range(max_tokens):
            step = draw(lm, rows, logits)
            for index, row in enumerate(rows):
                # the end of a document is drawn and not read
                if row.finished == "end" and ends[index] is None:
                    ends[index] = stepper.row(index)
            logits = stepper.step(torch.tensor(step))
            for index, row in enumerate(rows):
                if row.finished and ends[index] is None:
                    ends[index] = stepper.row(index)
            if all(row.finished for row in rows):
                break
        return [stepper.row(index) if end is None else end for index, end in enumerate(ends)]


def draw(lm: LanguageModel, rows: Sequence[Row | None], logits: Tensor) -> list[int]:
    """One token for every row that still writes; the others are stepped along on BOS and stay unheard."""
    bos = lm.tokenizer.bos_id
    writing = {index: row for index, row in enumerate(rows) if row is not None and not row.finished}
    # all rows, so that a batch is drawn from in one shape to its end
    draws = [
        Draw(writing[index].sampling, writing[index].generator, writing[index].recent) if index in writing else None
        for index in range(len(rows))
    ]
    drawn = next_tokens(logits, draws)
    scored = [index for index, row in writing.items() if row.scored]
    own = dict(zip(scored, logits[scored].cpu(), strict=True)) if scored else {}
    for index, row in writing.items():
        if drawn[index] == bos:
            row.finished = "end"
        else:
            row.take(drawn[index], own.get(index), lm.tokenizer.token_bytes[drawn[index]])
    return [drawn[index] if index in writing else bos for index in range(len(rows))]


def finish(lm: LanguageModel, row: Row, end: DecoderState) -> Completion:
    text = row.text if row.finished == "stop" else row.text + row.stream.feed(b"", final=True)
    return Completion(text, row.tokens, row.logprobs, row.finished or "length", State(end, lm.fingerprint))
