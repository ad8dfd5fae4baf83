"""Recurrent, lifted and refined memories: what each is, and which run has which."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.evaluate import memories as sources
from maglev.evaluate.memories import SOURCES, lifted, memories, recurrent, refined, sources_of
from maglev.inference.fast_step import FastDecoder, fastest
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from tests.helpers import (
    ALL_RECIPES,
    MAGLEV_RECIPES,
    MEMORY_RECIPES,
    PLAIN_RECIPES,
    changed_positions,
    random_tokens,
    small,
    step_through,
)


@pytest.mark.parametrize("recipe", MEMORY_RECIPES)
def test_recurrent_is_stepping(recipe: str) -> None:
    decoder = small(recipe).decoder
    tokens = random_tokens(3, 40)
    with torch.no_grad():
        assert torch.equal(recurrent(decoder, tokens), step_through(decoder, tokens))


def play(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, Callable[[], None]]:
    """What a graph does, by a function that is called again."""
    result = work()

    def replay() -> None:
        assert work() is result

    return result, replay


@pytest.mark.parametrize("recipe", MEMORY_RECIPES)
def test_recorded_steps_are_the_same(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "may_record", lambda device: True)
    monkeypatch.setattr(sources, "capture", play)
    decoder = small(recipe).decoder
    tokens = random_tokens(3, 40)
    with torch.no_grad():
        assert torch.equal(recurrent(decoder, tokens), step_through(decoder, tokens))


@pytest.mark.parametrize("rows", [sources.FEW_ROWS, sources.FEW_ROWS + 1])
def test_few_rows_are_stepped_by_what_is_fastest(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fastest(decoder: Decoder) -> FastDecoder:
        asked.append(decoder)
        return FastDecoder(decoder, "torch")

    for name, value in (("may_record", lambda device: True), ("capture", play), ("fastest", fastest)):
        monkeypatch.setattr(sources, name, value)
    decoder, tokens = small("maglev-shared-0.1").decoder, random_tokens(rows, 40)
    with torch.no_grad():
        torch.testing.assert_close(recurrent(decoder, tokens), step_through(decoder, tokens), rtol=0, atol=1e-10)
    assert len(asked) == (rows == sources.FEW_ROWS)


def test_steps_that_cannot_be_recorded_are_asked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Callable[[], Tensor], device: torch.device) -> None:
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(sources, "may_record", lambda device: True)
    monkeypatch.setattr(sources, "capture", fail)
    decoder = small("maglev-shared-0.1").decoder
    tokens = random_tokens(3, 40)
    with torch.no_grad(), pytest.warns(UserWarning, match="asked for one by one: RuntimeError: not permitted"):
        assert torch.equal(recurrent(decoder, tokens), step_through(decoder, tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["lrt-slsl", "maglev-shared-0.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_recorded_on_a_gpu_are_those_one_by_one(recipe: str, dtype: torch.dtype) -> None:
    decoder = small(recipe, dtype=torch.float32).decoder.cuda()
    decoder.embedding.compute_dtype = dtype
    tokens = random_tokens(3, 100).cuda()
    fast = fastest(decoder)
    state, stepped = fast.initial_state(3), []
    with torch.no_grad(), warnings.catch_warnings(action="error"):
        for token in tokens.T:
            stepped.append(fast.step_(token, state).clone())
        torch.testing.assert_close(recurrent(decoder, tokens), torch.stack(stepped, dim=1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("recipe", PLAIN_RECIPES)
def test_recurrent_without_memory_is_the_parallel_pass_and_also_stepping(recipe: str) -> None:
    decoder = small(recipe).decoder
    tokens = random_tokens(2, 60)
    assert torch.equal(recurrent(decoder, tokens), decoder(tokens))
    torch.testing.assert_close(recurrent(decoder, tokens), step_through(decoder, tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", ["lrt-slsl", "maglev-shared-0.1", "maglev-separate-1"])
def test_as_many_passes_as_positions_reach_the_recurrent_memories(recipe: str) -> None:
    """Whatever the weights: position t is exact after t passes. Small weights keep the rounding from growing."""
    decoder = small(recipe, scale=0.4).decoder
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        expected = recurrent(decoder, tokens)
        for passes in (30, 33):
            torch.testing.assert_close(refined(decoder, tokens, passes), expected, rtol=0, atol=1e-10)


def test_position_t_is_exact_after_t_passes_and_not_all_before() -> None:
    decoder = small("maglev-shared-0.1", depth=1, window=2).decoder
    tokens = random_tokens(1, 12)
    with torch.no_grad():
        expected = recurrent(decoder, tokens)
        for passes in (1, 3, 7):
            memory = refined(decoder, tokens, passes)
            torch.testing.assert_close(memory[:, :passes], expected[:, :passes], rtol=0, atol=1e-9)
            assert (memory[:, passes:] - expected[:, passes:]).abs().max() > 1e-6


def test_the_first_refining_pass_has_zero_memory_and_each_next_one_its_shifted_result() -> None:
    decoder = small("maglev-shared-0.1").decoder
    tokens = random_tokens(1, 20)
    zeros = torch.zeros(1, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        first = decoder(tokens, zeros)
        assert torch.equal(refined(decoder, tokens, 1), first)
        assert torch.equal(refined(decoder, tokens, 2), decoder(tokens, shift_right(first)))


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_lifted_memories_are_the_decoders_on_those_of_q(recipe: str) -> None:
    objective = small(recipe)
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        target_memory = objective.prefiller(tokens, objective.decoder)
        assert torch.equal(lifted(objective, tokens), objective.decoder(tokens, shift_right(target_memory)))
        assert (lifted(objective, tokens) - recurrent(objective.decoder, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("recipe", [name for name in ALL_RECIPES if name not in MAGLEV_RECIPES])
def test_a_run_without_q_has_no_lifted_memories(recipe: str) -> None:
    objective = small(recipe)
    with pytest.raises(RequestError, match="no prefiller"):
        lifted(objective, random_tokens(1, 5))
    with pytest.raises(RequestError, match="no prefiller"):
        memories(objective, random_tokens(1, 5), "lifted", 1)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_every_source_that_a_run_reports_can_be_computed(recipe: str) -> None:
    objective = small(recipe)
    tokens = random_tokens(2, 10)
    reported = sources_of(objective)
    assert reported[0] == "recurrent" and set(reported) <= set(SOURCES)
    assert ("lifted" in reported) == recipe.startswith("maglev")
    with torch.inference_mode():
        for source in reported:
            memory = memories(objective, tokens, source, passes=2)
            assert memory.shape == (2, 10, 32) and memory.isfinite().all()


@pytest.mark.parametrize("source", ["recurrent", "refined", "lifted"])
def test_every_source_is_causal_to_the_bit(source: str) -> None:
    """A number from any of them may not know the token that it predicts."""
    objective = small("maglev-separate-1", context=80)
    tokens = random_tokens(1, 50)
    other = tokens.clone()
    other[:, 37] = (other[:, 37] + 1) % 61
    with torch.no_grad():
        before, after = (memories(objective, row, source, 3) for row in (tokens, other))
    assert changed_positions(before, after)[0] == 37


@pytest.mark.parametrize("passes", [0, -1])
def test_refining_without_a_pass_is_refused(passes: int) -> None:
    """Zero passes would hand back zeros, and a number made from them."""
    objective = small("maglev-shared-0.1")
    with pytest.raises(RequestError, match="passes"):
        memories(objective, random_tokens(1, 5), "refined", passes)


def test_memories_have_the_compute_dtype() -> None:
    objective = small("maglev-shared-0.1", dtype=torch.float32)
    objective.decoder.embedding.compute_dtype = torch.bfloat16
    tokens = random_tokens(1, 6)
    with torch.no_grad():
        for source in SOURCES:
            assert memories(objective, tokens, source, 2).dtype == torch.bfloat16
