"""A text does not depend on its slot, nor on who writes beside it."""

from pathlib import Path

import pytest
import torch

import maglev
from maglev.inference.engine import LanguageModel
from maglev.inference.stepper import EagerStepper
from maglev.serve import slots as slots_module
from maglev.serve.limits import Limits
from maglev.serve.planning import make_plan
from maglev.serve.rows import Job
from maglev.serve.schema import CompletionRequest
from maglev.serve.slots import Slots, alike, one_thread, rows_alike
from tests.serve.running import NAME

LIMITS = Limits()


def job(lm: LanguageModel, prompt: str = "a text", **fields: object) -> Job:
    body = CompletionRequest.model_validate({"model": NAME, "prompt": prompt, "seed": 1, "logprobs": 0} | fields)
    (found,) = make_plan(body, lm, LIMITS, None).jobs
    found.state = lm.read(prompt)
    return found


def put(slots: Slots, found: Job) -> None:
    assert found.state is not None
    slots.put(found, found.rows[0], found.state)


def scores_of(slots: Slots, found: Job) -> list[float]:
    """Step until this one is done. -> its logprobs"""
    scores = []
    while not found.rows[0].finished:
        scores += [each.logprob for own, piece in slots.step() if own is found for each in piece.scores]
    return scores


def test_a_text_is_the_same_in_every_slot(lm: LanguageModel) -> None:
    check_every_slot(lm)


@pytest.mark.gpu
def test_a_text_is_the_same_in_every_slot_of_a_gpu(run: Path) -> None:
    check_every_slot(maglev.load(run, device="cuda"))


def check_every_slot(lm: LanguageModel) -> None:
    slots = Slots(lm, 5)
    found = []
    for _ in range(len(slots)):
        mine = job(lm, max_tokens=6)
        put(slots, mine)
        found.append(scores_of(slots, mine))
        # the slot stays taken, so that the next one goes to another
        put(slots, job(lm, "somebody else", max_tokens=10_000))
    assert len(slots) >= 5 and slots.busy == len(slots)
    assert found == [found[0]] * len(slots)


def test_rows_that_a_machine_computes_differently_are_stepped_apart(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scores_of_one(lm, Slots(lm, 8))
    monkeypatch.setattr(slots_module, "alike", lambda lm, count: count <= 2)
    slots = Slots(lm, 7)
    assert [len(group.rows) for group in slots.groups] == [2, 2, 2, 2]
    assert scores_of_one(lm, slots) == pytest.approx(expected, abs=1e-5)
    for _ in range(3):
        put(slots, job(lm, max_tokens=50))
    # the fullest first: two of the groups have nothing to do
    assert [group.busy for group in slots.groups] == [2, 1, 0, 0]


def scores_of_one(lm: LanguageModel, slots: Slots) -> list[float]:
    mine = job(lm, max_tokens=8)
    put(slots, mine)
    return scores_of(slots, mine)


def test_a_difference_between_rows_is_noticed(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step = EagerStepper.step

    def uneven(self: EagerStepper, tokens: torch.Tensor) -> torch.Tensor:
        logits = step(self, tokens).clone()
        logits[3:, 7] = logits[3:, 7].nextafter(torch.tensor(9.0))
        return logits

    monkeypatch.setattr(EagerStepper, "step", uneven)
    assert not alike(lm, 4)
    assert rows_alike(lm, 16) < 4


def test_threads_come_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_state_comes_with_the_end(lm: LanguageModel) -> None:
    """After the last token that was read in, as of the engine's own texts."""
    slots = Slots(lm, 2)
    mine = job(lm, max_tokens=9, save_as="x")
    put(slots, mine)
    pieces = []
    while slots.busy:
        pieces += [piece for _, piece in slots.step()]
    with lm.generate("a text", max_tokens=9, seed=1) as text:
        assert "".join(text) == "".join(piece.text for piece in pieces)
    assert pieces[-1].finished == "length" and pieces[-1].state is not None
    assert pieces[-1].state.position == text.state.position
    torch.testing.assert_close(pieces[-1].state.memory, text.state.memory, rtol=0, atol=1e-4)
    assert all(piece.state is None for piece in pieces[:-1])


def test_what_memory_does_is_told_to_those_who_asked(lm: LanguageModel) -> None:
    asked, other, alone = (job(lm, max_tokens=9, memory=memory) for memory in (True, False, False))
    slots = Slots(lm, 2)
    put(slots, other)
    put(slots, asked)
    pieces = [found for _ in range(9) for found in slots.step()]
    told = {
        name: [value for own, piece in pieces if own is asked for value in piece.watched[name]]
        for name in ("memory_change", "memory_gate")
    }
    assert [len(values) for values in told.values()] == [9, 9]
    assert all(not piece.watched for own, piece in pieces if own is other)
    # asking changes no text, neither one's own nor another's
    put(slots, alone)
    found = scores_of(slots, alone)
    for each in (asked, other):
        assert [score.logprob for own, piece in pieces if own is each for score in piece.scores] == found
    # the same values as of the tokens by themselves
    stepper = EagerStepper(lm.decoder)
    assert asked.state is not None
    stepper.begin(asked.state.inner)
    expected = []
    for token in asked.rows[0].tokens:
        stepper.step(torch.tensor([token]), watched=True)
        gates = stepper.gates()
        assert gates is not None
        expected.append(float(gates))
    assert told["memory_gate"] == pytest.approx(expected, abs=1e-6) and len(set(expected)) > 1


def test_whoever_leaves_frees_the_slot(lm: LanguageModel) -> None:
    slots = Slots(lm, 2)
    mine, other = job(lm, max_tokens=50), job(lm, max_tokens=50)
    put(slots, mine)
    put(slots, other)
    slots.drop(mine)
    assert slots.free == 1 and [own for own, _ in slots.writing()] == [other]
    slots.step()
    put(slots, job(lm, max_tokens=50))
    assert slots.free == 0
