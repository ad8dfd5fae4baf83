"""Values that make no sense are told in one line, before anything is read."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import maglev
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference import LanguageModel, engine
from maglev.inference.batch import generate_batch
from maglev.inference.sampling import Sampling
from maglev.model.decoder import Decoder
from tests.helpers import small
from tests.small_runs import Train

TOKENIZER = Tokenizer.train(["some text, some more of it, and a prompt beyond the window"], 270)
TEXT = "some text that goes on"


def model(dtype: torch.dtype = torch.float32) -> LanguageModel:
    # what float32 holds, so that both precisions have the same weights
    decoder = small("maglev-shared-0.1", scale=0.3, vocab_size=TOKENIZER.vocab_size).decoder.float().to(dtype)
    return LanguageModel(decoder, TOKENIZER)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return model()


NUMBERS = [
    ({name: value}, f"{name} is {value!r}")
    for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    for value in (None, "1", True, [1])
]
SETTINGS = [
    *NUMBERS,
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"top_k": True}, "top_k is True"),
    ({"top_k": None}, "top_k is None"),
    ({"max_tokens": True}, "max_tokens is True"),
    ({"max_tokens": None}, "max_tokens is None"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"seed": None}, "seed is None"),
    ({"seed": "1"}, "seed is '1'"),
    ({"seed": True}, "seed is True"),
    ({"stop": [1]}, "a stop string is a int"),
    ({"stop": b"a"}, "stop is one bytes"),
    ({"stop": [b"a"]}, "a stop string is a bytes"),
    ({"stop": 0}, "stop is a int"),
    ({"prompt": None}, "prompt is a NoneType"),
    ({"prompt": b"a"}, "prompt is a bytes"),
    ({"prompt": 1}, "prompt is a int"),
    ({"prompt": ["a"]}, "prompt is a list"),
    ({"prompt": "ab\udcff"}, "prompt is not UTF-8 text (character 2"),
]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads first has lost."""

    def read(*arguments: object) -> None:
        raise AssertionError("something was read")

    monkeypatch.setattr(LanguageModel, "read_tokens", read)


