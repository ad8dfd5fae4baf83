"""From logits to the next token. Each sequence draws from its own generator, so neighbours do not matter."""

from collections.abc import Iterable
from dataclasses import dataclass

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


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator, recent: Iterable[int] = ()) -> int:
    """Draw one token. logits (V,) float32 or better."""
    logits = penalise(logits, recent, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits.cpu().double()
    # the largest is 0, so that the tiniest temperature makes no infinity that a softmax cannot take
    scores = (scores - scores.max()) / sampling.temperature
    order = scores.argsort(descending=True, stable=True)
    weights = scores[order].softmax(-1)
    if sampling.top_k:
        weights[sampling.top_k :] = 0
    weights = torch.where(weights >= sampling.min_p * weights[0], weights, 0)
    # the smallest set whose weight reaches top_p: a token stays while what stands before it is less
    before = weights.cumsum(-1) - weights
    weights = torch.where(before < sampling.top_p * weights.sum(), weights, 0)
    draw = torch.rand((), dtype=torch.float64, generator=generator) * weights.sum()
    picked = int(torch.searchsorted(weights.cumsum(-1), draw, right=True))
    return int(order[min(picked, int(weights.count_nonzero()) - 1)])
