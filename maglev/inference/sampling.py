"""From logits to the next token. Each sequence draws from its own generator, so neighbours do not matter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.checks import is_number, is_whole


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = vars(self)[name]
            if not is_number(value):
                raise RequestError(f"{name} is {value!r}; it must be a number")
        if not 0 <= self.temperature <= 100:
            raise RequestError(f"temperature is {self.temperature}; it must be from 0 (greedy) to 100")
        if not is_whole(self.top_k) or self.top_k < 0:
            raise RequestError(
                f"top_k is {self.top_k!r}; it must be a whole number, at least 1, or 0 to keep every token"
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p is {self.min_p}; it must be from 0 to 1")
        # as far down as up: a tiny one would turn logits into infinities
        if not 0.01 <= self.repetition_penalty <= 100:
            raise RequestError(f"repetition_penalty is {self.repetition_penalty}; it must be from 0.01 to 100")


def penalise(logits: Tensor, recent: Iterable[int], penalty: float) -> Tensor:
    """Logits of tokens that came lately, divided where positive and multiplied where negative. (V,) -> (V,)"""
    seen = torch.tensor(sorted(set(recent)), dtype=torch.int64, device=logits.device)
    if penalty == 1 or not len(seen):
        return logits
    picked = logits[seen]
    return logits.index_copy(0, seen, torch.where(picked > 0, picked / penalty, picked * penalty))


class Draw(NamedTuple):
    """How one row chooses, what it draws from, and the tokens that came lately."""

    sampling: Sampling
    generator: torch.Generator
    recent: Iterable[int] = ()


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator, recent: Iterable[int] = ()) -> int:
    """Draw one token. logits (V,) float32 or better."""
    return next_tokens(logits[None], [Draw(sampling, generator, recent)])[0]


def next_tokens(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Draw one token per row, for all rows at once and where the logits are; None is a row that nobody hears.

    logits (B, V) float32 or better. What a row draws does not depend on the others.
    """
    greedy = Sampling(temperature=0)
    samplings = [greedy if draw is None else draw.sampling for draw in draws]
    logits = penalise_rows(logits, draws)
    likeliest = logits.argmax(-1).tolist()
    if not any(sampling.temperature for sampling in samplings):
        return likeliest

    def column(values: Iterable[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(list(values), dtype=dtype).to(logits.device)[:, None]  # (B, 1)

    scores = logits.double()
    # the largest is 0, so that the tiniest temperature makes no infinity that a softmax cannot take
    scores = (scores - scores.amax(-1, keepdim=True)) / column(each.temperature or 1.0 for each in samplings)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    weights = limit(
        scores.gather(-1, order).softmax(-1),
        top_k=column((min(each.top_k, logits.shape[-1]) or logits.shape[-1] for each in samplings), torch.int64),
        top_p=column(each.top_p for each in samplings),
        min_p=column(each.min_p for each in samplings),
    )
    point = column(uniform(draw) for draw in draws) * weights.sum(-1, keepdim=True)
    picked = torch.searchsorted(weights.cumsum(-1), point, right=True)
    picked = picked.minimum(weights.count_nonzero(-1)[:, None] - 1)
    drawn = order.gather(-1, picked)[:, 0].tolist()
    return [drawn[row] if each.temperature else likeliest[row] for row, each in enumerate(samplings)]


def penalise_rows(logits: Tensor, draws: Sequence[Draw | None]) -> Tensor:
    penalised = [row for row, draw in enumerate(draws) if draw is not None and draw.sampling.repetition_penalty != 1]
    if not penalised:
        return logits
    logits = logits.clone()
    for row in penalised:
        draw = draws[row]
        assert draw is not None
        logits[row] = penalise(logits[row], draw.recent, draw.sampling.repetition_penalty)
    return logits


def limit(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Weights (B, V), the largest first, with 0 for tokens that shall not be drawn. Limits (B, 1)."""
    rank = torch.arange(weights.shape[-1], device=weights.device)
    weights = torch.where(rank < top_k, weights, 0)
    weights = torch.where(weights >= min_p * weights[:, :1], weights, 0)
    # the smallest set whose weight reaches top_p: a token stays while what stands before it is less
    before = weights.cumsum(-1) - weights
    # the likeliest stays in any case: the tiniest top_p times a sum can be 0
    return torch.where((before < top_p * weights.sum(-1, keepdim=True)) | (rank == 0), weights, 0)


def uniform(draw: Draw | None) -> float:
    """From 0 to 1, of the row's own generator; one that takes the likeliest draws nothing."""
    if draw is None or not draw.sampling.temperature:
        return 0.0
    return float(torch.rand((), dtype=torch.float64, generator=draw.generator))
