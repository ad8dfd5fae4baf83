"""Rows of different lengths in one batch: padding is never read, wherever it stands."""

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.ragged import read_rows_
from maglev.inference.reading import read_
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.objectives.losses import WHOLE_ROWS, Documents
from maglev.ops.loss import IGNORED, UNSCORED

# what transformers writes where there is nothing to predict
NO_LABEL = -100


def mask_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """Which of these tokens are real, (B, T); None where all are. A mask may also cover what was read before."""
    if attention_mask is None:
        return None
    rows, columns = input_ids.shape
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < columns:
        raise RequestError(
            f"attention_mask is of shape {tuple(attention_mask.shape)} for tokens of shape {(rows, columns)}; "
            "give one number per token, 0 for padding"
        )
    real = attention_mask[:, -columns:].bool()
    return None if bool(real.all()) else real


def read_real_(decoder: Decoder, tokens: Tensor, real: Tensor | None, state: DecoderState, *, keep: bool) -> Tensor:
    """Read the real ones of tokens (B, T) into `state`. -> their memories (B, T, D), zeros at padding; without `keep`
    those of the last column alone, (B, 1, D)"""
    if real is None:
        memories: list[Tensor] | None = [] if keep else None
        read_(decoder, tokens, state, memories=memories)
        return state.memory[:, None] if memories is None else torch.cat(memories, dim=1)
    # the real ones of every row first, in their order
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    found = read_rows_(decoder, tokens.gather(1, order), real.sum(1), state)
    scattered = torch.zeros_like(found).scatter_(1, order[..., None].expand_as(found), found)
    scattered = scattered.where(real[..., None], 0)
    return scattered if keep else scattered[:, -1:]


def targets_of(labels: Tensor, real: Tensor | None) -> Tensor:
    """Labels stand at their own token, targets at the one before. (B, T) -> (B, T)"""
    targets = torch.full_like(labels, UNSCORED)
    targets[:, :-1] = torch.where(labels[:, 1:] == NO_LABEL, UNSCORED, labels[:, 1:])
    return targets if real is None else targets.masked_fill(~real, IGNORED)


def documents_of(real: Tensor | None) -> Documents:
    """For training in one pass: nothing sees the padding before a row begins. After its end causality suffices."""
    if real is None:
        return WHOLE_ROWS
    check_whole(real)
    if bool(real[:, 0].all()):
        return WHOLE_ROWS
    first = real.to(torch.uint8).argmax(dim=1, keepdim=True)  # (B, 1)
    column = torch.arange(real.shape[1], device=real.device)
    # padding sees itself, so that no softmax is empty
    return Documents(attention_starts=torch.minimum(first, column), memory_keep=column != first)


def check_whole(real: Tensor) -> None:
    starts = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    if bool((starts > 1).any()):
        raise RequestError("attention_mask has padding between tokens; put it before or after them to train")
