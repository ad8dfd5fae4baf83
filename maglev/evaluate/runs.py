"""Load a run with all it was trained with, to measure it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from maglev.checkpoint import Checkpoint, load_weights, newest
from maglev.config import RunConfig
from maglev.data.recall import RecallConfig
from maglev.data.shards import TokenData, open_data
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference.rounding import rounded
from maglev.model.decoder import Decoder
from maglev.objectives import Objective, build_objective
from maglev.objectives.maglev import MaglevObjective
from maglev.ops.matrix import WeightFormat
from maglev.runs import RECALL, TOKENIZER, read_config, teacher_of


def load_objective(
    run: Path,
    device: torch.device,
    report: Callable[[str], None],
    *,
    with_prefiller: bool = True,
    weights: WeightFormat = "plain",
) -> tuple[RunConfig, Objective, int]:
    """Configuration, objective and step of the newest whole checkpoint; bfloat16 arithmetic on a GPU.

    Without its prefiller an objective has the decoder's own memories alone, and an exported run may have no other
    (`has_prefiller`).
    `weights` in 8 bits are the decoder's, as `maglev.load` rounds them, and go without a prefiller: nobody rounds that.
    """
    assert weights == "plain" or not with_prefiller
    config = read_config(run)
    found = check_has_weights(run, report)
    objective = build_objective(config) if with_prefiller else Objective(Decoder(config.model))
    load_weights(objective.decoder, run, found, "decoder")
    if isinstance(objective, MaglevObjective):
        if "prefiller" not in found.stems:
            raise RequestError(f"{run} has no prefiller any more, so no lifted memories; use recurrent ones")
        load_weights(objective.prefiller, run, found, "prefiller")
    objective.to(device).eval()
    if device.type == "cuda":
        objective.decoder.embedding.compute_dtype = torch.bfloat16
    objective.decoder = rounded(objective.decoder, weights)
    return config, objective, found.step


def check_has_weights(run: Path, report: Callable[[str], None]) -> Checkpoint:
    """The newest whole checkpoint."""
    found = newest(run, report)
    if found is None:
        raise RequestError(f"{run} has no checkpoint yet; let 'maglev train' reach one (train.checkpoint_every)")
    return found


def weights_digest(run: Path, report: Callable[[str], None]) -> tuple[int, str] | None:
    """Step and SHA-256 of the decoder in the newest whole checkpoint: two runs of one recipe are told apart by it."""
    found = newest(run, report)
    if found is None:
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(found.tensors("decoder").items()):
        digest.update(name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.step, digest.hexdigest()


def has_prefiller(run: Path, report: Callable[[str], None]) -> bool:
    """Whether the newest checkpoint still holds one: an export may have been made without, and the folder of a frozen
    one be gone."""
    frozen = teacher_of(read_config(run))
    if frozen and not Path(frozen).is_dir():
        report(f"{frozen}, the prefiller of {run}, is not there any more, so lifted memories are left out")
        return False
    found = newest(run, report)
    return found is None or "prefiller" in found.stems


def read_recall(run: Path) -> RecallConfig:
    """The recall task that a run was trained on."""
    file = run / RECALL
    if not file.is_file():
        raise RequestError(
            f"{run} was not trained on the recall task, it has no {RECALL}; name a run that was, "
            f"or ask for needles in text: --variant needles --data DIR"
        )
    try:
        return RecallConfig.from_dict(json.loads(file.read_bytes()))
    except (ValueError, RequestError) as error:
        raise RequestError(f"{file} is damaged ({error}); name another run") from None


def open_matching_data(run: Path, folder: Path) -> TokenData:
    """The data, if it speaks the run's tokens."""
    data = open_data(folder)
    check_tokenizer(run, data)
    return data


def check_tokenizer(run: Path, data: TokenData) -> None:
    if not (run / TOKENIZER).is_file():
        if (run / RECALL).is_file():
            raise RequestError(
                f"{run} was trained on the recall task and knows no text; name a run that was trained on some"
            )
        raise RequestError(f"{run} has no {TOKENIZER}; name a whole run folder")
    if Tokenizer.load(run / TOKENIZER).fingerprint != data.tokenizer.fingerprint:
        raise RequestError(
            f"the tokenizer of {run} does not match the data in {data.folder}; "
            f"prepare the data with --tokenizer {run / TOKENIZER}"
        )
