"""Whether the loop will hold: how much a disturbance of the memory shrinks, and how much memory there is in K/V."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maglev.evaluate.memories import recurrent
from maglev.model.attention import Attention
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.model.state import DecoderState
from maglev.ops.inject import gate, rms_norm

# of the memory's own size, which is 1 per channel
DISTURBANCE = 1e-2
# positions that are stepped before the loop is disturbed, and after; with a delay at least so many delays of each
LENGTH, STEPS = 128, 16
DELAYS = 2


@dataclass(frozen=True)
class LoopDiagnostics:
    """`contraction_pass`: what one parallel pass leaves of a disturbance of all memories. `disturbance_left`: what is
    left in all of a disturbance of m (with a delay, of all memories that a state holds) after 1, 2, 4 and so on up to
    STEPS steps of the recurrence, or two delays. `contraction_step`:
    the same after the last of them as a mean rate per step. It is no rate of any one step: the first takes most, and
    keys and values in the windows then bring back what was disturbed. Below 1 what errors leave dies out, above 1 it
    grows; that P goes where Q would is told by the gap, not by this. `memory_share`: of the length of mixed keys and
    values, the part that comes from memory, per layer, where there is one to read; none where nothing is mixed. Rows of
    less than three tokens show nothing.
    """

    contraction_pass: float
    contraction_step: float
    disturbance_left: list[float]
    # how many steps the last of these took
    disturbance_steps: int
    memory_share: list[float]


def told_of(loop: Mapping[str, Any]) -> str:
    """What is left of a disturbance, in words; `loop` are the diagnostics as metrics have them."""
    # what is no number stands in JSON as null
    left = ["nan" if value is None else f"{value:.2g}" for value in loop["disturbance_left"]]
    if not left:
        return "too short a row to disturb the memory"
    later = f", {left[-1]} after {loop['disturbance_steps']}" if len(left) > 1 else ""
    return f"of a disturbance of the memory {left[0]} is left after a step{later}"


@torch.no_grad()
# as in `memories`: a run in training has compiled blocks
@torch.compiler.set_stance("force_eager")
def loop_diagnostics(decoder: Decoder, tokens: Tensor) -> LoopDiagnostics:
    """On the decoder's own memories of tokens (B, T), of which it takes the first LENGTH + STEPS, or four delays."""
    delay = decoder.config.delay
    most = max(STEPS, DELAYS * delay)
    tokens = tokens[:, : max(LENGTH, DELAYS * delay) + most]
    if tokens.shape[1] < 2 * delay + 1:
        return LoopDiagnostics(math.nan, math.nan, [], 0, [])
    # the first positions read no memory, so one pass takes more of them than a delay
    steps = min(most, tokens.shape[1] // 2, tokens.shape[1] - delay - 1)
    before = tokens[:, : tokens.shape[1] - steps]
    with in_float32(decoder):
        memory = recurrent(decoder, before)
        noise = DISTURBANCE * torch.randn(
            memory.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        ).to(memory)
        with recorded_shares(decoder) as shares:
            undisturbed = decoder(before, shift_right(memory))
        moved = decoder(before, shift_right(memory + noise)) - undisturbed
        left = after_steps(decoder, tokens, steps, noise[:, -delay:])
    youngest = 1 if decoder.config.takes_last else delay
    # 1, 2, 4 and so on, and the last
    told = sorted({1 << power for power in range(steps.bit_length())} | {steps})
    return LoopDiagnostics(
        contraction_pass=float(moved.norm() / noise[:, :-youngest].norm()),
        contraction_step=math.exp(left[-1] / steps),
        disturbance_left=[math.exp(left[step - 1]) for step in told],
        disturbance_steps=steps,
        memory_share=[float(share) for share in shares],
    )


def after_steps(decoder: Decoder, tokens: Tensor, steps: int, noise: Tensor) -> list[float]:
    """log(||difference|| / ||noise||) after each of so many steps from two states that differ by noise (B, s, D) in the
    memories that they hold.

    What is left would soon be less than rounding. So after every step the difference of the two states is made as large
    as the noise again, all of it by one factor: as long as it is small, that changes nothing but its size.
    """
    state = decoder.initial_state(tokens.shape[0])
    for token in tokens[:, : tokens.shape[1] - steps].T:
        decoder.step_(token, state)
    disturbed = state.clone()
    disturbed.memories = disturbed.memories + noise
    size, shrunk, left = float(noise.norm()), 0.0, list[float]()
    for token in tokens[:, tokens.shape[1] - steps :].T:
        decoder.step_(token, state)
        decoder.step_(token, disturbed)
        pairs = differing(disturbed, state)
        apart = [float((ours - theirs).norm()) for ours, theirs in pairs]
        whole = math.hypot(*apart)
        if not math.isfinite(whole):
            # weights that have diverged
            return left + [math.nan] * (steps - len(left))
        if not whole:
            return left + [-math.inf] * (steps - len(left))
        memories = math.hypot(*apart[:2])
        left.append(shrunk + math.log(memories / size) if memories else -math.inf)
        factor = size / whole
        shrunk -= math.log(factor)
        for ours, theirs in pairs:
            ours.copy_(theirs + factor * (ours - theirs))
    return left


def differing(ours: DecoderState, theirs: DecoderState) -> list[tuple[Tensor, Tensor]]:
    """What two states of one text may differ in, the memory first, and those before it."""
    rings = [
        pair
        for own, other in zip(ours.caches, theirs.caches, strict=True)
        for pair in ((own.key, other.key), (own.value, other.value))
    ]
    return [(ours.memory, theirs.memory), (ours.older, theirs.older), *rings]


@contextmanager
def in_float32(decoder: Decoder) -> Iterator[None]:
    """A disturbance must stand out from rounding; float32 or better serves."""
    kept = decoder.embedding.compute_dtype
    decoder.embedding.compute_dtype = torch.promote_types(decoder.compute_dtype, torch.float32)
    try:
        yield
    finally:
        decoder.embedding.compute_dtype = kept


@contextmanager
def recorded_shares(decoder: Decoder) -> Iterator[list[Tensor]]:
    """The memory's part of mixed K/V of every layer in the passes made meanwhile."""
    shares: list[Tensor] = []

    def record(attention: Attention, given: tuple[Any, ...], _: object) -> None:
        x, _rotation, memory, *_ = given
        memory_key, memory_value = memory.with_tokens
        _, key, value, *logits = attention.project(x, True)
        local, remembered = map(gate, logits)  # (B, T, G)
        # a rotation changes no length
        own = local * (rms_norm(key).norm(dim=-1) + value.norm(dim=-1))
        other = remembered * (memory_key.norm(dim=-1) + memory_value.norm(dim=-1))
        # the first positions have no memory to read
        own, other = own[:, decoder.config.delay :], other[:, decoder.config.delay :]
        shares.append(other.sum() / (own + other).sum())

    remembering = [module for module in decoder.modules() if isinstance(module, Attention) and module.gates]
    hooks = [module.register_forward_hook(record) for module in remembering]
    try:
        yield shares
    finally:
        for hook in hooks:
            hook.remove()
