"""What a task asks of a model, as token ids, and what it answers; in files that go from machine to machine.

A request is a context and a continuation whose log-probability is asked. Requests are a safetensors file in which every
context stands once, scores are JSON, whose numbers come back to the bit.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maglev import files
from maglev.errors import RequestError

REQUESTS_FORMAT, SCORES_FORMAT = "maglev-requests-1", "maglev-scores-2"


@dataclass(frozen=True)
class Request:
    """log p(continuation | context); both in the model's tokens, the context with its BOS."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.context or not self.continuation:
            raise RequestError(
                f"a request has {len(self.context)} tokens of context and {len(self.continuation)} of continuation; "
                f"each needs at least one, begin the context with BOS"
            )


@dataclass(frozen=True)
class Score:
    """In nats; `greedy` says whether every token of the continuation was the most likely one."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class RequestFile:
    requests: list[Request]
    # of the tokenizer whose ids these are
    tokenizer: str
    # what was asked for: tasks, limit, few-shot examples and so on, for the step that aggregates
    setting: dict[str, Any]

    def digest(self) -> str:
        """Scores name the requests that they answer by this."""
        digest = hashlib.sha256(self.tokenizer.encode())
        for request in self.requests:
            digest.update(repr((request.context, request.continuation)).encode())
        return digest.hexdigest()


def save_requests(path: Path, content: RequestFile) -> None:
    contexts = list(dict.fromkeys(request.context for request in content.requests))
    place = {context: index for index, context in enumerate(contexts)}
    continuations = [request.continuation for request in content.requests]
    arrays = {
        "context_of": np.array([place[request.context] for request in content.requests], dtype=np.int64),
        "context_tokens": flat(contexts),
        "context_ends": ends(contexts),
        "continuation_tokens": flat(continuations),
        "continuation_ends": ends(continuations),
    }
    metadata = {"format": REQUESTS_FORMAT, "tokenizer": content.tokenizer, "sha256": content.digest()}
    metadata["setting"] = json.dumps(content.setting, sort_keys=True)
    with files.atomic_path(path) as temporary:
        save_file(arrays, temporary, metadata=metadata)


def flat(rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Half as large where the vocabulary allows it: these files travel."""
    tokens = np.array([token for row in rows for token in row], dtype=np.int32)
    return tokens.astype(np.uint16) if tokens.size and tokens.min() >= 0 and tokens.max() < 1 << 16 else tokens


def ends(rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    return np.cumsum([len(row) for row in rows], dtype=np.int64)


def load_requests(path: Path) -> RequestFile:
    remedy = f"make it with 'maglev eval tasks --requests {path}'"
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist; {remedy}") from None
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is no file of requests, or cut short ({error}); {remedy}") from None
    if metadata.get("format") != REQUESTS_FORMAT:
        raise RequestError(f"{path} is no file of requests; {remedy}")
    try:
        contexts = unflatten(arrays["context_tokens"], arrays["context_ends"])
        continuations = unflatten(arrays["continuation_tokens"], arrays["continuation_ends"])
        pairs = zip(arrays["context_of"].tolist(), continuations, strict=True)
        requests = [Request(contexts[context], continuation) for context, continuation in pairs]
        found = RequestFile(requests, metadata["tokenizer"], json.loads(metadata["setting"]))
    except (KeyError, IndexError, ValueError):
        found = None
    if found is None or metadata.get("sha256") != found.digest():
        raise RequestError(f"{path} is damaged, its content does not match its checksum; {remedy}")
    return found


def unflatten(tokens: np.ndarray, ends: np.ndarray) -> list[tuple[int, ...]]:
    firsts = [0, *ends.tolist()[:-1]]
    return [tuple(tokens[first:last].tolist()) for first, last in zip(firsts, ends.tolist(), strict=True)]


def save_scores(path: Path, asked: RequestFile, scores: Sequence[Score], facts: dict[str, Any]) -> None:
    value = {
        "format": SCORES_FORMAT,
        "requests": asked.digest(),
        "tokenizer": asked.tokenizer,
        "setting": asked.setting,
        "model": facts,
        "sha256": scores_digest(scores),
        "logprob": [score.logprob for score in scores],
        "greedy": [score.greedy for score in scores],
    }
    files.write_json(path, value)


def scores_digest(scores: Sequence[Score]) -> str:
    """Answers belong to requests by their order alone, so that is part of it."""
    return hashlib.sha256(repr([(score.logprob, score.greedy) for score in scores]).encode()).hexdigest()


@dataclass(frozen=True)
class ScoreFile:
    requests: str
    # of the tokenizer whose ids the requests are
    tokenizer: str
    setting: dict[str, Any]
    model: dict[str, Any]
    scores: list[Score]


def load_scores(path: Path) -> ScoreFile:
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != SCORES_FORMAT:
            raise ValueError(f"its format is {value['format']!r}")
        pairs = zip(value["logprob"], value["greedy"], strict=True)
        scores = [Score(float(logprob), bool(greedy)) for logprob, greedy in pairs]
        if not all(-math.inf < score.logprob <= 0 for score in scores):
            raise ValueError("a log-probability is not a number of at most 0")
        if value["sha256"] != scores_digest(scores):
            raise ValueError("they do not match their checksum")
        return ScoreFile(value["requests"], value["tokenizer"], dict(value["setting"]), dict(value["model"]), scores)
    except FileNotFoundError:
        raise RequestError(f"{path} does not exist; make it with 'maglev eval score --out {path}'") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} cannot be read as scores ({error}); make it with 'maglev eval score'") from None
