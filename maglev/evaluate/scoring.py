"""Log-probabilities of continuations, with the core alone: token ids in, numbers out.

Requests are brought into an order of their own before they are put into batches, so the order in which they come
changes nothing, to the bit. The size of a batch changes how products add up: scores then agree to rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError, WorkError
from maglev.evaluate.memories import DEFAULT_PASSES, Source, check_source, memories
from maglev.evaluate.requests import Request, Score
from maglev.evaluate.runs import load_objective
from maglev.inference.engine import LanguageModel
from maglev.inference.ragged import Effort, read_rows_
from maglev.inference.reading import PASS_BUDGET
from maglev.model.decoder import Decoder
from maglev.objectives.losses import Objective
from maglev.ops.matrix import WeightFormat
from maglev.runs import TOKENIZER, read_config

Reading = Literal["parallel", "step"]
READINGS: tuple[Reading, ...] = get_args(Reading)
Progress = Callable[[int, int], None]
# logits of so many positions at a time: with 32,768 tokens they are half a gigabyte
READOUT_ROWS = 4096


@dataclass(frozen=True)
class Limits:
    """Of one batch: states side by side, and tokens with their padding."""

    rows: int = 128
    tokens: int = 32_768

    def __post_init__(self) -> None:
        for name, value in (("rows", self.rows), ("tokens", self.tokens)):
            if value < 1:
                raise RequestError(f"a batch of {value} {name} holds nothing; give at least 1")


class Scorer(Protocol):
    def score(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Score]: ...


Context = tuple[int, ...]
Choices = list[tuple[int, ...]]


class BatchedScorer:
    """Every different request once, longest first: what does not fit into memory fails at once."""

    decoder: Decoder

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def score(self, requests: Sequence[Request], progress: Progress | None = None) -> list[Score]:
        groups: dict[Context, dict[tuple[int, ...], None]] = {}
        for request in requests:
            groups.setdefault(request.context, {})[request.continuation] = None
        ordered = [(context, sorted(own, key=lambda row: (len(row), row))) for context, own in groups.items()]
        ordered.sort(key=lambda group: (*self.place(*group), group[0]))
        total, found = sum(len(choices) for _, choices in ordered), dict[Request, Score]()
        for batch in self.batches(ordered):
            asked = [Request(context, choice) for context, choices in batch for choice in choices]
            scores = self.score_batch(batch)
            for score in scores:
                if not math.isfinite(score.logprob):
                    raise WorkError(
                        f"the model gives a log-probability of {score.logprob}: its weights or memories have diverged, "
                        f"and no score means anything; evaluate an earlier checkpoint or train again"
                    )
            found.update(zip(asked, scores, strict=True))
            if progress:
                progress(len(found), total)
        return [found[request] for request in requests]

    def place(self, context: Context, choices: Choices) -> tuple[int, ...]:
        """Where a context comes in the order: neighbours share a batch."""
        return (-len(context) - max(map(len, choices)),)

    def batches(self, groups: Sequence[tuple[Context, Choices]]) -> Iterator[list[tuple[Context, Choices]]]:
        """Contexts with their continuations, as many as the limits allow; one with too many of them is cut up."""
        batch: list[tuple[Context, Choices]] = []
        rows = longest = 0
        for context, choices in groups:
            rest = iter(choices)
            while part := list(islice(rest, self.limits.rows)):
                length = len(context) + max(map(len, part))
                wide, high = max(longest, length), rows + len(part)
                if batch and (high > self.limits.rows or high * wide > self.limits.tokens):
                    yield batch
                    batch, rows, longest = [], 0, 0
                batch.append((context, part))
                rows, longest = rows + len(part), max(longest, length)
        if batch:
            yield batch

    def score_batch(self, batch: Sequence[tuple[Context, Choices]]) -> list[Score]:
        raise NotImplementedError

    def add_up(self, memory: Tensor, continuations: Sequence[tuple[int, ...]]) -> list[Score]:
        """memory (N, D): before every token of all continuations, one after another."""
        targets = torch.tensor([token for row in continuations for token in row], device=memory.device)
        logprobs, hits = [], []
        for part, target in zip(memory.split(READOUT_ROWS), targets.split(READOUT_ROWS), strict=True):
            logits = self.decoder.readout(part)
            logprobs.append(logits.log_softmax(-1).gather(1, target[:, None])[:, 0].double())
            hits.append(logits.argmax(-1) == target)
        lengths = [len(row) for row in continuations]
        own = zip(torch.cat(logprobs).cpu().split(lengths), torch.cat(hits).cpu().split(lengths), strict=True)
        return [Score(sum(values.tolist()), bool(hit.all())) for values, hit in own]


class RecurrentScorer(BatchedScorer):
    """On the decoder's own memories: what a user gets. A context is read once, its state forked for the choices."""

    def __init__(self, lm: LanguageModel, limits: Limits | None = None, reading: Reading = "parallel") -> None:
        super().__init__(limits or Limits())
        self.reader, self.decoder = lm.reader, lm.decoder
        self.budget = PASS_BUDGET if reading == "parallel" else 0
        self.effort = Effort()

    def place(self, context: Context, choices: Choices) -> tuple[int, ...]:
        """By what a batch is padded to on a GPU, where every other shape is recorded anew: the length of contexts, how
        many there are, the length of their choices."""
        longest = max(map(len, choices))
        return -(len(context) - 1).bit_length(), -len(choices), -(longest - 1).bit_length(), -len(context)

    @torch.inference_mode()
    def score_batch(self, batch: Sequence[tuple[Context, Choices]]) -> list[Score]:
        device = self.decoder.device
        tokens, lengths = padded([context for context, _ in batch], device)
        state = self.reader.initial_state(len(batch))
        read_rows_(self.reader, tokens, lengths, state, budget=self.budget, effort=self.effort)
        choices = [choice for _, own in batch for choice in own]
        parent = torch.tensor([row for row, (_, own) in enumerate(batch) for _ in own], device=device)
        longer = torch.tensor([row for row, choice in enumerate(choices) if len(choice) > 1], device=device).long()
        before = state.memory[parent][:, None]  # (choices, 1, D), of the first tokens
        if len(longer):
            # the last token of a choice is asked for and not read
            more, counts = padded([choice[:-1] for choice in choices if len(choice) > 1], device)
            forked = state.rows(parent[longer])
            later = before.new_zeros(len(choices), more.shape[1], before.shape[-1])
            later[longer] = read_rows_(self.reader, more, counts, forked, budget=self.budget, effort=self.effort)
            before = torch.cat((before, later), dim=1)
        inside = torch.arange(before.shape[1]) < torch.tensor([len(choice) for choice in choices])[:, None]
        return self.add_up(before[inside.to(device)], choices)


