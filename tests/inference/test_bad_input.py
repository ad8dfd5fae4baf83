"""What is no state, no token and no size is refused, and the state given stays as it was."""

import pytest
import torch

import maglev
from maglev.errors import RequestError
from maglev.inference import LanguageModel
from maglev.inference.reading import read_
from tests.helpers import VOCAB, random_tokens, small
from tests.small_runs import Train


@pytest.fixture
def lm(trained: Train) -> LanguageModel:
    return maglev.load(trained("maglev-shared-0.1"))


def test_what_is_no_state_is_refused(lm: LanguageModel) -> None:
    for wrong in (123, "s.safetensors", lm.decoder.initial_state(1)):
        with pytest.raises(RequestError, match="state is a"):
            lm.read("a", state=wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="state is a"):
            lm.generate("a", state=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["parallel", "step"])
def test_ids_outside_of_the_vocabulary_leave_the_state_as_it_was(lm: LanguageModel, method: str) -> None:
    state = lm.read("a")
    memory, position = state.memory.clone(), state.position
    for wrong in (-1, lm.tokenizer.vocab_size):
        with pytest.raises(RequestError, match="outside of the vocabulary"):
            lm.read_tokens([5, wrong], state, method)  # type: ignore[arg-type]
    assert state.position == position and torch.equal(state.memory, memory)


def test_reading_refuses_what_it_cannot_read() -> None:
    decoder = small("maglev-shared-0.1", scale=0.3).decoder
    state = decoder.initial_state(1)
    with pytest.raises(RequestError, match="outside of the vocabulary"):
        read_(decoder, torch.tensor([[1, VOCAB]]), state)
    with pytest.raises(RequestError, match="3 rows"):
        read_(decoder, random_tokens(3, 4), state)
    for wrong in ({"budget": 0}, {"block": -1}, {"blocks": 0}):
        with pytest.raises(RequestError, match="at least 1"):
            read_(decoder, random_tokens(1, 4), state, **wrong)
    assert read_(decoder, random_tokens(1, 0), state).tokens == 0 and int(state.position) == 0
