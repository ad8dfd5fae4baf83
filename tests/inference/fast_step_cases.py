"""FastDecoder on the kernels equals Decoder.step_; `test_fast_step.py` runs this file."""

import pytest
import torch

from maglev.errors import RequestError
from maglev.inference import fast_read, fast_step
from maglev.inference.fast_step import BUCKETS, FastDecoder, GraphStepper
from maglev.inference.reading import read_
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState, RingCache
from maglev.ops import fused_decode, fused_product, fused_ring
from tests.helpers import assert_same_state, random_tokens, small, watched
from tests.inference.test_fast_step import BOTH, RECIPES, follow, ragged_state, tiny
from tests.kernel_cases import DEVICE, INTERPRETED, round_like_the_gpu

if INTERPRETED:
    round_like_the_gpu()


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes the interpreter about a millisecond, however much it does."""
    monkeypatch.setattr(fused_product, "PROGRAMS", 1)
    if INTERPRETED:
        monkeypatch.setattr(fused_product, "VECTOR_ROWS", 64)
    monkeypatch.setattr(fused_ring, "PROGRAMS", 1)


SHAPES = dict(zip(RECIPES, ({"depth": 1}, {"kv_heads": 1}, {}, {"kv_heads": 1}), strict=True))


# in the interpreter those that have most: full layers, and memory in keys, values and the stream
@pytest.mark.parametrize("recipe", ["transformer-slsl", BOTH] if INTERPRETED else RECIPES)
def test_equals_the_decoder_beyond_the_window(recipe: str) -> None:
    # every step takes the interpreter up to a second; windows are 5 and, where they are the whole context, 12
    steps = 40 if not INTERPRETED else 14 if recipe == "transformer-slsl" else 9
    follow(tiny(recipe, DEVICE, **SHAPES[recipe]), "triton", batch=1, steps=steps, bound=1e-4)


# rows of several sequences are what reading has too, below
@pytest.mark.parametrize("recipe", RECIPES[2:3] if INTERPRETED else RECIPES[2:])
def test_equals_the_decoder_on_ragged_rows(recipe: str) -> None:
    decoder = tiny(recipe, DEVICE, kv_heads=1)
    follow(decoder, "triton", batch=3, steps=4, bound=1e-4, state=ragged_state(decoder))


def test_equals_the_decoder_where_the_window_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ring, "PROGRAMS", 64)
    monkeypatch.setattr(fused_ring, "TILE", 32)
    follow(tiny("maglev-shared-0.1", DEVICE), "triton", batch=1, steps=5 if INTERPRETED else 8, bound=1e-4)


def test_equals_the_decoder_where_the_products_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "LARGEST_FUSED_BATCH", 1)
    follow(tiny("maglev-shared-0.1", DEVICE), "triton", batch=2, steps=8, bound=1e-4)


@pytest.mark.parametrize("recipe", RECIPES[3:] if INTERPRETED else RECIPES[2:])
def test_reading_equals_the_decoder_s_own(recipe: str) -> None:
    """Two sequences that have read 3 and 14 tokens before, in blocks."""
    decoder = tiny(recipe, DEVICE, kv_heads=1)
    state = decoder_rows(ragged_state(decoder), slice(1, 3))
    expected, tokens = state.clone(), random_tokens(2, 10, seed=5).to(DEVICE)
    read_(FastDecoder(decoder, "triton"), tokens, state, block=3, stride=2, passes=3)
    read_(decoder, tokens, expected, block=3, stride=2, passes=3)
    assert_same_state(state, expected, 1e-4)


def decoder_rows(state: DecoderState, rows: slice) -> DecoderState:
    caches = [RingCache(cache.key[rows].clone(), cache.value[rows].clone()) for cache in state.caches]
    return DecoderState(caches, state.memory[rows].clone(), state.position[rows].clone(), state.older[rows].clone())


@pytest.mark.parametrize("recipe", RECIPES[2:])
def test_gates_equal_the_decoder_s_own(recipe: str) -> None:
    decoder, tokens = tiny(recipe, DEVICE, kv_heads=1), random_tokens(1, 2).to(DEVICE)
    found, expected = watched(FastDecoder(decoder, "triton"), tokens), watched(decoder, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class GraphCases:
    @pytest.mark.parametrize("rows", [1, 3, 17])
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_replaying_equals_stepping(self, recipe: str, rows: int) -> None:
        decoder = tiny(recipe, DEVICE)
        fast = FastDecoder(decoder)
        stepper, tokens = GraphStepper(fast, largest=32), random_tokens(rows, 12).to(DEVICE)
        state = fast.initial_state(rows)
        stepper.begin(state)
        for slot in range(tokens.shape[1]):
            expected = fast.readout(fast.step_(tokens[:, slot], state))
            torch.testing.assert_close(stepper.step(tokens[:, slot]), expected, rtol=1e-4, atol=1e-4)
        copied = stepper.state()
        assert copied.position.tolist() == state.position.tolist()
        torch.testing.assert_close(copied.memory, state.memory, rtol=1e-4, atol=1e-4)

    def test_a_bucket_captured_later_does_not_disturb_the_others(self) -> None:
        fast = FastDecoder(tiny("maglev-shared-0.1", DEVICE))
        stepper = GraphStepper(fast, largest=max(BUCKETS[:4]))
        token = torch.tensor([5], device=DEVICE)
        stepper.begin(fast.initial_state(1))
        before = stepper.step(token).clone()
        stepper.begin(fast.initial_state(4))
        stepper.step(token.repeat(4))
        stepper.begin(fast.initial_state(1))
        assert torch.equal(stepper.step(token), before)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_watched_steps_are_the_others_and_tell_their_gates(self, recipe: str) -> None:
        decoder, tokens = tiny(recipe, DEVICE), random_tokens(3, 12).to(DEVICE)
        expected = watched(decoder, tokens)
        fast = FastDecoder(decoder)
        plain, stepper = GraphStepper(fast, largest=4), GraphStepper(fast, largest=4)
        for each in (plain, stepper):
            each.begin(fast.initial_state(3), watched=each is stepper)
        for slot, token in enumerate(tokens.T):
            asked = slot % 3 > 0
            assert torch.equal(stepper.step(token, watched=asked), plain.step(token))
            gates = stepper.gates()
            assert (gates is not None) == (asked and expected is not None)
            if gates is not None and expected is not None:
                torch.testing.assert_close(gates, expected[:, slot], rtol=1e-4, atol=1e-4)
        with pytest.raises(RequestError, match="watched=True"):
            plain.step(tokens[:, 0], watched=True)

    def test_recorded_passes_equal_the_decoder_s_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two prompts, several chunks each, so that recordings meet other tokens and another past."""
        monkeypatch.setattr(fast_read, "SMALLEST_RECORDED", 4)
        for recipe in ("maglev-shared-0.1", "swa-ssss", BOTH):
            decoder = tiny(recipe, DEVICE)
            fast = FastDecoder(decoder)
            for seed, rows, stride in ((1, 1, 1), (2, 1, 1), (3, 2, 1), (4, 9, 1), (5, 1, 2), (6, 2, 2)):
                tokens = random_tokens(rows, 40, seed=seed).to(DEVICE)
                state, expected = fast.initial_state(rows), decoder.initial_state(rows)
                read_(fast, tokens, state, block=3, stride=stride, passes=4)
                # four blocks of 3 are padded to 16; without memory there is one, padded to 4, then a shorter one
                assert (4 if recipe == "swa-ssss" else 16) in {length for _, length in fast.recorded_passes}
                read_(decoder, tokens, expected, block=3, stride=stride, passes=4)
                assert_same_state(state, expected, 1e-4)

    def test_what_does_not_settle_is_stepped_from_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fast_step, "LEAST_REPLAYED", 4)
        decoder = tiny("maglev-shared-0.1", DEVICE)
        fast, tokens = FastDecoder(decoder), random_tokens(3, 20).to(DEVICE)
        state, expected = fast.initial_state(3), decoder.initial_state(3)
        ours, theirs = [], []
        report = read_(fast, tokens, state, budget=2, tolerance=0, memories=ours)
        read_(decoder, tokens, expected, budget=2, tolerance=0, memories=theirs)
        assert report.stepped > 4
        assert_same_state(state, expected, 1e-4)
        torch.testing.assert_close(torch.cat(ours, dim=1), torch.cat(theirs, dim=1), rtol=1e-4, atol=1e-4)

    def test_greedy_goes_on_by_itself(self) -> None:
        fast = FastDecoder(tiny("maglev-shared-0.1", DEVICE))
        stepper, state = GraphStepper(fast, greedy=True), fast.initial_state(1)
        stepper.begin(state)
        token = torch.tensor([5], device=DEVICE)
        chosen = stepper.step(token).argmax(-1)
        for _ in range(6):
            token = fast.readout(fast.step_(token, state)).argmax(-1)
            assert torch.equal(token, chosen)
            chosen = stepper.step().argmax(-1)

    @pytest.mark.parametrize("injection", ["shared_kv", BOTH])
    def test_bfloat16_at_full_size_is_as_close_to_float32_as_the_decoder(self, injection: str) -> None:
        exact = wide("maglev-shared-0.1", injection)
        plain = wide("maglev-shared-0.1", injection).bfloat16()
        fast = FastDecoder(plain)
        states = exact.initial_state(2), plain.initial_state(2), fast.initial_state(2)
        errors = [0.0, 0.0]
        with torch.no_grad():
            for slot, token in enumerate(random_tokens(2, 24).to(DEVICE).T):
                expected = exact.step_(token, states[0])
                for index, (steps, state) in enumerate(((plain, states[1]), (fast, states[2]))):
                    error = (steps.step_(token, state).float() - expected).norm() / expected.norm()
                    errors[index] = max(errors[index], float(error))
                assert errors[1] <= 2 * errors[0] + 1e-3, f"step {slot}: {errors[1]:.4f} against {errors[0]:.4f}"


if not INTERPRETED:
    TestGraphs = GraphCases


def wide(recipe: str, injection: str) -> Decoder:
    """Heads of 128 and a width that is no power of two; weights small enough that errors do not grow."""
    shape = {"depth": 3, "width": 1280, "heads": 10, "context": 2048, "window": 512}
    objective = small(recipe, scale=0.3, dtype=torch.float32, injection=injection, **shape)
    decoder = objective.decoder.to(DEVICE).requires_grad_(False)
    # what bfloat16 holds, so that both precisions have the same weights
    return decoder.bfloat16().float()
