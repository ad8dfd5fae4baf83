"""`maglev generate`"""

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import AsJson, Device, ModelArgument
from maglev.cli.output import say
from maglev.cli.weights import Weights, weight_format
from maglev.errors import RequestError

if TYPE_CHECKING:
    import torch

    from maglev.inference import LanguageModel

READS = ("recurrent", "lifted")
# the model, the text as it comes, and when reading began
Begun = tuple["LanguageModel", Iterable[str], float]


def generate(
    run: ModelArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to go on from.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option("--prompt-file", metavar="FILE", help="The prompt from a file; - is stdin.")
    ] = None,
    read: Annotated[
        str,
        typer.Option(
            "--read", help="The prompt's memories: recurrent (the decoder's own) or lifted (the prefiller's)."
        ),
    ] = "recurrent",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="How many tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Only the K likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Only the likeliest tokens that reach P.")] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Only tokens at least P times as likely as the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 makes what came lately less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same text.")] = 0,
    weights: Weights = "plain",
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Stream text from the bounded decoder."""
    check_read(read, repetition_penalty, weights)
    text = read_prompt(prompt, prompt_file)
    from maglev.model.accounting import state_nbytes
    from maglev.train.distributed import resolve_device

    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or (),
        "seed": seed,
    }
    place = resolve_device(device, setting="--device")
    # a wrong value is told here, before anything is printed
    if read == "lifted":
        lm, written, began = begin_lifted(run, place, text, sampling)
    else:
        lm, written, began = begin_recurrent(run, place, weights, text, sampling)
    if not as_json:
        stream(text, written)
        return
    result = {
        "prompt": text,
        "text": "".join(written),
        "memory": "recurrent",
        "prompt_memory": read,
        "weights": lm.weights,
        "prompt_tokens": 1 + len(lm.tokenizer.encode(text)),
        "state_bytes": state_nbytes(lm.decoder.config, lm.decoder.compute_dtype.itemsize),
        "seconds": time.perf_counter() - began,
    }
    print(json.dumps(result))


def check_read(read: str, repetition_penalty: float, weights: str) -> None:
    if read not in READS:
        raise RequestError(f"--read is {read!r}; it must be one of {', '.join(READS)}")
    if read == "lifted" and repetition_penalty != 1:
        # a state keeps no list of tokens, so the penalty would silently miss the prompt's
        raise RequestError("--repetition-penalty goes with --read recurrent alone; leave one of them away")
    if read == "lifted" and weight_format(weights) != "plain":
        raise RequestError(
            f"--weights {weights} goes with --read recurrent alone, since nobody rounds the prefiller; leave one away"
        )


def begin_recurrent(run: Path, device: "torch.device", weights: str, prompt: str, sampling: dict[str, Any]) -> Begun:
    import maglev

    lm = maglev.load(run, device=str(device), report=say, weights=weight_format(weights))
    began = time.perf_counter()
    return lm, lm.generate(prompt, **sampling), began


def begin_lifted(run: Path, device: "torch.device", prompt: str, sampling: dict[str, Any]) -> Begun:
    from maglev.evaluate.reading import LiftedReader

    reader = LiftedReader(run, str(device), say)
    began = time.perf_counter()
    written = reader.lm.generate(state=reader.read(prompt), **sampling)
    say("the prompt is read with lifted memories, the prefiller's; what follows is the decoder's own")
    return reader.lm, written, began


def stream(prompt: str, written: Iterable[str]) -> None:
    print(prompt, end="", flush=True)
    for piece in written:
        print(piece, end="", flush=True)
    print()


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise RequestError("--prompt and --prompt-file exclude each other; give one of them")
    if prompt_file is None:
        return encodable(prompt or "")
    if prompt_file == "-" and sys.stdin is None:
        raise RequestError("--prompt-file -: stdin is closed; name a text file or pipe one in")
    try:
        content = sys.stdin.buffer.read() if prompt_file == "-" else Path(prompt_file).read_bytes()
    except OSError as error:
        raise RequestError(f"--prompt-file {prompt_file}: {error.strerror}; name a text file") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt-file {prompt_file} is not UTF-8 text ({error.reason})") from None


def encodable(prompt: str) -> str:
    """Bytes of an argument that are no UTF-8 come as lone surrogates."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestError("--prompt is not UTF-8 text; give it as UTF-8, or from a file with --prompt-file") from None
    return prompt
