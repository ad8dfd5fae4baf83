"""Every way to take memory in keeps the same promises: steps are passes, nothing sees ahead, a state stays bounded."""

import dataclasses
import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference import fast_step
from maglev.inference.fast_step import FastDecoder, fastest
from maglev.inference.reading import read_
from maglev.inference.state import State, load_state
from maglev.model import attention
from maglev.model.accounting import decoder_flops, describe, state_nbytes
from maglev.model.chunk import ChunkPass
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from maglev.model_config import InjectionKind
from maglev.objectives import build, build_objective
from maglev.ops.attention import plan_attention, slot_attention, windowed_attention
from maglev.ops.kernels import BLOCKWISE
from maglev.ops.reference import windowed_attention as reference_attention
from maglev.recipes import run_config
from tests.helpers import (
    assert_parallel_is_stepped,
    batch_of,
    changed_positions,
    gradients,
    random_tokens,
    small,
    step_through,
)

SEVERAL = [
    "shared_kv+slots",
    "shared_kv+layer_residual",
    "shared_kv+cross_attention",
    "tokens+slots+cross_attention",
]
ALL = [*get_args(InjectionKind), *SEVERAL]
OTHERS = [name for name in ALL if name != "shared_kv"]
ONE_OF_EACH_PLACE = ("layer_kv", "tokens", "cross_attention", "shared_kv+slots", "shared_kv+layer_residual")
ONE_OF_EACH_PLACE += ("layer_kv+layer_residual@8",)
CONTEXT, WINDOW = 24, 8
LENGTHS = (1, WINDOW - 3, WINDOW, WINDOW + 1, CONTEXT + 1, 60)


# "injection@delay"
DELAYED = ["shared_kv@8", "shared_kv@3", "layer_kv+layer_residual@8", "shared_kv+residual@2", "tokens+slots@5"]
OTHERS += DELAYED


def kind(injection: str) -> dict[str, Any]:
    name, _, delay = injection.partition("@")
    return {"injection": name, "delay": int(delay or 1)}


def decoder_with(injection: str, recipe: str = "maglev-shared-0.1", **settings: Any) -> Decoder:
    return small(recipe, **kind(injection), context=CONTEXT, window=WINDOW, **settings).decoder


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "lrt-slsl"])
@pytest.mark.parametrize("injection", OTHERS)
def test_a_parallel_pass_over_the_shifted_stepped_memories_gives_the_same_memories(
    injection: str, recipe: str, kv_heads: int
) -> None:
    decoder = decoder_with(injection, recipe, kv_heads=kv_heads)
    assert_parallel_is_stepped(decoder, LENGTHS)


@pytest.mark.parametrize("injection", OTHERS)
def test_memory_counts_and_nothing_sees_ahead(injection: str) -> None:
    decoder = decoder_with(injection)
    tokens, previous = random_tokens(1, 40), torch.randn(1, 40, 32, dtype=torch.float64)
    before = decoder(tokens, previous)
    other, moved = tokens.clone(), previous.clone()
    other[0, 20] = (other[0, 20] + 1) % 61
    moved[0, 20] += 1
    assert min(changed_positions(before, decoder(other, previous))) == 20
    after, delay = changed_positions(before, decoder(tokens, moved)), decoder.config.delay
    assert min(after) == (20 if decoder.config.takes_last else 19 + delay)
    # and no further than what a position's window carries from layer to layer
    assert max(after) <= 19 + delay + decoder.config.plain_reach


