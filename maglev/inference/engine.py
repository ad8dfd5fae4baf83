"""A decoder with its tokenizer: read text into a state, write text from one."""

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from maglev.checkpoint import newest
from maglev.config import canonical_json
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference.checks import check_max_tokens, check_tokens
from maglev.inference.fast_step import FastDecoder
from maglev.inference.reading import ReadingReport, read_
from maglev.inference.rounding import check_weights, rounded
from maglev.inference.sampling import Sampling, next_token
from maglev.inference.state import State, load_state
from maglev.inference.stepper import Steppers
from maglev.inference.streaming import TextStream
from maglev.model.decoder import Decoder
from maglev.ops.matrix import WeightFormat
from maglev.runs import TOKENIZER, read_config

Method = Literal["parallel", "step"]
# how far back a repetition penalty looks
RECENT_TOKENS = 1024
SEED_LIMIT = 1 << 63


class LanguageModel:
    """The bounded decoder in use. Without a state, reading and writing begin with BOS.

    With `weights` in 8 bits, `decoder` is a copy that holds the rounded values: passes and steps then agree.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, weights: WeightFormat = "plain") -> None:
        if tokenizer.vocab_size != decoder.config.vocab_size:
            raise RequestError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model {decoder.config.vocab_size}; "
                f"use the tokenizer of the run"
            )
        check_weights(weights, decoder.device)
        self.decoder = rounded(decoder, weights).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.weights = weights

    @cached_property
    def fingerprint(self) -> str:
        """Configuration and weights: states of another model are told apart by it."""
        digest = hashlib.sha256(canonical_json(vars(self.decoder.config)).encode())
        for name, tensor in sorted(self.decoder.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def read(self, text: str, state: State | None = None, method: Method = "parallel") -> State:
        """Read text into a new state; the one given stays as it is.

        "parallel" iterates passes over chunks to the decoder's own fixed point, "step" goes token by token; both end in
        the same state, to the tolerance of the precision. `state.reading` says what it took.
        """
        if method not in get_args(Method):
            raise RequestError(f"method is {method!r}; it must be one of {', '.join(get_args(Method))}")
        state = State(self.decoder.initial_state(1), self.fingerprint) if state is None else self.own(state).clone()
        tokens = self.tokenizer.encode(text)
        self.read_tokens(tokens if state.position else [self.tokenizer.bos_id, *tokens], state, method)
        return state

    def read_tokens(self, tokens: list[int], state: State, method: Method) -> None:
        """Rewrite `state` in place."""
        batch = torch.tensor([tokens], dtype=torch.int64)
        check_tokens(batch, self.decoder.config.vocab_size)
        if method == "step" or len(tokens) <= 1:
            self.step_through(tokens, state)
            state.reading = ReadingReport(stepped=len(tokens), tokens=len(tokens))
            return
        state.reading = read_(self.reader, batch.to(self.decoder.device), state.inner)

    def own(self, state: State) -> State:
        if not isinstance(state, State):
            raise RequestError(f"state is a {type(state).__name__}; give what read() or load_state() returned")
        if state.fingerprint != self.fingerprint:
            raise RequestError("this state belongs to another model; read the text with this one")
        return state

    @cached_property
    def steppers(self) -> Steppers:
        """What steps and reads out: fused kernels on a GPU, which alone reads 8 bits faster than wider numbers.

        A CPU steps the decoder itself: the order of work that suits kernels gains next to nothing there.
        """
        on_gpu = self.decoder.device.type == "cuda"
        return Steppers(FastDecoder(self.decoder, weights=self.weights) if on_gpu else self.decoder)

    @cached_property
    def reader(self) -> Decoder | FastDecoder:
        """What reads in passes. Products of many rows gain nothing from 8 bits: they take what those stand for."""
        if self.weights == "plain" or self.decoder.device.type != "cuda":
            return self.steppers.steps
        return FastDecoder(self.decoder)

    def step_through(self, tokens: list[int], state: State) -> None:
        """Rewrite `state` in place."""
        batch = torch.tensor(tokens, dtype=torch.int64, device=self.decoder.device)
        state.inner = self.steppers.read(batch, state.inner)

    @torch.inference_mode()
    def next_logits(self, state: State) -> Tensor:
        """(V,), of the token after the last one read."""
        return self.steppers.steps.readout(state.memory)[0]

    def generate(
        self,
        prompt: str = "",
        *,
        state: State | None = None,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield text, whole characters only, until `max_tokens`, a stop string or the end of the document.

        A repetition penalty counts the tokens of this prompt and what was written since: a state keeps no list.
        """
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        stream = TextStream(stop)
        check_max_tokens(max_tokens)
        generator = seeded(seed)
        state = self.read(prompt, state)
        recent = deque(self.tokenizer.encode(prompt), maxlen=RECENT_TOKENS)
        return self.write(state, max_tokens, sampling, stream, generator, recent)

    def write(
        self,
        state: State,
        max_tokens: int,
        sampling: Sampling,
        stream: TextStream,
        generator: torch.Generator,
        recent: deque[int],
    ) -> Iterator[str]:
        """Go on from `state`, which stays as it is. Texts that are written by turns do not meet: each has a stepper."""
        with self.steppers.lend(1) as stepper:
            stepper.begin(state.inner)
            logits = stepper.logits()[0]
            for _ in range(max_tokens):
                token = next_token(logits, sampling, generator, recent)
                if token == self.tokenizer.bos_id:
                    break
                recent.append(token)
                logits = stepper.step(torch.tensor([token]))[0]
                if piece := stream.feed(self.tokenizer.token_bytes[token]):
                    yield piece
                if stream.stopped:
                    return
        if rest := stream.feed(b"", final=True):
            yield rest

    def load_state(self, path: str | Path) -> State:
        return load_state(path, self.decoder, self.fingerprint)


def seeded(seed: int) -> torch.Generator:
    if not 0 <= seed < SEED_LIMIT:
        raise RequestError(f"seed is {seed}; it must be at least 0 and below 2^63")
    return torch.Generator().manual_seed(seed)


def device_named(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise RequestError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device is {name!r} and PyTorch sees no CUDA GPU; use cpu or auto")
    return device


def load(
    run: str | Path,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    report: Callable[[str], None] = warnings.warn,
    weights: WeightFormat = "plain",
) -> LanguageModel:
    """The newest checkpoint of a run, its decoder alone. bfloat16 on a GPU, float32 elsewhere, unless told.

    `weights` "int8" or "fp8" rounds every matrix row by row: another function, and fewer bytes for a GPU to read.
    """
    place = device_named(device)
    # a wrong value is told before anything is read
    check_weights(weights, place)
    run = Path(run)
    config = read_config(run)
    if not (run / TOKENIZER).is_file():
        raise RequestError(f"{run} has no {TOKENIZER}; name a whole run folder")
    # a damaged checkpoint is no reason to fail while an older one is whole, and one to be told
    found = newest(run, report)
    if found is None:
        raise RequestError(f"{run} has no checkpoint yet; let 'maglev train' reach one (train.checkpoint_every)")
    decoder = Decoder(config.model)
    decoder.load_state_dict(found.tensors("decoder"))
    decoder.to(place, dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32))
    return LanguageModel(decoder, Tokenizer.load(run / TOKENIZER), weights)
