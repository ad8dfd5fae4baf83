"""`maglev.load`: reading, writing, forking and keeping states, as interface.md promises them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import maglev
from maglev.errors import RequestError, WorkError
from maglev.inference import LanguageModel
from maglev.inference import state as state_module
from maglev.inference.engine import device_named
from maglev.inference.state import saved_position
from maglev.model.accounting import state_nbytes
from tests.helpers import ALL_RECIPES
from tests.small_runs import Train

RECIPE = "maglev-shared-0.1"
TEXT = "A prompt that is longer than the window of eight tokens, and then some."


@pytest.fixture
def lm(trained: Train) -> LanguageModel:
    return maglev.load(trained(RECIPE))


def greedy(lm: LanguageModel, prompt: str = "", **options: object) -> str:
    return "".join(lm.generate(prompt, max_tokens=12, temperature=0, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_reading_in_parts_is_reading_at_once(recipe: str, trained: Train) -> None:
    """By passes and by steps, to the tolerance of float32; the first part begins with BOS, the others do not."""
    lm = maglev.load(trained(recipe, depth=2), device="cpu")
    whole = lm.read(TEXT)
    tokens = lm.tokenizer.encode(TEXT)
    assert whole.position == 1 + len(tokens) and whole.memory.shape == (1, 128)
    by_steps = lm.read(TEXT, method="step")
    torch.testing.assert_close(whole.memory, by_steps.memory, rtol=0, atol=1e-4)
    state = lm.read("")
    assert state.position == 1
    for token in tokens:
        before = state
        state = lm.read(lm.tokenizer.decode_bytes([token]).decode(), state=state)
        assert before.position == state.position - 1
    torch.testing.assert_close(state.memory, by_steps.memory, rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_a_state_has_the_same_size_at_any_length(recipe: str, trained: Train) -> None:
    lm = maglev.load(trained(recipe))
    expected = state_nbytes(lm.decoder.config, 4)
    assert lm.read("").nbytes == lm.read(TEXT).nbytes == lm.read(TEXT * 10).nbytes == expected


def test_writing_goes_on_from_a_prompt_or_a_state(lm: LanguageModel) -> None:
    text = greedy(lm, TEXT)
    assert text and text == greedy(lm, TEXT)
    state = lm.read(TEXT)
    memory, position = state.memory.clone(), state.position
    assert greedy(lm, state=state) == text
    # the state that was given stays as it was
    assert state.position == position and torch.equal(state.memory, memory)
    assert greedy(lm, TEXT[10:], state=lm.read(TEXT[:10])) == text


def test_an_empty_prompt_begins_with_bos_and_adds_nothing_to_a_state(lm: LanguageModel) -> None:
    """Without a state there is always BOS to go on from, so nothing is a valid prompt."""
    empty = lm.read("")
    expected, _ = lm.decoder.step(torch.tensor([lm.tokenizer.bos_id]), lm.decoder.initial_state(1))
    assert empty.position == 1 and torch.equal(empty.memory, expected)
    assert greedy(lm) == greedy(lm, "") == greedy(lm, state=empty)
    state = lm.read(TEXT)
    again = lm.read("", state=state)
    assert again.position == state.position and torch.equal(again.memory, state.memory)


def test_the_seed_decides(lm: LanguageModel) -> None:
    def text(seed: int) -> str:
        return "".join(lm.generate("Once", max_tokens=40, temperature=0.8, seed=seed))

    assert text(1) == text(1) != text(2)


def test_limits_of_writing(lm: LanguageModel) -> None:
    assert list(lm.generate("a", max_tokens=0)) == []
    with pytest.raises(RequestError, match="max_tokens is -1"):
        lm.generate("a", max_tokens=-1)
    with pytest.raises(RequestError, match="temperature"):
        lm.generate("a", temperature=-1)


def test_pieces_are_whole_characters(lm: LanguageModel) -> None:
    text = "".join(pieces := list(lm.generate("", max_tokens=60, temperature=2, seed=3)))
    assert all(pieces) and text.encode().decode() == text


def test_forks_are_independent(lm: LanguageModel) -> None:
    state = lm.read(TEXT)
    a, b, c, d = state.fork(4)
    expected = greedy(lm, state=a)
    changed = lm.read(" something else", state=b)
    lm.decoder.step_(torch.tensor([5]), c.inner)
    assert changed.position > b.position == d.position == state.position and c.position == d.position + 1
    assert greedy(lm, state=d) == greedy(lm, state=state) == expected
    assert not torch.equal(c.memory, d.memory)
    with pytest.raises(RequestError):
        state.fork(0)


def test_a_saved_state_goes_on_the_same(lm: LanguageModel, trained: Train, tmp_path: Path) -> None:
    state = lm.read(TEXT)
    state.save(tmp_path / "s.safetensors")
    again = maglev.load(trained(RECIPE))
    loaded = again.load_state(tmp_path / "s.safetensors")
    assert loaded.position == state.position and torch.equal(loaded.memory, state.memory)
    assert greedy(again, state=loaded) == greedy(lm, state=state)


def test_a_state_that_is_replaced_while_it_is_read_is_whole(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reader saves over it between the first byte and the last."""
    first, second, path = lm.read(TEXT), lm.read("Another text"), tmp_path / "s.safetensors"
    first.save(path)
    plain = state_module.header_of

    def then_replaced(*given: Any) -> Any:
        header = plain(*given)
        second.save(path)
        return header

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "header_of", then_replaced)
        assert torch.equal(lm.load_state(path).memory, first.memory)
        first.save(path)
        assert saved_position(path) == first.position
    assert torch.equal(lm.load_state(path).memory, second.memory) and saved_position(path) == second.position


