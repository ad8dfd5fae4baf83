"""The engine's steps are those of the decoder, and texts that are written by turns do not meet."""

from collections import Counter
from itertools import zip_longest

import pytest
import torch

from maglev.data.tokenizer import Tokenizer
from maglev.inference import batch
from maglev.inference.batch import generate_batch
from maglev.inference.engine import LanguageModel, seeded
from maglev.inference.fast_step import FastDecoder
from maglev.inference.sampling import Sampling, next_token, next_tokens
from maglev.inference.state import State
from maglev.inference.stepper import KEPT, KEPT_BYTES, EagerStepper, Steppers
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from tests.helpers import small

TEXT = "some text that goes on, beyond the window of eight"


def model(dtype: torch.dtype = torch.float64) -> LanguageModel:
    tokenizer = Tokenizer.train(["some text, some more of it, and a prompt beyond the window"], 270)
    objective = small("maglev-shared-0.1", scale=0.3, dtype=dtype, vocab_size=tokenizer.vocab_size)
    return LanguageModel(objective.decoder, tokenizer)


@pytest.fixture(params=["decoder", "twins"])
def lm(request: pytest.FixtureRequest) -> LanguageModel:
    """Stepping as a CPU does, and through the parts that a GPU has kernels for."""
    found = model()
    if request.param == "twins":
        vars(found)["steppers"] = Steppers(FastDecoder(found.decoder, "torch"))
    return found


def write_by_hand(decoder: Decoder, lm: LanguageModel, prompt: str, count: int, seed: int) -> tuple[list[int], State]:
    """Every token through `Decoder.step`, drawn as the engine draws."""
    state, generator = decoder.initial_state(1), seeded(seed)
    with torch.no_grad():
        for token in [lm.tokenizer.bos_id, *lm.tokenizer.encode(prompt)]:
            memory, state = decoder.step(torch.tensor([token]), state)
        tokens = []
        for _ in range(count):
            tokens.append(next_token(decoder.readout(memory)[0], Sampling(), generator))
            memory, state = decoder.step(torch.tensor(tokens[-1:]), state)
    return tokens, State(state, lm.fingerprint)


def test_reading_by_steps_is_the_decoders(lm: LanguageModel) -> None:
    read = lm.read(TEXT, method="step")
    _, expected = write_by_hand(lm.decoder, lm, TEXT, 0, 0)
    assert read.position == expected.position
    torch.testing.assert_close(read.memory, expected.memory, rtol=0, atol=1e-10)
    for ours, theirs in zip(read.inner.caches, expected.inner.caches, strict=True):
        torch.testing.assert_close(ours.key, theirs.key, rtol=0, atol=1e-10)
        torch.testing.assert_close(ours.value, theirs.value, rtol=0, atol=1e-10)
    torch.testing.assert_close(lm.next_logits(read), lm.decoder.readout(expected.memory)[0], rtol=0, atol=1e-9)


def test_writing_is_the_decoders(lm: LanguageModel) -> None:
    tokens, expected = write_by_hand(lm.decoder, lm, TEXT, 20, seed=3)
    assert lm.tokenizer.bos_id not in tokens
    text = lm.tokenizer.decode_bytes(tokens).decode(errors="replace")
    assert "".join(lm.generate(TEXT, max_tokens=20, seed=3)) == text
    found = generate_batch(lm, ["a", TEXT], max_tokens=20, seeds=[1, 3])[1]
    assert found.tokens == tokens
    torch.testing.assert_close(found.state.memory, expected.memory, rtol=0, atol=1e-10)


