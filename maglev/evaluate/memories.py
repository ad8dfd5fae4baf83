"""The three sources of memory that a number can come from."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.fast_step import fastest
from maglev.model.decoder import Decoder
from maglev.model.late import divided
from maglev.model.memory import shift_right
from maglev.objectives.losses import WHOLE_ROWS, Documents, Objective
from maglev.objectives.maglev import MaglevObjective
from maglev.ops.graphs import capture

Source = Literal["recurrent", "lifted", "refined"]
SOURCES: tuple[Source, ...] = get_args(Source)
# of refined memories, where nothing is said
DEFAULT_PASSES = 3
# tokens (B,) -> memory (B, D)
Step = Callable[[Tensor], Tensor]
# from so many on, recording a step is less than what it saves
MANY_STEPS = 32
# with more rows, kernels that are made for few gain nothing
FEW_ROWS = 64


def recurrent(decoder: Decoder, tokens: Tensor, documents: Documents = WHOLE_ROWS) -> Tensor:
    """The decoder's own memories, one step after another: what a user gets. (B, T) -> (B, T, D)"""
    if decoder.injection is None:
        # without memory a step and the parallel pass are the same function
        return decoder(tokens, starts=documents.attention_starts)
    state = decoder.initial_state(tokens.shape[0])
    step: Step = partial(decoder.step_, state=state)
    alone = documents.attention_starts is None and documents.memory_keep is None
    if alone and tokens.shape[1] >= MANY_STEPS and may_record(tokens.device):
        step = recorded_step(decoder, tokens.shape[0]) or step
    memory = state.memory.new_empty(*tokens.shape, state.memory.shape[-1])
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    anew = None if documents.attention_starts is None else documents.attention_starts == slots
    for slot in range(tokens.shape[1]):
        if anew is not None:
            state.restart(anew[:, slot], cache=True, memory=False)
        if documents.memory_keep is not None:
            state.restart(~documents.memory_keep[:, slot], cache=False, memory=True)
        memory[:, slot] = step(tokens[:, slot])
    return memory


def may_record(device: torch.device) -> bool:
    return device.type == "cuda" and not torch.is_grad_enabled()


def recorded_step(decoder: Decoder, batch_size: int) -> Step | None:
    """`decoder.step_` from the start of a text, replayed from a CUDA graph; the next step writes over what one returns.
    A step of a small model is over long before the next one could be asked for. None where it cannot be recorded."""
    steps = decoder if batch_size > FEW_ROWS or divided(decoder) else fastest(decoder)
    state = decoder.initial_state(batch_size)
    own = [state.memory, state.position, state.older]
    tokens = torch.zeros(batch_size, dtype=torch.int64, device=state.memory.device)

    def work() -> Tensor:
        """`step_` puts new tensors into the state; here everything has its place."""
        state.memory, state.position, state.older = own
        steps.step_(tokens, state)
        for place, found in zip(own, (state.memory, state.position, state.older), strict=True):
            place.copy_(found)
        return own[0]

    # once for what is set up when it is first met, then from the start
    work()
    try:
        memory, replay = capture(work, tokens.device)
    except Exception as error:
        warnings.warn(f"steps are asked for one by one: {type(error).__name__}: {error}", stacklevel=2)
        return None
    torch._foreach_zero_([*own, *(each for cache in state.caches for each in (cache.key, cache.value))])

    def step(given: Tensor) -> Tensor:
        tokens.copy_(given)
        replay()
        return memory

    return step


def refined(decoder: Decoder, tokens: Tensor, passes: int, documents: Documents = WHOLE_ROWS) -> Tensor:
    """The decoder's own memories by parallel passes, the first of them on zero memory. (B, T) -> (B, T, D)"""
    if passes < 1:
        raise RequestError(f"passes is {passes}; refined memories need at least one")
    memory = torch.zeros(*tokens.shape, decoder.config.width, dtype=decoder.compute_dtype, device=tokens.device)
    for _ in range(passes):
        previous_memory = shift_right(memory, documents.memory_keep, decoder.config.delay)
        memory = decoder(tokens, previous_memory, starts=documents.attention_starts)
    return memory


def with_prefiller(objective: Objective) -> MaglevObjective:
    """The same objective, known to have a Q."""
    if not isinstance(objective, MaglevObjective):
        raise RequestError("this run has no prefiller Q, so it has no lifted memories; use recurrent or refined")
    return objective


def check_source(objective: Objective, source: Source) -> None:
    """Whether there are such memories, before any work."""
    if source == "lifted":
        with_prefiller(objective)
    if source == "refined" and objective.decoder.injection is None:
        raise RequestError("this run has no memory, so there is nothing to refine; use recurrent")


def lifted(objective: Objective, tokens: Tensor, documents: Documents = WHOLE_ROWS) -> Tensor:
    """The decoder's memories on Q's, as in training. (B, T) -> (B, T, D)"""
    return with_prefiller(objective).lifted(tokens, documents)[0]


@torch.no_grad()
# a run in training has compiled blocks; the shapes of evaluation are many, and each would be compiled anew
@torch.compiler.set_stance("force_eager")
def memories(
    objective: Objective, tokens: Tensor, source: Source, passes: int, documents: Documents = WHOLE_ROWS
) -> Tensor:
    """(B, T) -> (B, T, D), without gradients."""
    check_source(objective, source)
    if source == "lifted":
        return lifted(objective, tokens, documents)
    if source == "refined":
        return refined(objective.decoder, tokens, passes, documents)
    return recurrent(objective.decoder, tokens, documents)


def sources_of(objective: Objective) -> tuple[Source, ...]:
    """What validation reports for this objective, the number that counts first."""
    if isinstance(objective, MaglevObjective):
        return ("recurrent", "lifted")
    return ("recurrent",) if objective.decoder.injection is None else ("recurrent", "refined")
