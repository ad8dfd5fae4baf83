"""Many texts at once: each is the one it would be alone."""

import pytest
import torch

from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference.batch import generate_batch
from maglev.inference.engine import LanguageModel
from maglev.inference.sampling import Sampling
from tests.helpers import small

PROMPTS = ["a", "some longer prompt, beyond the window of eight", ""]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    tokenizer = Tokenizer.train(["some text, some more of it, and a prompt beyond the window"], 270)
    objective = small("maglev-shared-0.1", scale=0.3, dtype=torch.float32, vocab_size=tokenizer.vocab_size)
    return LanguageModel(objective.decoder, tokenizer)


def test_a_row_writes_what_it_would_write_alone(lm: LanguageModel) -> None:
    together = generate_batch(lm, PROMPTS, max_tokens=30, sampling=Sampling(0.9), seeds=[5, 6, 7])
    for prompt, seed, found in zip(PROMPTS, [5, 6, 7], together, strict=True):
        assert found.text == "".join(lm.generate(prompt, max_tokens=30, temperature=0.9, seed=seed))


def test_neighbours_do_not_matter_to_the_bit_in_a_batch_of_one_size(lm: LanguageModel) -> None:
    one = generate_batch(lm, ["x", *PROMPTS[1:]], max_tokens=20, seeds=[1, 2, 3])
    other = generate_batch(lm, ["quite another text", *PROMPTS[1:]], max_tokens=20, seeds=[9, 2, 3])
    assert one[1].tokens == other[1].tokens and one[1].logprobs == other[1].logprobs
    assert torch.equal(one[2].state.memory, other[2].state.memory)


def test_logprobs_are_those_of_reading_the_same_tokens(lm: LanguageModel) -> None:
    found = generate_batch(lm, ["a", "b"], max_tokens=12, sampling=Sampling(0.5), seeds=[3, 4])[0]
    state = lm.read("a")
    for token, logprob in zip(found.tokens, found.logprobs, strict=True):
        assert float(lm.next_logits(state).log_softmax(-1)[token]) == pytest.approx(logprob, abs=1e-4)
        lm.step_through([token], state)
    assert state.position == found.state.position
    torch.testing.assert_close(found.state.memory, state.memory, rtol=0, atol=1e-4)


def test_a_batch_penalises_what_its_prompts_hold(lm: LanguageModel) -> None:
    prompt, sampling = "".join(map(chr, range(128))), Sampling(temperature=0, repetition_penalty=50.0)
    found = generate_batch(lm, [prompt, "a"], max_tokens=9, sampling=sampling)[0]
    assert found.text == "".join(lm.generate(prompt, max_tokens=9, temperature=0, repetition_penalty=50.0))
    assert not set(found.tokens) & set(lm.tokenizer.encode(prompt))
    unheard = generate_batch(lm, ["", ""], states=lm.read(prompt).fork(2), max_tokens=9, sampling=sampling)[0]
    assert set(unheard.tokens) & set(lm.tokenizer.encode(prompt))


def test_a_stop_string_ends_one_row_and_not_the_others(lm: LanguageModel) -> None:
    plain = generate_batch(lm, PROMPTS, max_tokens=25, seeds=[5, 6, 7])
    stop = plain[0].text[3:5]
    found = generate_batch(lm, PROMPTS, max_tokens=25, seeds=[5, 6, 7], stop=stop)
    assert found[0].finished == "stop" and found[0].text == plain[0].text.split(stop)[0]
    for row, alone in zip(found[1:], plain[1:], strict=True):
        assert row.text == alone.text.split(stop)[0]


def test_a_stop_string_that_never_comes_changes_nothing(lm: LanguageModel) -> None:
    """Not even what only began like it is kept back at the end."""
    plain = generate_batch(lm, PROMPTS, max_tokens=9, seeds=[5, 6, 7])
    never = [plain[0].text[-1] + "\x00never", plain[1].text[-1] + "\x00never"]
    found = generate_batch(lm, PROMPTS, max_tokens=9, seeds=[5, 6, 7], stop=never)
    assert [(row.text, row.finished) for row in found] == [(row.text, "length") for row in plain]
    assert "".join(lm.generate("a", max_tokens=9, seed=5, stop=never)) == plain[0].text


def test_any_number_of_tokens_may_be_asked_for(lm: LanguageModel) -> None:
    """What ends it is then a stop string or the document."""
    found = generate_batch(lm, ["a"], max_tokens=10**30, seeds=[1], stop="e")[0]
    assert found.finished in ("stop", "end")
    assert "".join(lm.generate("a", max_tokens=10**30, seed=1, stop="e")) == found.text


def test_the_state_of_a_stopped_row_is_that_of_its_last_token(lm: LanguageModel) -> None:
    plain = generate_batch(lm, PROMPTS, max_tokens=25, seeds=[5, 6, 7])
    found = generate_batch(lm, PROMPTS, max_tokens=25, seeds=[5, 6, 7], stop=plain[0].text[3:5])[0]
    assert found.state.position == 1 + len(lm.tokenizer.encode(PROMPTS[0])) + len(found.tokens)


def test_without_tokens_to_write_only_the_prompt_is_read(lm: LanguageModel) -> None:
    found = generate_batch(lm, ["a"], max_tokens=0)[0]
    assert (found.text, found.tokens, found.finished) == ("", [], "length")
    torch.testing.assert_close(found.state.memory, lm.read("a").memory, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("prompts", "settings", "word"),
    [
        ([], {}, "prompts"),
        ("one text", {}, "prompts"),
        (["a"], {"seeds": [1, 2]}, "seeds"),
        (["a"], {"seeds": [-1]}, "seed"),
        (["a"], {"max_tokens": -1}, "max_tokens"),
        (["a"], {"max_tokens": 1.5}, "max_tokens"),
        (["a"], {"stop": [""]}, "stop"),
    ],
)
def test_bad_requests_are_refused(lm: LanguageModel, prompts: list[str], settings: dict, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        generate_batch(lm, prompts, **settings)
