"""Maglev for the loop that it will run in: what P writes learns from what P reads.

Lifted training shows P no memory but Q's, and asks of what P writes only that it be near Q's. Here P goes over the row
once more on memories of its own, `rollout` tokens in a row from every place at once, with the same losses and with
gradients through all of it: from a token's prediction to the memories that were written before it. Q predicts tokens
too: that is what makes its memories worth reading.

Where nothing takes a memory younger than a delay, the whole row is such a rollout, a pass for every delay's length,
unless that is short.
"""

import torch
from torch import Tensor

from maglev.config import ClosedMaglevConfig
from maglev.model.decoder import Decoder
from maglev.model.late import LateDecoder, late_of
from maglev.model.memory import shift_by
from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, next_token_loss, token_mean
from maglev.objectives.maglev import MaglevObjective
from maglev.objectives.noise import MemoryNoise
from maglev.objectives.prefiller import Prefiller
from maglev.objectives.sweeps import Sweeps
from maglev.ops.loss import IGNORED


class ClosedLoopObjective(MaglevObjective):
    """What it reports beside the total is of the lifted pass, like Maglev's."""

    def __init__(self, decoder: Decoder, prefiller: Prefiller, config: ClosedMaglevConfig) -> None:
        super().__init__(decoder, prefiller, config.consistency_weight)
        self.prefiller_weight = config.prefiller_weight
        self.rollout, self.rollout_start, self.steady = config.rollout, config.rollout_start, config.steady
        self.noise = MemoryNoise(config.noise) if config.noise else None
        # a tuple, for what it holds is the decoder's
        self.late: tuple[LateDecoder | None] = (None,)

    @property
    def stage(self) -> int:
        """1 where P goes over the row once more."""
        return int(self.progress >= self.rollout_start)

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents = WHOLE_ROWS) -> Losses:
        embedded = self.decoder.embedding(tokens)
        target_memory = self.prefiller(tokens, self.decoder, documents.attention_starts, embedded)  # (B, T, D)
        sweeps = Sweeps(self.decoder, tokens, documents)
        noise = None if self.noise is None else self.noise(tokens, target_memory)
        read = target_memory if noise is None else target_memory + noise
        memory = sweeps.run(read, range(tokens.shape[1]), embedded)
        lifted = self.compare(memory, target_memory, targets)
        total = lifted.total
        if self.stage:
            config = self.decoder.config
            if config.goes_at_once:
                own_memory = sweeps.own_memories(embedded, noise)
            else:
                self.late = (late_of(self.decoder, self.late[0]),)
                own_memory = sweeps.rollout(memory, self.rollout, embedded, self.late[0], noise)
            total = total + self.compare(own_memory, target_memory, targets).total
            if self.steady:
                # where no memory is read the two are the same, and what lies between them is rounding
                youngest = 1 if config.takes_last else config.delay
                reads = shift_by(torch.ones_like(memory[..., :1]), documents.memory_keep, youngest).squeeze(-1) > 0
                apart = self.consistency(own_memory, memory.detach())
                total = total + self.steady * token_mean(apart, targets.masked_fill(~reads, IGNORED))
        if self.prefiller_weight:
            total = total + self.prefiller_weight * next_token_loss(self.decoder, target_memory, targets)
        return Losses(total, lifted.next_token, lifted.consistency)
