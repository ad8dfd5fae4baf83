"""A decoder with its tokenizer: read text into a state, write text from one."""

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from maglev.checkpoint import load_weights, newest
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference.checks import check_max_tokens, check_text, is_whole, token_ids
from maglev.inference.fast_step import FastDecoder, fastest
from maglev.inference.reading import TOLERANCE, ReadingReport, read_
from maglev.inference.rounding import check_weights, rounded
from maglev.inference.sampling import Sampling
from maglev.inference.state import State, load_state
from maglev.inference.stepper import Steppers
from maglev.inference.streaming import Stop, TextStream
from maglev.inference.writing import Draws, Writing
from maglev.model.decoder import Decoder
from maglev.ops.matrix import WeightFormat
from maglev.runs import TOKENIZER, read_config, run_folder
from maglev.values import canonical_json

Method = Literal["parallel", "step"]
# how far back a repetition penalty looks
RECENT_TOKENS = 1024
SEED_LIMIT = 1 << 63
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


class LanguageModel:
    """The bounded decoder in use. Without a state, reading and writing begin with BOS.

    With `weights` in 8 bits, `decoder` is a copy that holds the rounded values: passes and steps then agree. Otherwise
    it is the module given, as it is: nothing here needs gradients or changes it.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, weights: WeightFormat = "plain") -> None:
        if tokenizer.vocab_size != decoder.config.vocab_size:
            raise RequestError(
                f"the tokenizer has {tokenizer.vocab_size} tokens and the model {decoder.config.vocab_size}; "
                f"use the tokenizer of the run"
            )
        check_weights(weights, decoder.device)
        self.decoder = rounded(decoder, weights)
        self.tokenizer = tokenizer
        self.weights = weights

    @cached_property
    def fingerprint(self) -> str:
        """Configuration and weights: states of another model are told apart by it."""
        told = dict(vars(self.decoder.config))
        if told["delay"] == 1:
            # states that were saved before there were delays stay
            del told["delay"]
        digest = hashlib.sha256(canonical_json(told).encode())
        for name, tensor in sorted(self.decoder.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def read(self, text: str, state: State | None = None, method: Method = "parallel") -> State:
        """Read text into a new state; the one given stays as it is.

        "parallel" iterates passes over blocks to the decoder's own fixed point, "step" goes token by token; both end in
        the same state, to the tolerance of the precision. `state.reading` says what it took.
        """
        if method not in get_args(Method):
            raise RequestError(f"method is {method!r}; it must be one of {', '.join(get_args(Method))}")
        check_text("text", text)
        state = State(self.decoder.initial_state(1), self.fingerprint) if state is None else self.own(state).clone()
        tokens = self.tokenizer.encode(text)
        self.read_tokens(tokens if state.position else [self.tokenizer.bos_id, *tokens], state, method)
        return state

    def read_tokens(self, tokens: Iterable[int], state: State, method: Method) -> None:
        """Rewrite `state` in place."""
        ids = token_ids(tokens, self.decoder.config.vocab_size).to(self.decoder.device)
        state.inner = self.own(state).inner
        if method == "step" or len(ids) <= 1:
            state.inner = self.steppers.read(ids, state.inner)
            state.reading = ReadingReport(stepped=len(ids), tokens=len(ids))
            return
        state.reading = read_(self.reader, ids[None], state.inner)

    def own(self, state: State) -> State:
        """One of this model, in its precision and on its device, whichever load of the run made it."""
        if not isinstance(state, State):
            raise RequestError(f"state is a {type(state).__name__}; give what read() or load_state() returned")
        if state.fingerprint != self.fingerprint:
            raise RequestError("this state belongs to another model; read the text with this one")
        dtype, device = self.decoder.compute_dtype, self.decoder.device
        if (state.memory.dtype, state.memory.device) == (dtype, device):
            return state
        return State(state.inner.to(dtype, device), state.fingerprint)

    @cached_property
    def steppers(self) -> Steppers:
        """What steps and reads out: fused kernels on a GPU, which alone reads 8 bits faster than wider numbers."""
        return Steppers(fastest(self.decoder, self.weights))

    @cached_property
    def reader(self) -> Decoder | FastDecoder:
        """What reads in passes. Products of many rows gain nothing from 8 bits: they take what those stand for."""
        return self.steppers.steps if self.weights == "plain" else fastest(self.decoder)

    def release(self) -> None:
        """Free the buffers and graphs that wait for the next text; it makes them anew. PyTorch keeps that memory for
        its own next tensors until `torch.cuda.empty_cache()`.
        """
        for made in (vars(self).get("steppers"), vars(self).get("reader")):
            if isinstance(made, Steppers | FastDecoder):
                made.release()

    def step_through(self, tokens: Iterable[int], state: State) -> None:
        """Rewrite `state` in place."""
        ids = token_ids(tokens, self.decoder.config.vocab_size).to(self.decoder.device)
        state.inner = self.steppers.read(ids, self.own(state).inner)

    @torch.inference_mode()
    def next_logits(self, state: State) -> Tensor:
        """(V,), of the token after the last one read."""
        return self.steppers.steps.readout(self.own(state).memory)[0]

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
        stop: Stop = (),
        seed: int = 0,
    ) -> Writing:
        """Yield text, whole characters only, until `max_tokens`, a stop string or the end of the document.

        What comes back is an iterator whose `state` is where the text stands, after its end too. A repetition penalty
        counts the tokens of this prompt and what was written since: a state keeps no list.
        """
        check_text("prompt", prompt)
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        stream = TextStream(stop)
        check_max_tokens(max_tokens)
        generator = seeded(seed)
        state = self.read(prompt, state)
        recent = deque(self.tokenizer.encode(prompt), maxlen=RECENT_TOKENS)
        draws = Draws(max_tokens, sampling, stream, generator, recent)
        return Writing(self.steppers, self.tokenizer, state, draws)

    def load_state(self, path: str | Path) -> State:
        return load_state(path, self.decoder, self.fingerprint)


def seeded(seed: int) -> torch.Generator:
    if not is_whole(seed) or not 0 <= seed < SEED_LIMIT:
        raise RequestError(f"seed is {seed!r}; it must be a whole number, at least 0 and below 2^63")
    return torch.Generator().manual_seed(int(seed))


def device_named(name: str | torch.device) -> torch.device:
    wrong = RequestError(f"device is {str(name)!r}; it must be auto, cpu, cuda or cuda:N")
    if not isinstance(name, str | torch.device):
        raise wrong
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise wrong from None
    if device.type not in ("cpu", "cuda"):
        raise wrong
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RequestError(f"device is {str(name)!r} and PyTorch sees no CUDA GPU; use cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise RequestError(f"device is {str(name)!r} and the last GPU is cuda:{torch.cuda.device_count() - 1}")
    return device


def dtype_named(name: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """A precision that reading knows a tolerance for, by itself or by name."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = DTYPES.get(name) if isinstance(name, str) else name
    if found not in TOLERANCE:
        raise RequestError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return found


def load(
    run: str | Path,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str | None = None,
    report: Callable[[str], None] = warnings.warn,
    weights: WeightFormat = "plain",
) -> LanguageModel:
    """The newest checkpoint of a run, its decoder alone. bfloat16 on a GPU, float32 elsewhere, unless told.

    `run` is a folder, or the name of weights that come with the package.

    `weights` "int8" or "fp8" rounds every matrix row by row: another function, and fewer bytes for a GPU to read.
    """
    place = device_named(device)
    # a wrong value is told before anything is read
    precision = dtype_named(dtype, place)
    check_weights(weights, place)
    run = run_folder(run)
    config = read_config(run)
    if not (run / TOKENIZER).is_file():
        raise RequestError(f"{run} has no {TOKENIZER}; name a whole run folder")
    # a damaged checkpoint is no reason to fail while an older one is whole, and one to be told
    found = newest(run, report)
    if found is None:
        raise RequestError(f"{run} has no checkpoint yet; let 'maglev train' reach one (train.checkpoint_every)")
    decoder = Decoder(config.model)
    load_weights(decoder, run, found, "decoder")
    decoder.to(place, precision).eval().requires_grad_(False)
    return LanguageModel(decoder, Tokenizer.load(run / TOKENIZER), weights)
