"""Packed rows: with a document mask and a memory reset the second document is what it is alone."""

import pytest
import torch

from maglev.evaluate.memories import recurrent, refined
from maglev.model.memory import shift_right
from maglev.objectives.losses import Documents
from maglev.objectives.sweeps import Sweeps
from tests.helpers import ALL_RECIPES, MAGLEV_RECIPES, MEMORY_RECIPES, batch_of, random_tokens, small

# subsets of every S below are then of one size, in a row and in its second document
FIRST, SECOND = 48, 36


def boundaries(first: int = FIRST, second: int = SECOND, *, mask: bool = True, reset: bool = True) -> Documents:
    starts = torch.tensor([[0] * first + [first] * second])
    keep = torch.tensor([[False] + [True] * (first - 1) + [False] + [True] * (second - 1)])
    return Documents(attention_starts=starts if mask else None, memory_keep=keep if reset else None)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_parallel_decoder_starts_afresh_in_the_second_document(recipe: str) -> None:
    decoder = small(recipe, context=100).decoder
    tokens, documents = random_tokens(1, FIRST + SECOND), boundaries()
    memory = torch.randn(1, FIRST + SECOND, 32, dtype=torch.float64)
    packed = decoder(tokens, shift_right(memory, documents.memory_keep), starts=documents.attention_starts)
    alone = decoder(tokens[:, FIRST:], shift_right(memory[:, FIRST:]))
    torch.testing.assert_close(packed[:, FIRST:], alone, rtol=0, atol=1e-10)
    first = decoder(tokens[:, :FIRST], shift_right(memory[:, :FIRST]))
    torch.testing.assert_close(packed[:, :FIRST], first, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "maglev-separate-1"])
def test_the_prefiller_starts_afresh_in_the_second_document(recipe: str) -> None:
    objective = small(recipe, context=100)
    tokens = random_tokens(1, FIRST + SECOND)
    packed = objective.prefiller(tokens, objective.decoder, boundaries().attention_starts)
    alone = objective.prefiller(tokens[:, FIRST:], objective.decoder)
    torch.testing.assert_close(packed[:, FIRST:], alone, rtol=0, atol=1e-10)


# where interleaving by position meets documents, the second document keeps its own subsets if it begins at 0 mod S
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_the_losses_of_the_second_document_are_those_it_has_alone(recipe: str) -> None:
    objective = small(recipe, context=100)
    tokens, targets = batch_of(1, FIRST + SECOND)
    masked = targets.clone()
    masked[:, :FIRST] = -1
    packed = objective(tokens, masked, boundaries())
    alone = objective(tokens[:, FIRST:], targets[:, FIRST:])
    torch.testing.assert_close(packed.total, alone.total, rtol=0, atol=1e-10)
    torch.testing.assert_close(packed.consistency, alone.consistency, rtol=0, atol=1e-10)
    # and without the boundaries they are others
    assert (objective(tokens, masked).total - alone.total).abs() > 1e-4


@pytest.mark.parametrize("injection", ["shared_kv+layer_residual", "shared_kv"])
@pytest.mark.parametrize(("delay", "rollout"), [(2, 4), (4, 4), (6, 4), (8, 12)])
def test_older_memories_start_afresh_in_the_second_document(delay: int, rollout: int, injection: str) -> None:
    shape = {"context": 100, "delay": delay, "injection": injection, "objective_rollout": rollout}
    objective = small("maglev-closed", scale=0.4, **shape)
    tokens, targets = batch_of(1, FIRST + SECOND)
    masked = targets.clone()
    masked[:, :FIRST] = -1
    packed, alone = objective(tokens, masked, boundaries()), objective(tokens[:, FIRST:], targets[:, FIRST:])
    torch.testing.assert_close(packed.total, alone.total, rtol=0, atol=1e-10)
    assert (objective(tokens, masked, boundaries(reset=False)).total - alone.total).abs() > 1e-5
    for mask, reset in ((True, True), (False, True), (True, False)):
        documents = boundaries(mask=mask, reset=reset)
        with torch.no_grad():
            stepped = recurrent(objective.decoder, tokens, documents)
            previous = shift_right(stepped, documents.memory_keep, delay)
            parallel = objective.decoder(tokens, previous, starts=documents.attention_starts)
        torch.testing.assert_close(parallel, stepped, rtol=0, atol=1e-10)
        if mask and reset:
            with torch.no_grad():
                passes = refined(objective.decoder, tokens, 40, documents)
            torch.testing.assert_close(passes, stepped, rtol=0, atol=1e-10)
        if injection == "shared_kv":
            own = Sweeps(objective.decoder, tokens, documents).own_memories(objective.decoder.embedding(tokens))
            torch.testing.assert_close(own, stepped, rtol=0, atol=1e-10)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["interleaved", "full"])
