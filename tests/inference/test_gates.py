"""How far the memory gates stand open in a step, whoever computes it, and that telling it changes nothing."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from maglev.inference.fast_step import FastDecoder
from maglev.inference.stepper import EagerStepper
from maglev.model.attention import Attention
from maglev.model.decoder import Decoder
from maglev.model.memory import ResidualGate, shift_right
from maglev.model_config import InjectionKind
from maglev.objectives import build
from maglev.ops.inject import NORM_EPS
from maglev.serve.rows import memory_facts
from tests.helpers import VOCAB, random_tokens, small, step_through, watched

GATED = ["shared_kv", "layer_kv", "residual", "layer_residual"]


def small_decoder(injection: str, **settings: Any) -> Decoder:
    return small("maglev-shared-0.1", scale=0.5, injection=injection, **settings).decoder


def gates_by_pass(decoder: Decoder, tokens: Tensor) -> Tensor:
    """2 sigmoid of the memory gate's logits in a pass over the decoder's own memories, over layers and heads. (B, T)"""
    found = []

    def record(owner: Attention | ResidualGate, given: tuple[Any, ...]) -> None:
        if isinstance(owner, Attention):
            logits = [owner.project(given[0], True)[-1]]
        else:
            gates = [owner.memory_gate] if owner.older is None else [owner.memory_gate, owner.older.memory_gate]
            logits = [gate(norm(given[0])) for gate in gates]
        found.append(2 * torch.sigmoid(torch.cat(logits, dim=-1)))

    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=NORM_EPS)

    hooks = [(block.stream or block.attention).register_forward_pre_hook(record) for block in decoder.blocks]
    with torch.no_grad():
        decoder(tokens, shift_right(step_through(decoder, tokens)))
    for hook in hooks:
        hook.remove()
    # those of the steps come first
    return torch.cat(found[-len(hooks) :], dim=-1).mean(-1)


@pytest.mark.parametrize("delay", [1, 5])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("injection", GATED)
def test_a_step_tells_the_mean_of_its_gates(injection: str, kv_heads: int, delay: int) -> None:
    decoder, tokens = small_decoder(injection, kv_heads=kv_heads, delay=delay), random_tokens(3, 30)
    expected = gates_by_pass(decoder, tokens)
    assert expected.std() > 0.01
    torch.testing.assert_close(watched(decoder, tokens), expected, rtol=0, atol=1e-10)
    if decoder.config.has_steps:
        torch.testing.assert_close(watched(FastDecoder(decoder, "torch"), tokens), expected, rtol=0, atol=1e-10)


def test_gates_are_neutral_at_the_start() -> None:
    decoder = build("maglev-shared-0.1", depth=2, vocab_size=VOCAB, context=24, window=8).decoder
    gates = watched(decoder, random_tokens(2, 3))
    assert gates is not None and gates.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("recipe", ["swa-ssss", *[name for name in get_args(InjectionKind) if name not in GATED]])
def test_where_there_are_no_such_gates_nothing_is_told(recipe: str) -> None:
    decoder = small(recipe).decoder if recipe == "swa-ssss" else small_decoder(recipe)
    assert watched(decoder, random_tokens(2, 3)) is None
    if decoder.config.has_steps:
        assert watched(FastDecoder(decoder, "torch"), random_tokens(2, 3)) is None


def test_watching_changes_no_bit_and_leaves_nothing_behind() -> None:
    decoder, tokens = small_decoder("shared_kv", dtype=torch.float32), random_tokens(3, 12)
    steppers = EagerStepper(decoder), EagerStepper(decoder)
    for stepper in steppers:
        stepper.begin(decoder.initial_state(3))
    for slot, token in enumerate(tokens.T):
        assert torch.equal(steppers[0].step(token), steppers[1].step(token, watched=slot % 3 > 0))
        assert steppers[0].gates() is None and (steppers[1].gates() is not None) == (slot % 3 > 0)
    assert not any(module._forward_hooks for module in decoder.modules())
    steppers[1].end()
    assert steppers[1].gates() is None


@pytest.mark.parametrize("injection", get_args(InjectionKind))
def test_a_configuration_says_whether_there_are_gates_to_tell(injection: str) -> None:
    decoder = small_decoder(injection)
    assert decoder.config.tells_gates == (watched(decoder, random_tokens(1, 2)) is not None)
    assert memory_facts(decoder.config) == ["memory_change", "memory_gate"][: 1 + decoder.config.tells_gates]
