"""What every objective returns, and the means it is made of."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maglev.model.decoder import Decoder
from maglev.ops.loss import IGNORED, mean_cross_entropy


@dataclass(frozen=True)
class Losses:
    """Means over the valid targets, of the consistency over all tokens. `total` is what is minimised."""

    total: Tensor
    next_token: Tensor
    consistency: Tensor


@dataclass(frozen=True)
class Documents:
    """Where documents begin in packed rows, for those who mask attention or reset memory there.

    attention_starts (B, T): the first position that each position may attend to; None lets documents see each other.
    memory_keep (B, T): False where a position starts without memory; None carries memory across documents.
    """

    attention_starts: Tensor | None = None
    memory_keep: Tensor | None = None


WHOLE_ROWS = Documents()


class Objective(nn.Module):
    """Holds the decoder that is deployed and says how its memory is learned: `objective(tokens, targets)`."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        # the share of training that is done, for those who change their ways with it; what comes last costs most
        self.progress = 1.0

    @property
    def stage(self) -> int:
        """A pass does the same as long as this does not change, whatever `progress` is."""
        return 0

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents = WHOLE_ROWS) -> Losses:
        raise NotImplementedError


def token_mean(values: Tensor, targets: Tensor) -> Tensor:
    """Mean over the positions that hold a token: all but padding, whether they have a target or not."""
    valid = targets != IGNORED
    return torch.where(valid, values, 0).sum() / valid.sum().clamp_min(1)


def next_token_loss(decoder: Decoder, memory: Tensor, targets: Tensor) -> Tensor:
    """Mean nats per target. memory (B, T, D), targets (B, T) negative where there is nothing to predict."""
    readout = decoder.readout
    return mean_cross_entropy(memory, readout.weight, targets, readout.cap, readout.fused)
