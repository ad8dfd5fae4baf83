"""A text on its way has a state: in the middle, at its end and after it was closed."""

import gc

import pytest
import torch

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference import LanguageModel, writing
from maglev.inference.batch import generate_batch
from maglev.inference.fast_step import FastDecoder
from maglev.inference.sampling import Sampling
from maglev.inference.state import State
from maglev.inference.stepper import Steppers
from tests.helpers import small

TEXT = "some text that goes on, beyond the window of eight"
TOKENIZER = Tokenizer.train(["some text, some more of it, and a prompt beyond the window"], 270)


@pytest.fixture(params=["decoder", "twins"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    found = LanguageModel(small("maglev-shared-0.1", scale=0.3, vocab_size=TOKENIZER.vocab_size).decoder, TOKENIZER)
    if request.param == "twins":
        vars(found)["steppers"] = Steppers(FastDecoder(found.decoder, "torch"))
    return found


def assert_same(ours: State, theirs: State) -> None:
    assert ours.position == theirs.position and ours.fingerprint == theirs.fingerprint
    torch.testing.assert_close(ours.memory, theirs.memory, rtol=0, atol=1e-10)
    for mine, other in zip(ours.inner.caches, theirs.inner.caches, strict=True):
        torch.testing.assert_close(mine.key, other.key, rtol=0, atol=1e-10)
        torch.testing.assert_close(mine.value, other.value, rtol=0, atol=1e-10)


def test_a_text_goes_on_from_where_another_ended(lm: LanguageModel) -> None:
    """Greedy, a text in two parts is the text at once, though the prompt is given once."""
    whole = lm.generate(TEXT, max_tokens=20, temperature=0)
    text = "".join(whole)
    # where a character is whole: half of one is shown as a replacement sign on either side
    first = lm.generate(TEXT, max_tokens=5, temperature=0)
    begun = "".join(first)
    assert first.finished == "length" and first.state.position == lm.read(TEXT).position + 5
    second = lm.generate(state=first.state, max_tokens=15, temperature=0)
    assert begun + "".join(second) == text
    assert_same(second.state, whole.state)


def test_the_state_is_that_of_the_tokens_read_in(lm: LanguageModel) -> None:
    tokens = generate_batch(lm, [TEXT], max_tokens=12, seeds=[3])[0].tokens
    text = lm.generate(TEXT, max_tokens=12, seed=3)
    by_hand = lm.read(TEXT)
    start = by_hand.position
    assert_same(text.state, by_hand)
    for _ in text:
        while by_hand.position < text.state.position:
            lm.step_through([tokens[by_hand.position - start]], by_hand)
        assert_same(text.state, by_hand)
    assert by_hand.position == start + 12


def test_states_given_out_are_copies(lm: LanguageModel) -> None:
    expected = "".join(lm.generate(TEXT, max_tokens=9, temperature=0))
    text = lm.generate(TEXT, max_tokens=9, temperature=0)
    begun = next(text)
    lm.step_through([5], text.state)
    taken = text.state
    memory = taken.memory.clone()
    assert begun + "".join(text) == expected
    lm.step_through([5], text.state)
    assert text.state.position == lm.read(TEXT).position + 9 and torch.equal(taken.memory, memory)


@pytest.mark.parametrize("how", ["close", "with"])
def test_a_closed_text_keeps_its_state_and_gives_its_stepper_back(lm: LanguageModel, how: str) -> None:
    text = lm.generate("a", max_tokens=9, temperature=0)
    next(text)
    position = text.state.position
    assert lm.steppers.idle == []
    if how == "close":
        text.close()
    else:
        with text as same:
            assert same is text
    text.close()
    assert len(lm.steppers.idle) == 1 and list(text) == [] and text.finished == ""
    assert text.state.position == position > lm.read("a").position
    assert "".join(lm.generate(state=text.state, max_tokens=3, temperature=0))


def test_a_forgotten_text_gives_its_stepper_back_at_once(lm: LanguageModel) -> None:
    """Not when the garbage collector comes by: nothing goes in a circle."""
    gc.disable()
    try:
        text = lm.generate("a", max_tokens=9)
        next(text)
        del text
        assert len(lm.steppers.idle) == 1
    finally:
        gc.enable()


def test_how_a_text_ended(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "".join(lm.generate(TEXT, max_tokens=12, seed=2))
    stopped = lm.generate(TEXT, max_tokens=12, seed=2, stop=plain[4:7])
    assert stopped.finished == "" and "".join(stopped) == plain.split(plain[4:7])[0] and stopped.finished == "stop"
    batch = generate_batch(lm, [TEXT], max_tokens=12, seeds=[2], stop=plain[4:7])[0]
    assert_same(stopped.state, batch.state)
    monkeypatch.setattr(writing, "next_token", lambda *arguments: lm.tokenizer.bos_id)
    ended = lm.generate(TEXT, max_tokens=12)
    assert list(ended) == [] and ended.finished == "end"
    # the end of the document is drawn and not read
    assert_same(ended.state, lm.read(TEXT))


def test_a_text_broken_off_by_an_error_has_no_state(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = lm.generate("a", max_tokens=9)
    next(text)
    with monkeypatch.context() as patched:
        patched.setattr(writing, "next_token", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(text)
    with pytest.raises(RequestError, match="broken off"):
        _ = text.state
    assert len(lm.steppers.idle) == 1


def test_forks_are_written_as_a_batch(lm: LanguageModel) -> None:
    state = lm.read(TEXT)
    memory = state.memory.clone()
    found = generate_batch(lm, [""] * 4, states=state.fork(4), max_tokens=9, seeds=[1, 2, 3, 4])
    for seed, row in enumerate(found, 1):
        alone = lm.generate(state=state, max_tokens=9, seed=seed)
        assert row.text == "".join(alone)
        assert_same(row.state, alone.state)
    assert torch.equal(state.memory, memory)


def test_a_batch_goes_on_from_its_own_states(lm: LanguageModel) -> None:
    first = generate_batch(lm, ["a", TEXT], max_tokens=5, sampling=Sampling(0))
    given = [row.state for row in first]
    positions = [state.position for state in given]
    second = generate_batch(lm, ["", " more"], states=iter(given), max_tokens=5, sampling=Sampling(0))
    assert [state.position for state in given] == positions
    for prompt, row, state in zip(["", " more"], second, given, strict=True):
        assert row.text == "".join(lm.generate(prompt, state=state, max_tokens=5, temperature=0))


def test_states_that_do_not_fit_the_prompts_are_refused(lm: LanguageModel) -> None:
    state = lm.read("a")
    for wrong, says in (([state], "1 states for 2 prompts"), (state, "states is a State"), ([state, None], "state is")):
        with pytest.raises(RequestError, match=says):
            generate_batch(lm, ["", ""], states=wrong)  # type: ignore[arg-type]
