"""A run as a Hugging Face folder, and back."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from maglev import checkpoint
from maglev.checkpoint import EXPORT_PREFIX, EXPORTED, Checkpoint, check_shapes, newest
from maglev.config import RunConfig
from maglev.data.tokenizer import Tokenizer, bos_template
from maglev.errors import RequestError
from maglev.files import atomic_folder, atomic_path, write_json, write_text
from maglev.hf.configuration_maglev import MODEL_FILE, MaglevConfig
from maglev.hf.one_file import generate
from maglev.inference.engine import DTYPES
from maglev.objectives import build_objective
from maglev.runs import CONFIG, MODEL_TYPE, TOKENIZER, read_config

# parts of an objective that have tensors of their own
PARTS = ("decoder", "prefiller")
UNLIMITED = 10**12
Report = Callable[[str], None]


def to_hugging_face(
    run: Path, out: Path, report: Report, *, prefiller: bool = True, dtype: str | None = None
) -> dict[str, Any]:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` takes, with maglev or by remote code alone.

    `dtype` rounds the weights, as they are read from there on.
    """
    if dtype is not None and dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    config, found, tokenizer = open_run(run, out, report)
    tensors = {part: found.tensors(part) for part in PARTS if part == "decoder" or prefiller}
    tensors = {part: own for part, own in tensors.items() if own}
    check_tensors(run, config, tensors)
    if dtype is not None:
        tensors = {part: {name: each.to(DTYPES[dtype]) for name, each in own.items()} for part, own in tensors.items()}
    description = own_tokenizer(run, tokenizer)
    bos = tokenizer.bos_id
    hf_config = MaglevConfig(
        run=config.to_dict(),
        prefiller="prefiller" in tensors or not config.objective.kind.startswith("maglev"),
        progress=found.state,
        tokenizer_post_processor=description.get("post_processor"),
        architectures=["MaglevForCausalLM"],
        dtype=str(tensors["decoder"]["embedding.weight"].dtype).removeprefix("torch."),
        bos_token_id=bos,
        # the end of a document is where the next one would begin
        eos_token_id=bos,
        pad_token_id=bos,
    )
    description["post_processor"] = bos_template(tokenizer.bos_token, bos)
    with atomic_folder(out) as folder:
        hf_config.save_pretrained(folder)
        GenerationConfig(bos_token_id=bos, eos_token_id=bos, pad_token_id=bos).save_pretrained(folder)
        named = {f"{EXPORT_PREFIX}{part}.{name}": t for part, own in tensors.items() for name, t in own.items()}
        with atomic_path(folder / EXPORTED) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in named.items()}, temporary, {"format": "pt"})
        write_text(folder / TOKENIZER, pretty(description))
        write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer.bos_token))
        write_text(folder / MODEL_FILE, generate())
    return summary("hf", out, found, tensors)


def to_run(source: Path, out: Path, report: Report) -> dict[str, Any]:
    """The run folder that was exported: its configuration, its tokenizer and its weights, to the bit."""
    config, found, tokenizer = open_run(source, out, report)
    tensors = {part: own for part in PARTS if (own := found.tensors(part))}
    check_tensors(source, config, tensors)
    description = own_tokenizer(source, tokenizer)
    with atomic_folder(out) as folder:
        write_json(folder / CONFIG, config.to_dict())
        write_text(folder / TOKENIZER, pretty(description))
        checkpoint.save(folder, found.step, tensors, found.state, keep=1)
    return summary("run", out, found, tensors)


def open_run(run: Path, out: Path, report: Report) -> tuple[RunConfig, Checkpoint, Tokenizer]:
    if out.exists():
        raise RequestError(f"{out} is there already; name a folder that is not")
    config = read_config(run)
    if not (run / TOKENIZER).is_file():
        raise RequestError(f"{run} has no {TOKENIZER}; export a run that was trained on text")
    tokenizer = Tokenizer.load(run / TOKENIZER)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise RequestError(
            f"{run / TOKENIZER} has {tokenizer.vocab_size} tokens and the model {config.model.vocab_size}; "
            f"put the run's own there"
        )
    found = newest(run, report)
    if found is None:
        raise RequestError(f"{run} has no checkpoint yet; let 'maglev train' reach one (train.checkpoint_every)")
    return config, found, tokenizer


def own_tokenizer(source: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """The description that the run was trained with: an export puts BOS in front, and keeps what was there."""
    description = json.loads((source / TOKENIZER).read_text(encoding="utf-8"))
    told = json.loads((source / CONFIG).read_bytes())
    exported = bos_template(tokenizer.bos_token, tokenizer.bos_id)
    if told.get("model_type") == MODEL_TYPE and description.get("post_processor") == exported:
        description["post_processor"] = told.get("tokenizer_post_processor")
    return description


def check_tensors(run: Path, config: RunConfig, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Every tensor that the model has, in its shape, and no other."""
    with torch.device("meta"):
        objective = build_objective(config)
    expected = objective.state_dict()
    if "prefiller" not in tensors:
        expected = {name: tensor for name, tensor in expected.items() if not name.startswith("prefiller.")}
    check_shapes(run, expected, {f"{part}.{name}": t for part, own in tensors.items() for name, t in own.items()})


def tokenizer_config(bos: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": bos,
        "padding_side": "left",
        # as for the engine, a special token's name in a text is ordinary text
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        # the state is as large after any number of tokens
        "model_max_length": UNLIMITED,
    }


def pretty(description: dict[str, Any]) -> str:
    """As `tokenizers` writes it."""
    return json.dumps(description, indent=2, ensure_ascii=False)


def summary(kind: str, out: Path, found: Checkpoint, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    counts = {part: sum(tensor.numel() for tensor in own.values()) for part, own in tensors.items()}
    return {"format": kind, "out": str(out), "step": found.step, "parameters": counts}