class PassScorer(BatchedScorer):
    """On lifted or refined memories: every row whole, all positions at once."""

    def __init__(self, objective: Objective, source: Source, passes: int, limits: Limits | None = None) -> None:
        super().__init__(limits or Limits())
        self.objective, self.source, self.passes = objective, source, passes
        self.decoder = objective.decoder

    @torch.inference_mode()
    def score_batch(self, batch: Sequence[tuple[Context, Choices]]) -> list[Score]:
        pairs = [(context, choice) for context, own in batch for choice in own]
        tokens, lengths = padded([context + choice[:-1] for context, choice in pairs], self.decoder.device)
        limit = self.decoder.config.context
        if self.source == "lifted" and tokens.shape[1] > limit:
            raise RequestError(
                f"a request has {tokens.shape[1]:,} tokens and lifted memories reach {limit:,}, the context of the "
                f"prefiller Q; build the requests with --max-length {limit}"
            )
        memory = memories(self.objective, tokens, self.source, self.passes)
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        firsts = lengths - torch.tensor([len(choice) for _, choice in pairs], device=tokens.device)
        inside = (slots >= firsts[:, None]) & (slots < lengths[:, None])
        return self.add_up(memory[inside], [choice for _, choice in pairs])


def padded(rows: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows filled up on the right, and their lengths: (B, T), (B,)"""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    return tokens.to(device), lengths.to(device)


@dataclass(frozen=True)
class ScoringRun:
    """A run that answers requests, with what its numbers must name."""

    scorer: Scorer
    tokenizer: Tokenizer
    facts: dict[str, Any]
    # for tasks that write text
    lm: LanguageModel | None = None


def open_scorer(
    run: Path,
    device: torch.device,
    report: Callable[[str], None],
    *,
    source: Source = "recurrent",
    passes: int | None = None,
    weights: WeightFormat = "plain",
    reading: Reading = "parallel",
    limits: Limits | None = None,
) -> ScoringRun:
    tokenizer = run_tokenizer(run)
    config, objective, step = load_objective(run, device, report, with_prefiller=source == "lifted")
    check_source(objective, source)
    facts: dict[str, Any] = {"run": str(run), "recipe": config.recipe, "step": step, "seed": config.train.seed}
    facts |= {"memory": source, "passes": None, "weights": weights, "dtype": str(objective.decoder.compute_dtype)}
    facts["dtype"] = facts["dtype"].removeprefix("torch.")
    if source == "recurrent":
        lm = LanguageModel(objective.decoder, tokenizer, weights)
        return ScoringRun(RecurrentScorer(lm, limits, reading), tokenizer, facts | {"reading": reading}, lm)
    assert weights == "plain"
    number = DEFAULT_PASSES if passes is None else passes
    facts["passes"] = number if source == "refined" else None
    return ScoringRun(PassScorer(objective, source, number, limits), tokenizer, facts)


def run_tokenizer(run: Path) -> Tokenizer:
    if not run.is_dir():
        # says what is there instead
        read_config(run)
    if not (run / TOKENIZER).is_file():
        raise RequestError(f"{run} has no {TOKENIZER}; name a whole run folder")
    return Tokenizer.load(run / TOKENIZER)