@pytest.mark.parametrize("injection", [*ALL, *DELAYED])
def test_a_step_keeps_a_state_of_constant_size(injection: str) -> None:
    decoder = decoder_with(injection, kv_heads=2, window_pattern="SL")
    state = decoder.initial_state(1)
    for token in random_tokens(1, 3 * CONTEXT).T:
        decoder.step_(token, state)
        assert state.nbytes == state_nbytes(decoder.config, 8)
    # recurrent tokens stand beside the others, all else is folded into what there is
    rings = 2 * sum(decoder.config.windows) * 2 * 8 * 8
    assert state.nbytes == (2 if "tokens" in injection else 1) * rings + decoder.config.delay * 32 * 8 + 8


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("injection", OTHERS)
def test_reading_in_parallel_ends_where_stepping_does(injection: str, blocks: int, tmp_path: Path) -> None:
    """In blocks, with rows at other positions, from a state that was saved."""
    decoder = decoder_with(injection, scale=0.3)
    tokens = random_tokens(2, 50)
    state, expected = decoder.initial_state(2), decoder.initial_state(2)
    state.position += torch.tensor([0, 5])
    expected.position += torch.tensor([0, 5])
    report = read_(decoder, tokens, state, block=16, blocks=blocks)
    assert report.stepped == 0
    if not decoder.config.takes_last:
        # nothing to settle
        assert report.passes == [1] * -(-50 // decoder.config.delay) and report.passes_per_token == 1
    with torch.no_grad():
        for token in tokens.T:
            decoder.step_(token, expected)
    assert_same(state.memory, expected.memory)
    for mine, theirs in zip(state.caches, expected.caches, strict=True):
        assert_same(mine.key, theirs.key)
        assert_same(mine.value, theirs.value)
    State(expected.row(1), "model").save(tmp_path / "state")
    saved = load_state(tmp_path / "state", decoder, "model").inner
    assert_same(decoder.step(tokens[:1, 0], saved)[0], decoder.step(tokens[:1, 0], expected.row(1))[0])


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("injection", OTHERS)
def test_chunks_of_ragged_rows_are_committed(injection: str) -> None:
    decoder = decoder_with(injection)
    tokens = random_tokens(2, 12)
    stepped = step_through(decoder, tokens)
    state = decoder.initial_state(2)
    chunk = ChunkPass(decoder, tokens, state)
    with torch.no_grad():
        chunk.run(stepped)
        chunk.commit_rows_(state, torch.tensor([12, 7]))
    assert_same(state.memory, torch.stack((stepped[0, 11], stepped[1, 6])))
    assert_same(decoder.step(tokens[:, 7], state)[0][1], stepped[1, 7])


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-separate-1", "lrt-ssss"])
@pytest.mark.parametrize("injection", OTHERS)
def test_every_parameter_is_reached_and_the_stored_decoder_is_whole(injection: str, recipe: str) -> None:
    objective = small(recipe, **kind(injection))
    for name, gradient in gradients(objective(*batch_of(2, 20)).total, objective).items():
        assert gradient.abs().max() > 0, name
    bare = Decoder(objective.decoder.config).double()
    bare.load_state_dict(objective.decoder.state_dict())
    tokens, previous = random_tokens(1, 20), torch.randn(1, 20, 32, dtype=torch.float64)
    assert torch.equal(bare(tokens, previous), objective.decoder(tokens, previous))


@pytest.mark.parametrize("injection", OTHERS)
def test_documents_are_kept_apart_where_asked(injection: str) -> None:
    """Attention and memory that begin anew at a position give what a text of its own gives."""
    decoder = decoder_with(injection)
    tokens = random_tokens(1, 30)
    starts = torch.where(torch.arange(30) < 11, 0, 11)[None]
    keep = (torch.arange(30) != 11)[None]
    memory = torch.randn(1, 30, 32, dtype=torch.float64)
    whole = decoder(tokens, shift_right(memory, keep, decoder.config.delay), starts=starts)
    alone = decoder(tokens[:, 11:], shift_right(memory[:, 11:]))
    torch.testing.assert_close(whole[:, 11:], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("injection", ["slots", "residual", "layer_residual", "cross_attention"])
def test_what_enters_the_stream_starts_as_swa(injection: str) -> None:
    """Whatever the memory: what writes to the residual stream starts at zero."""
    shape = {"depth": 2, "vocab_size": 61, "context": 24, "window": 8}
    decoder, swa = build("maglev-shared-0.1", injection=injection, **shape).decoder, build("swa-ssss", **shape).decoder
    tokens, previous = random_tokens(1, 20), torch.randn(1, 20, 128)
    assert torch.equal(decoder(tokens, previous), swa(tokens))


@pytest.mark.parametrize("settings", [{}, {"model.heads": 4, "model.kv_heads": 2}, {"model.window_pattern": "SL"}])
@pytest.mark.parametrize("injection", [*ALL, *DELAYED])
def test_accounts_are_those_of_the_modules(injection: str, settings: dict[str, Any]) -> None:
    shape = {"model.vocab_size": 50, "model.context": 16, "model.window": 8}
    shape |= {f"model.{key}": value for key, value in kind(injection).items()}
    config = run_config("maglev-shared-0.1", 2, shape | settings)
    model, decoder = config.model, build_objective(config).decoder
    named = {name: parameter.numel() for name, parameter in decoder.named_parameters()}
    told = describe(config)
    assert {"injection": told["injection"], "delay": told["delay"]} == kind(injection)
    assert told["parameters"]["deployed"] == sum(named.values())
    assert told["parameters"]["gates"] == sum(count for name, count in named.items() if "_gate" in name)
    memory = ("injection.", ".stream.query_proj", ".stream.output_proj")
    assert told["parameters"]["memory_projections"] == sum(
        count for name, count in named.items() if any(part in name for part in memory)
    )
    # 2 per weight that a token meets, 4 * width per key that a query sees
    pairs = sum(1 for w in model.windows for t in range(16) for j in range(16) if t - w < j <= t)
    slots = 4 * model.depth * sum(part in injection for part in ("slots", "cross_attention"))
    keys = (2 if "tokens" in injection else 1) * pairs / 16 + slots
    weights = sum(count for name, count in named.items() if "embedding" not in name and "scale" not in name)
    assert decoder_flops(model) == pytest.approx(2 * weights + 4 * model.width * keys)


@pytest.mark.parametrize("queries", [None, range(2, 20, 3)])
@pytest.mark.parametrize("window", [1, 5, 20])
def test_packed_entries_are_positions_of_their_own(window: int, queries: range | None) -> None:
    torch.manual_seed(0)
    count = len(queries or range(20))
    query = torch.randn(2, count, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 20, 2 * 2, 8, dtype=torch.float64)
    starts = torch.randint(0, 3, (2, count))
    plan = plan_attention(window, 20, query.device, queries, starts, kernel=BLOCKWISE, entries=2)
    apart = [features.view(2, 40, 2, 8) for features in (key, value)]
    at = range(1, 40, 2) if queries is None else range(5, 40, 6)
    expected = reference_attention(query, *apart, 2 * window, at, torch.minimum(2 * starts, torch.tensor(at)))
    torch.testing.assert_close(windowed_attention(query, key, value, plan), expected, rtol=0, atol=1e-12)


def test_slots_may_be_passed_over() -> None:
    query, key = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.randn(2, 3, 5, 2, 8, dtype=torch.float64)
    value = torch.ones_like(key)
    weight = slot_attention(query, key, value)[..., 0]
    scores = torch.einsum("bthd,btshd->bths", query, key.repeat_interleave(2, dim=3)) / 8**0.5
    torch.testing.assert_close(weight, scores.exp().sum(-1) / (1 + scores.exp().sum(-1)))


@pytest.mark.parametrize("injection", [*ALL, "shared_kv+layer_residual@8"])
def test_kernels_serve_what_they_can_compute(injection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU as it is, or pretended: others take plain PyTorch in training or decoding."""
    stepped = "@" not in injection and not {"tokens", "slots", "cross_attention"} & {*injection.split("+")}
    objective = small("maglev-shared-0.1", **kind(injection), dtype=torch.float32)
    tokens = random_tokens(1, 12)
    plain = objective.decoder(tokens, torch.zeros(1, 12, 32))
    asked = []
    monkeypatch.setattr(attention, "takes_kernels", lambda x: True)
    monkeypatch.setattr(attention, "kernels", lambda: asked.append(1))
    assert torch.equal(objective.decoder(tokens, torch.zeros(1, 12, 32)), plain)
    assert bool(asked) == (not {"layer_kv", "tokens"} & {*injection.split("+")})
    if stepped:
        assert isinstance(FastDecoder(objective.decoder, "torch"), FastDecoder)
    else:
        with pytest.raises(RequestError, match=re.escape(f"model.injection = '{kind(injection)['injection']}'")):
            FastDecoder(objective.decoder, "torch")
    monkeypatch.setattr(Decoder, "device", torch.device("cuda"))
    monkeypatch.setattr(fast_step, "FastDecoder", lambda decoder, weights: "kernels")
    assert (fastest(objective.decoder) == "kernels") == stepped


@pytest.mark.parametrize(
    "injection",
    [name if name in ONE_OF_EACH_PLACE else pytest.param(name, marks=pytest.mark.soak) for name in OTHERS],
)
def test_blocks_compile_without_a_break(injection: str) -> None:
    """The part that dynamo sees, as in training on a GPU."""
    objective = small("maglev-shared-0.1", **kind(injection), dtype=torch.float32)
    batch = batch_of(2, 20)
    expected = objective(*batch).total
    for block in objective.decoder.blocks:
        block.compile(backend="eager", fullgraph=True, dynamic=False)
    objective.decoder.injection.compile(backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(objective(*batch).total, expected)
    torch._dynamo.reset()


def test_several_are_what_each_of_them_is_where_the_others_add_nothing() -> None:
    """The parts of one decoder, put together from those of two."""
    decoder = decoder_with("shared_kv+slots")
    tokens, previous = random_tokens(1, 40), torch.randn(1, 40, 32, dtype=torch.float64)
    both = decoder(tokens, previous)
    for kept, other in (("shared_kv", "slots"), ("slots", "shared_kv")):
        weights = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
        alone = decoder_with(kept)
        for name in alone.state_dict():
            source = name.replace("injection.", f"injection.parts.{kept}.")
            alone.state_dict()[name].copy_(weights[source])
        changed = decoder_with("shared_kv+slots")
        changed.load_state_dict(weights)
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if f".{other}." in name or (other == "shared_kv" and "local_gate" in name):
                    parameter.zero_()
        expected = alone(tokens, previous)
        assert not torch.allclose(both, expected)
        # gates of nothing still stand at 1 for the tokens' own
        torch.testing.assert_close(changed(tokens, previous), expected, rtol=0, atol=1e-10)


def test_a_delay_is_for_what_takes_older_memories() -> None:
    with pytest.raises(RequestError, match=r"nothing of model.injection = 'slots' takes older memories; .* shared_kv"):
        run_config("maglev-shared-0.1", 2, {"model.injection": "slots", "model.delay": 2})


def test_states_that_were_saved_before_there_were_delays_stay() -> None:
    """Their fingerprint is of a configuration without one."""
    from maglev.inference.engine import LanguageModel
    from maglev.values import canonical_json

    decoder = decoder_with("shared_kv")
    told = {key: value for key, value in vars(decoder.config).items() if key != "delay"}
    digest = hashlib.sha256(canonical_json(told).encode())
    for name, tensor in sorted(decoder.state_dict().items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    tokenizer = SimpleNamespace(vocab_size=decoder.config.vocab_size)
    assert LanguageModel(decoder, tokenizer).fingerprint == digest.hexdigest()
    # and a delay is told by it
    delayed = Decoder(dataclasses.replace(decoder.config, delay=2)).double()
    delayed.load_state_dict(decoder.state_dict())
    assert LanguageModel(delayed, tokenizer).fingerprint != digest.hexdigest()


def test_over_a_short_delay_passes_settle() -> None:
    """One at a time they would be hardly better than steps: 2 positions where a window has 16."""
    decoder = small("maglev-shared-0.1", injection="shared_kv", delay=2, window=16, scale=0.3).decoder
    assert not decoder.config.takes_last and not decoder.config.goes_at_once
    tokens = random_tokens(1, 50)
    state, expected = decoder.initial_state(1), decoder.initial_state(1)
    report = read_(decoder, tokens, state)
    assert len(report.passes) == 4 and min(report.passes) > 1 and report.stepped == 0
    with torch.no_grad():
        for token in tokens.T:
            decoder.step_(token, expected)
    assert_same(state.memories, expected.memories)