@pytest.mark.parametrize(("settings", "says"), SETTINGS, ids=[says for _, says in SETTINGS])
def test_generate_refuses(lm: LanguageModel, unread: None, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        lm.generate(**settings)


BATCHES: list[tuple[Any, dict[str, Any], str]] = [
    ([1], {}, "prompt 0 of 1 is a int"),
    (["a", "\ud800"], {}, "prompt 1 of 2 is not UTF-8"),
    (None, {}, "prompts is a NoneType"),
    (b"a", {}, "prompts is one bytes"),
    (["a"], {"seeds": 1}, "seeds is a int"),
    (["a"], {"seeds": "1"}, "seeds is one str"),
    (["a"], {"seeds": [1.5]}, "seed is 1.5"),
    (["a"], {"sampling": {"temperature": 1}}, "sampling is a dict"),
    (["a"], {"stop": b"a"}, "stop is one bytes"),
    (["a"], {"max_tokens": True}, "max_tokens is True"),
]


@pytest.mark.parametrize(("prompts", "settings", "says"), BATCHES, ids=[says for *_, says in BATCHES])
def test_generate_batch_refuses(lm: LanguageModel, unread: None, prompts: Any, settings: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        generate_batch(lm, prompts, **settings)


REQUESTS: list[tuple[Callable[[LanguageModel], object], str]] = [
    (lambda lm: lm.read(None), "text is a NoneType"),  # type: ignore[arg-type]
    (lambda lm: lm.read("\ud83e\uddea"), "text is not UTF-8 text"),
    (lambda lm: lm.read("a").fork(1.5), r"fork\(1.5\)"),  # type: ignore[arg-type]
    (lambda lm: lm.read("a").fork(None), r"fork\(None\)"),  # type: ignore[arg-type]
    (lambda lm: lm.read("a").fork(True), r"fork\(True\)"),
    (lambda lm: lm.read_tokens([10**30], lm.read("a"), "parallel"), f"token id {10**30} is outside"),
    (lambda lm: lm.read_tokens([3, 1.7], lm.read("a"), "parallel"), "token id 1.7 is no whole number"),  # type: ignore[list-item]
    (lambda lm: lm.read_tokens(7, lm.read("a"), "step"), "tokens is a int"),  # type: ignore[arg-type]
    (lambda lm: lm.step_through([10**6], lm.read("a")), "token id 1000000 is outside"),
    (lambda lm: lm.step_through([True], lm.read("a")), "token id True is no whole number"),
    (lambda lm: maglev.load("nowhere", dtype=torch.int8), "dtype is torch.int8; it must be one of float64"),
    (lambda lm: maglev.load("nowhere", dtype="int8"), "dtype is 'int8'"),
    (lambda lm: maglev.load("nowhere", dtype=8), "dtype is 8"),  # type: ignore[arg-type]
    (lambda lm: maglev.load("nowhere", device="meta"), "device is 'meta'; it must be auto, cpu"),
    (lambda lm: maglev.load("nowhere", device=None), "device is 'None'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("ask", "says"), REQUESTS, ids=[says for _, says in REQUESTS])
def test_other_requests_are_refused(lm: LanguageModel, ask: Callable[[LanguageModel], object], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        ask(lm)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert engine.device_named("cuda:1") == torch.device("cuda:1")
    with pytest.raises(RequestError, match="'cuda:2' and the last GPU is cuda:1"):
        engine.device_named("cuda:2")


def test_other_ways_to_say_the_same(lm: LanguageModel) -> None:
    def text(**settings: Any) -> str:
        return "".join(lm.generate("a", **({"max_tokens": 9, "temperature": 0.8} | settings)))

    expected = text()
    numbers = {"max_tokens": np.int64(9), "temperature": np.float64(0.8), "seed": np.int32(0), "top_k": np.int64(0)}
    assert text(stop=None) == text(stop=iter(())) == text(**numbers) == expected
    found = generate_batch(
        lm, (prompt for prompt in "ab"), max_tokens=9, sampling=Sampling(0.8), seeds=iter((0, 1)), stop=iter(["\x00"])
    )
    assert found[0].text == expected
    state = lm.read("a")
    lm.step_through(torch.tensor([3, 4]), state)  # type: ignore[arg-type]
    assert state.position == lm.read("a").position + 2


def test_a_precision_may_be_named(trained: Train) -> None:
    loaded = maglev.load(trained("maglev-shared-0.1"), device="cpu", dtype="bfloat16")
    assert loaded.decoder.compute_dtype == torch.bfloat16


def test_a_state_of_another_precision_is_cast() -> None:
    """float64 and float32 of one run are one model; on a GPU too, which is why the fingerprint says so."""
    one, other = model(torch.float64), model(torch.float32)
    assert one.fingerprint == other.fingerprint
    for here, there in ((one, other), (other, one)):
        state = here.read(TEXT)
        memory = state.memory.clone()
        more = there.read(" and more", state=state)
        assert more.memory.dtype == there.decoder.compute_dtype and more.inner.position.dtype == torch.int64
        torch.testing.assert_close(
            more.memory.double(), one.read(" and more", one.read(TEXT)).memory, rtol=0, atol=1e-4
        )
        written = there.generate(state=state, max_tokens=5, temperature=0)
        text = "".join(written)
        assert text == "".join(there.generate(TEXT, max_tokens=5, temperature=0)) and len(text) > 0
        mixed = [state, there.read(TEXT)]
        rows = generate_batch(there, ["", ""], states=mixed, max_tokens=5, sampling=Sampling(0))
        assert [row.text for row in rows] == [text, text]
        assert there.next_logits(state).shape == (TOKENIZER.vocab_size,)
        assert state.memory.dtype == memory.dtype and torch.equal(state.memory, memory)
        there.step_through([5], state)
        assert state.memory.dtype == there.decoder.compute_dtype


def test_the_configuration_is_part_of_the_fingerprint(lm: LanguageModel) -> None:
    turned = Decoder(replace(lm.decoder.config, rope_base=lm.decoder.config.rope_base * 2))
    turned.load_state_dict(lm.decoder.state_dict())
    other = LanguageModel(turned, TOKENIZER)
    assert other.fingerprint != lm.fingerprint
    with pytest.raises(RequestError, match="another model"):
        other.read("a", state=lm.read("b"))


def test_the_decoder_given_stays_as_it_was() -> None:
    decoder = small("maglev-shared-0.1", scale=0.3, vocab_size=TOKENIZER.vocab_size).decoder.train()
    for weights in ("plain", "int8"):
        lm = LanguageModel(decoder, TOKENIZER, weights)  # type: ignore[arg-type]
        state = lm.read(TEXT)
        text = lm.generate(" on", state=state, max_tokens=4)
        assert "".join(text) and generate_batch(lm, ["", "a"], states=state.fork(2), max_tokens=4)
        assert not text.state.memory.requires_grad and not lm.next_logits(state).requires_grad
        lm.step_through([5], state)
        assert not state.inner.caches[0].key.requires_grad
    assert decoder.training and all(parameter.requires_grad for parameter in decoder.parameters())
    assert all(parameter.grad is None for parameter in decoder.parameters())