def test_what_is_no_state_of_this_model_is_refused(lm: LanguageModel, trained: Train, tmp_path: Path) -> None:
    other = maglev.load(trained("maglev-shared-1"))
    state, path = lm.read(TEXT), tmp_path / "s.safetensors"
    with pytest.raises(RequestError, match="another model"):
        other.read(" and", state=state)
    with pytest.raises(RequestError, match="another model"):
        other.generate(" and", state=state)
    state.save(path)
    with pytest.raises(RequestError, match="another model"):
        other.load_state(path)
    content = path.read_bytes()
    for cut in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(WorkError, match="cut short or damaged"):
            lm.load_state(path)
    with pytest.raises(RequestError, match="does not exist"):
        lm.load_state(tmp_path / "none.safetensors")
    weights = next((trained(RECIPE) / "checkpoints").rglob("decoder.safetensors"))
    with pytest.raises(RequestError, match="not a saved state"):
        lm.load_state(weights)


def test_the_decoder_alone_is_loaded(lm: LanguageModel, trained: Train) -> None:
    separate = maglev.load(trained("maglev-separate-1"))
    assert set(separate.decoder.state_dict()) == set(lm.decoder.state_dict())
    assert not any(parameter.requires_grad for parameter in lm.decoder.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, trained: Train) -> None:
    lm = maglev.load(trained(RECIPE), dtype=dtype)
    state = lm.read(TEXT)
    assert state.memory.dtype == dtype
    assert state.nbytes == state_nbytes(lm.decoder.config, dtype.itemsize)
    assert isinstance(greedy(lm, TEXT), str)


def test_a_flipped_byte_in_a_saved_state_is_noticed(lm: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    lm.read("some text").save(path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(WorkError, match="checksum"):
        lm.load_state(path)


def test_a_state_that_cannot_be_saved_says_where(lm: LanguageModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(WorkError, match="could not save the state"):
        lm.read("some text").save(tmp_path / "file" / "s.safetensors")


@pytest.mark.parametrize("device", ["abacus", "cuda:x", "cuda"])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(RequestError, match="device"):
        device_named(device)


def test_a_seed_out_of_range_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="seed"):
        lm.generate("a", seed=1 << 64)