def test_lrt_respects_documents_in_every_pass(schedule: str, passes: int) -> None:
    objective = small("lrt-slsl", context=100, objective_schedule=schedule, objective_passes=passes)
    tokens, targets = batch_of(1, FIRST + SECOND)
    masked = targets.clone()
    masked[:, :FIRST] = -1
    packed = objective(tokens, masked, boundaries())
    alone = objective(tokens[:, FIRST:], targets[:, FIRST:])
    torch.testing.assert_close(packed.total, alone.total, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_recurrent_memories_start_afresh_in_the_second_document(recipe: str) -> None:
    """Stepped through both; trajectories are compared, so the weights are small enough for the loop to contract."""
    decoder = small(recipe, scale=0.4, context=100).decoder
    tokens = random_tokens(1, FIRST + SECOND)
    with torch.no_grad():
        packed, alone = recurrent(decoder, tokens, boundaries()), recurrent(decoder, tokens[:, FIRST:])
    torch.testing.assert_close(packed[:, FIRST:], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("recipe", MEMORY_RECIPES)
def test_stepping_and_the_parallel_pass_agree_on_what_a_boundary_does(recipe: str, mask: bool, reset: bool) -> None:
    """Each of the two settings alone, too: the recurrence identity in a packed row."""
    decoder = small(recipe, context=100).decoder
    tokens, documents = random_tokens(1, FIRST + SECOND), boundaries(mask=mask, reset=reset)
    with torch.no_grad():
        stepped = recurrent(decoder, tokens, documents)
        previous = shift_right(stepped, documents.memory_keep)
        parallel = decoder(tokens, previous, starts=documents.attention_starts)
    torch.testing.assert_close(parallel, stepped, rtol=0, atol=1e-10)


def test_rows_of_a_batch_have_boundaries_of_their_own() -> None:
    decoder = small("maglev-shared-0.1", scale=0.4).decoder
    tokens = random_tokens(2, 40)
    one, other = boundaries(10, 30), boundaries(25, 15)
    both = Documents(
        attention_starts=torch.cat([one.attention_starts, other.attention_starts]),
        memory_keep=torch.cat([one.memory_keep, other.memory_keep]),
    )
    with torch.no_grad():
        together = recurrent(decoder, tokens, both)
        parallel = refined(decoder, tokens, 40, both)
        for row, documents in enumerate((one, other)):
            alone = recurrent(decoder, tokens[row : row + 1], documents)
            torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-10)
    torch.testing.assert_close(parallel, together, rtol=0, atol=1e-10)


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
def test_a_reset_without_a_mask_cuts_memory_alone(recipe: str) -> None:
    """The first token after a boundary gets no memory; its attention still sees the document before."""
    objective = small(recipe, context=100)
    tokens = random_tokens(1, FIRST + SECOND)
    plain, _ = objective.lifted(tokens)
    reset, _ = objective.lifted(tokens, boundaries(mask=False))
    assert torch.equal(plain[:, :FIRST], reset[:, :FIRST])
    assert (plain[:, FIRST] != reset[:, FIRST]).any()
    masked, _ = objective.lifted(tokens, boundaries())
    assert (reset[:, FIRST] != masked[:, FIRST]).any()
