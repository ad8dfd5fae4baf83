"""From a request to jobs for the engine: everything that can be refused is refused here."""

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass

from maglev.errors import RequestError
from maglev.inference.checks import check_text
from maglev.inference.engine import RECENT_TOKENS, SEED_LIMIT, LanguageModel, seeded
from maglev.inference.reading import default_chunk
from maglev.inference.sampling import Sampling
from maglev.inference.state import State
from maglev.inference.streaming import TextStream, stop_strings
from maglev.serve.faults import Fault
from maglev.serve.limits import Limits
from maglev.serve.prefixes import boundaries
from maglev.serve.rows import Job, ServedRow, memory_facts
from maglev.serve.schema import CompletionRequest
from maglev.serve.wire import token_offsets

DEFAULT_MAX_TOKENS = 16
LONGEST_STOP = 256


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Plan:
    jobs: list[Job]
    # of each choice
    prompts: list[Prompt]
    prompt_tokens: int


def wrong(message: str, param: str) -> Fault:
    return Fault(400, message, param=param)


def check_request(body: CompletionRequest, limits: Limits) -> None:
    """What needs no tokenizer and no state."""
    refuse_unsupported(body)
    if (body.max_tokens or 0) > limits.max_tokens:
        raise wrong(f"max_tokens is {body.max_tokens}; this server writes at most {limits.max_tokens}", "max_tokens")
    count = prompt_count(body) * (body.n or 1)
    if count > limits.choices:
        raise wrong(f"prompts times n is {count}; this server takes at most {limits.choices}", "n")
    if body.save_as is not None and count != 1:
        raise wrong("save_as goes with one prompt and n=1: a name stands for one state", "save_as")
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options goes with stream=true alone", "stream_options")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(not 0 < len(stop) <= LONGEST_STOP for stop in stops):
        raise wrong(f"a stop string has 1 to {LONGEST_STOP} characters", "stop")


def refuse_unsupported(body: CompletionRequest) -> None:
    """Better no answer than one that silently left something away."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise wrong("best_of is not supported; leave it away or set it to n", "best_of")
    for name in ("suffix", "logit_bias", "presence_penalty", "frequency_penalty"):
        if vars(body)[name]:
            raise wrong(f"{name} is not supported; leave it away", name)


def prompt_count(body: CompletionRequest) -> int:
    if not isinstance(body.prompt, list) or (body.prompt and isinstance(body.prompt[0], int)):
        return 1
    if not body.prompt:
        raise wrong("prompt is an empty list; give at least one prompt", "prompt")
    return len(body.prompt)


def prompts_of(body: CompletionRequest, lm: LanguageModel, limits: Limits) -> list[Prompt]:
    given = body.prompt
    if given is None or isinstance(given, str):
        several: list[str | list[int]] = [given or ""]
    elif given and isinstance(given[0], int):
        several = [[token for token in given if isinstance(token, int)]]
    else:
        several = [each for each in given if not isinstance(each, int)]
    found = [read_prompt(each, lm) for each in several]
    longest = max(len(prompt.tokens) for prompt in found)
    if longest > limits.prompt_tokens:
        raise wrong(
            f"a prompt has {longest:,} tokens; this server reads at most {limits.prompt_tokens:,}",
            "prompt",
        )
    return found


def read_prompt(given: str | list[int], lm: LanguageModel) -> Prompt:
    if isinstance(given, str):
        try:
            check_text("prompt", given)
        except RequestError as error:
            raise wrong(str(error), "prompt") from None
        return Prompt(given, lm.tokenizer.encode(given))
    vocabulary = lm.tokenizer.vocab_size
    outside = next((token for token in given if token >= vocabulary), None)
    if outside is not None:
        raise wrong(f"token id {outside} is outside of the vocabulary of {vocabulary:,}", "prompt")
    # a client that knows the tokenizer may have begun the document itself
    tokens = given[1:] if given[:1] == [lm.tokenizer.bos_id] else given
    return Prompt(lm.tokenizer.decode(tokens), tokens)


def make_plan(body: CompletionRequest, lm: LanguageModel, limits: Limits, start: State | None) -> Plan:
    """Tokenises, so it may take a while: not for an event loop."""
    prompts, each = prompts_of(body, lm, limits), body.n or 1
    seed = secrets.randbelow(SEED_LIMIT) if body.seed is None else body.seed
    events: asyncio.Queue = asyncio.Queue()
    deadline = time.monotonic() + limits.seconds
    # more than passes go over at a time would only keep others waiting
    chunk = min(limits.chunk, default_chunk(lm.decoder.config))
    told = memory_facts(lm.decoder.config) if body.memory else []
    jobs = []
    for number, prompt in enumerate(prompts):
        choices = range(number * each, (number + 1) * each)
        rows = [row_of(body, prompt, choice, (seed + choice - choices[0]) % SEED_LIMIT, told) for choice in choices]
        tokens = prompt.tokens if start is not None else [lm.tokenizer.bos_id, *prompt.tokens]
        scored = bool(body.echo) and body.logprobs is not None
        jobs.append(
            Job(
                tokens=tokens,
                boundaries=boundaries(tokens, chunk),
                rows=rows,
                start=start,
                prompt_top=body.logprobs if scored else None,
                prompt_offsets=token_offsets(lm.tokenizer, prompt.tokens) if scored else [],
                wants_state=body.save_as is not None,
                deadline=deadline,
                events=events,
            )
        )
    of_choices = [prompt for prompt in prompts for _ in range(each)]
    return Plan(jobs, of_choices, sum(len(prompt.tokens) for prompt in prompts))


def row_of(body: CompletionRequest, prompt: Prompt, choice: int, seed: int, told: list[str]) -> ServedRow:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    sampling = Sampling(
        temperature=given(body.temperature, 1.0),
        top_k=body.top_k or 0,
        top_p=given(body.top_p, 1.0),
        min_p=given(body.min_p, 0.0),
        repetition_penalty=given(body.repetition_penalty, 1.0),
    )
    return ServedRow(
        generator=seeded(seed),
        stream=TextStream(stop_strings(body.stop)),
        recent=deque(prompt.tokens, maxlen=RECENT_TOKENS),
        sampling=sampling,
        choice=choice,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        top=body.logprobs,
        watched={name: [] for name in told},
    )
