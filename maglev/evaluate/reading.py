"""Lifted reading: a prompt read with the memories of the prefiller Q, where a run still has it.

One pass of Q over the whole prompt gives m'_{1:T}, one pass of P on them, shifted, gives rings and memory; two passes
whatever the length. From there on the decoder goes on alone. It is a yardstick and not what is deployed: how the text
would go on had the decoder's own memories been as good as Q's.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.evaluate.memories import with_prefiller
from maglev.evaluate.runs import load_objective
from maglev.inference.checks import check_tokens
from maglev.inference.engine import LanguageModel, device_named
from maglev.inference.state import State
from maglev.model.chunk import ChunkPass
from maglev.model.state import DecoderState
from maglev.objectives.losses import Objective
from maglev.runs import TOKENIZER


# not inference_mode, whose tensors nobody may rewrite outside of it: the caller steps on from this state
@torch.no_grad()
# as in `memories`: prompts have many lengths, and compiled blocks would be compiled anew for each
@torch.compiler.set_stance("force_eager")
def read_lifted(objective: Objective, tokens: Tensor) -> DecoderState:
    """tokens (B, T) from the start of a text -> the state after them, its memory that of the lifted pass.

    There is no state to go on from: Q sees the whole history or none.
    """
    maglev = with_prefiller(objective)
    decoder = maglev.decoder
    length, context = tokens.shape[-1], decoder.config.context
    if not 1 <= length <= context:
        raise RequestError(
            f"the prompt has {length:,} tokens and lifted reading takes 1 to {context:,}, the context of the "
            f"prefiller Q; shorten it, or let the decoder read it alone, at any length"
        )
    check_tokens(tokens, decoder.config.vocab_size)
    state = decoder.initial_state(tokens.shape[0])
    target_memory = maglev.prefiller(tokens, decoder)  # (B, T, D)
    chunk = ChunkPass(decoder, tokens, state)
    chunk.run(target_memory)
    chunk.commit_(state, length)
    return state


class LiftedReader:
    """A run with its prefiller: reads prompts lifted, into states that its language model goes on from."""

    def __init__(self, run: str | Path, device: str = "auto", report: Callable[[str], None] = warnings.warn) -> None:
        run = Path(run)
        _, self.objective, _ = load_objective(run, device_named(device), report)
        with_prefiller(self.objective)
        if not (run / TOKENIZER).is_file():
            raise RequestError(f"{run} has no {TOKENIZER}; name a whole run folder")
        self.lm = LanguageModel(self.objective.decoder, Tokenizer.load(run / TOKENIZER))

    def read(self, text: str) -> State:
        tokens = [self.lm.tokenizer.bos_id, *self.lm.tokenizer.encode(text)]
        batch = torch.tensor([tokens], dtype=torch.int64, device=self.lm.decoder.device)
        return State(read_lifted(self.objective, batch), self.lm.fingerprint)
