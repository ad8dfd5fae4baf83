"""A prompt read with Q's memories: the state is that of the lifted pass, and the decoder goes on from it alone."""

import pytest
import torch
from torch import Tensor, nn

from maglev.errors import RequestError
from maglev.evaluate.memories import lifted
from maglev.evaluate.reading import LiftedReader, read_lifted
from maglev.inference.reading import read_
from maglev.model.decoder import Decoder
from maglev.model.memory import shift_right
from tests.helpers import ALL_RECIPES, MAGLEV_RECIPES, VOCAB, random_tokens, small, step_through
from tests.small_runs import Train


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
@pytest.mark.parametrize("length", [1, 5, 24])
def test_the_state_holds_the_lifted_pass(recipe: str, length: int) -> None:
    objective = small(recipe)
    tokens = random_tokens(2, length)
    state = read_lifted(objective, tokens)
    with torch.no_grad():
        expected = lifted(objective, tokens)[:, -1]
    torch.testing.assert_close(state.memory, expected, rtol=0, atol=1e-10)
    assert state.position.tolist() == [length, length]


@pytest.mark.parametrize("recipe", MAGLEV_RECIPES)
@pytest.mark.parametrize("length", [3, 20])
def test_stepping_goes_on_as_one_pass_on_qs_memories_and_then_the_decoders_own(recipe: str, length: int) -> None:
    """m'_{1:T-1} inside of the prompt, and from m_T on what the decoder writes itself; the ring has them all."""
    objective = small(recipe, scale=0.4)
    decoder, tokens = objective.decoder, random_tokens(2, length + 12)
    state = read_lifted(objective, tokens[:, :length])
    own = [state.memory]
    with torch.no_grad():
        for slot in range(length, length + 12):
            own.append(decoder.step_(tokens[:, slot], state))
        target_memory = objective.prefiller(tokens[:, :length], decoder)
        memory = torch.cat((target_memory[:, : length - 1], torch.stack(own, dim=1)), dim=1)
        expected = decoder(tokens, shift_right(memory))
    torch.testing.assert_close(memory[:, length - 1 :], expected[:, length - 1 :], rtol=0, atol=1e-9)


class FixedPoint(nn.Module):
    """A Q that has nothing to add: its memories are those that the decoder finds by itself."""

    def forward(self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None) -> Tensor:
        return step_through(decoder, tokens)


def test_where_qs_memories_are_the_decoders_own_it_is_parallel_reading() -> None:
    objective = small("maglev-shared-0.1", scale=0.3)
    objective.prefiller = FixedPoint()
    tokens = random_tokens(2, 20)
    expected = objective.decoder.initial_state(2)
    read_(objective.decoder, tokens, expected)
    found = read_lifted(objective, tokens)
    torch.testing.assert_close(found.memory, expected.memory, rtol=0, atol=1e-8)
    for mine, theirs in zip(found.caches, expected.caches, strict=True):
        torch.testing.assert_close(mine.key, theirs.key, rtol=0, atol=1e-8)
        torch.testing.assert_close(mine.value, theirs.value, rtol=0, atol=1e-8)


def test_what_cannot_be_read_lifted_is_refused() -> None:
    objective = small("maglev-shared-0.1")
    for length in (0, 25):
        with pytest.raises(RequestError, match=f"{length} tokens and lifted reading takes 1 to 24"):
            read_lifted(objective, torch.zeros(1, length, dtype=torch.int64))
    for wrong in (-1, VOCAB, 1 << 40):
        with pytest.raises(RequestError, match=f"token id {wrong} is outside of the vocabulary"):
            read_lifted(objective, torch.tensor([[3, wrong]]))
    with pytest.raises(RequestError, match="whole numbers"):
        read_lifted(objective, torch.zeros(1, 3))


@pytest.mark.parametrize("recipe", [name for name in ALL_RECIPES if name not in MAGLEV_RECIPES])
def test_a_run_without_q_has_no_lifted_reading(recipe: str) -> None:
    with pytest.raises(RequestError, match="no prefiller"):
        read_lifted(small(recipe), random_tokens(1, 5))


def test_a_run_reads_lifted_and_goes_on_alone(trained: Train) -> None:
    reader = LiftedReader(trained("maglev-separate-1"), "cpu", pytest.fail)
    state = reader.read("Some text")
    assert state.position == 1 + len(reader.lm.tokenizer.encode("Some text"))
    assert not torch.allclose(state.memory, reader.lm.read("Some text").memory, atol=1e-4)
    more = reader.lm.read(" and more", state=state)
    assert more.position > state.position and more.nbytes == state.nbytes
    # without a prompt there is still BOS
    assert reader.read("").position == 1