def test_texts_written_by_turns_do_not_meet(lm: LanguageModel) -> None:
    prompts = ["a", TEXT, "the window"]
    alone = ["".join(lm.generate(prompt, max_tokens=20, seed=3)) for prompt in prompts]
    state = lm.read(prompts[0])
    memory = state.memory.clone()
    writing = [lm.generate("", state=state, max_tokens=20, seed=3)]
    writing += [lm.generate(prompt, max_tokens=20, seed=3) for prompt in prompts[1:]]
    turns = list(zip_longest(*writing, fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == alone
    assert state.position == 1 + len(lm.tokenizer.encode(prompts[0])) and torch.equal(state.memory, memory)


def test_steppers_come_back_and_are_used_again(lm: LanguageModel) -> None:
    pool = lm.steppers
    lm.generate("a", max_tokens=9)
    assert pool.idle == []  # nothing is taken before the first piece
    first, second = lm.generate("a", max_tokens=9, seed=1), lm.generate("b", max_tokens=9, seed=1)
    next(first), next(second)
    assert pool.idle == []
    first.close()  # type: ignore[attr-defined]
    ((room, kept),) = pool.idle
    assert room == 1
    third = lm.generate("c", max_tokens=9, seed=1)
    next(third)
    assert pool.idle == []
    del third
    assert pool.idle == [(1, kept)]
    rest = "".join(second)
    assert len(pool.idle) == 2
    again = lm.generate("b", max_tokens=9, seed=1)
    next(again)
    assert "".join(again) == rest


def test_only_a_few_steppers_wait(lm: LanguageModel) -> None:
    with lm.steppers.lend(3) as wide:
        pass
    assert lm.steppers.idle == [(4, wide)]
    texts = [lm.generate("a", max_tokens=9, seed=seed) for seed in range(KEPT)]
    for text in texts:
        next(text)
    assert lm.steppers.idle == [(4, wide)]
    for text in texts:
        list(text)
    assert [room for room, _ in lm.steppers.idle] == [1] * KEPT


def test_what_waits_holds_no_rows(lm: LanguageModel) -> None:
    list(lm.generate("a", max_tokens=2))
    generate_batch(lm, ["a", "b"], max_tokens=2)
    steppers = [stepper for _, stepper in lm.steppers.idle]
    assert len(steppers) == 2
    held = [value for stepper in steppers for value in vars(stepper).values()]
    assert not any(isinstance(value, DecoderState) for value in held)


class Sized(EagerStepper):
    def __init__(self, nbytes: int) -> None:
        self.size = nbytes

    @property
    def nbytes(self) -> int:
        return self.size


def test_what_waits_is_bounded_by_its_bytes() -> None:
    pool = Steppers(small("maglev-shared-0.1").decoder)
    for room, nbytes in ((1, KEPT_BYTES // 2), (2, KEPT_BYTES // 4), (4, KEPT_BYTES // 4)):
        pool.put_back(room, Sized(nbytes))
    assert [room for room, _ in pool.idle] == [1, 2, 4]
    pool.put_back(8, Sized(1))
    assert [room for room, _ in pool.idle] == [2, 4, 8]
    # one that is too large by itself drives nobody out
    pool.put_back(256, Sized(KEPT_BYTES + 1))
    assert [room for room, _ in pool.idle] == [2, 4, 8]


def test_release_frees_what_waits(lm: LanguageModel) -> None:
    model().release()  # nothing was made yet
    list(lm.generate("a", max_tokens=2))
    reader = FastDecoder(lm.decoder, "torch")
    vars(lm)["reader"] = reader
    made = [reader, lm.steppers.steps] if isinstance(lm.steppers.steps, FastDecoder) else [reader]
    for fast in made:
        vars(fast)["recorded_passes"] = {(1, 256): object()}
    writing = lm.generate("b", max_tokens=9, seed=1)
    begun = next(writing)
    list(lm.generate("a", max_tokens=2))
    assert lm.steppers.idle
    lm.release()
    assert lm.steppers.idle == [] and not any(fast.recorded_passes for fast in made)
    # a text that is being written goes on
    assert begun + "".join(writing) == "".join(lm.generate("b", max_tokens=9, seed=1))


def test_ragged_rows_end_where_each_would_alone(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row ends its document, one meets a stop string, one writes to the limit; their states are their own."""
    drawn: Counter[int] = Counter()

    def draw(logits, draws):  # type: ignore[no-untyped-def]
        tokens = next_tokens(logits, draws)
        drawn.update(draw.generator.initial_seed() for draw in draws if draw is not None)
        ends = [draw is not None and draw.generator.initial_seed() == 1 and drawn[1] == 5 for draw in draws]
        return [lm.tokenizer.bos_id if end else token for end, token in zip(ends, tokens)]

    prompts, seeds = ["a", TEXT, "the window"], [1, 2, 3]
    stop = "".join(lm.generate(TEXT, max_tokens=12, seed=2))[4:7]
    monkeypatch.setattr(batch, "next_tokens", draw)
    found = generate_batch(lm, prompts, max_tokens=12, seeds=seeds, stop=stop)
    assert [row.finished for row in found] == ["end", "stop", "length"] and len(found[0].tokens) == 4
    for prompt, row in zip(prompts, found, strict=True):
        alone = lm.read(prompt, method="step")
        lm.step_through(row.tokens, alone)
        assert row.state.position == alone.position
        torch.testing.assert_close(row.state.memory, alone.memory, rtol=0, atol=1e-10)
        for ours, theirs in zip(row.state.inner.caches, alone.inner.caches, strict=True):
            torch.testing.assert_close(ours.key, theirs.key, rtol=0, atol=1e-10)


def test_more_rows_than_a_bucket_are_written_in_groups(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["a", TEXT, "the window", "b", "c"]
    together = generate_batch(lm, prompts, max_tokens=8)
    monkeypatch.setattr(batch, "BUCKETS", (1, 2))
    assert [row.tokens for row in generate_batch(lm, prompts, max_tokens=8)] == [row.tokens for row in together]
    assert [row.state.position for row in together] == [1 + len(lm.tokenizer.encode(p)) + 8 for p in prompts]


def test_a_row_that_begins_anew_leaves_the_others(lm: LanguageModel) -> None:
    states = [lm.read(prompt) for prompt in ("a", TEXT, "b")]
    with lm.steppers.lend(2) as stepper:
        stepper.begin(DecoderState.join([states[0].inner, states[1].inner]))
        stepper.step(torch.tensor([1, 2]))
        before = stepper.row(1)
        stepper.put(0, states[2].inner)
        torch.testing.assert_close(stepper.row(0).memory, states[2].memory)
        assert torch.equal(stepper.row(1).memory, before.memory)
        torch.testing.assert_close(stepper.logits()[0], lm.next_logits(states[2]))
        logits = stepper.step(torch.tensor([3, 4]))
    lm.step_through([3], states[2])
    lm.step_through([2, 4], states[1])
    torch.testing.assert_close(logits[0], lm.next_logits(states[2]))
    torch.testing.assert_close(logits[1], lm.next_logits(states[1]))
