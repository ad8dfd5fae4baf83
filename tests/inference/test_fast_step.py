"""FastDecoder equals Decoder.step_ on the same state, whichever computes it; its graphs refuse what they cannot do."""

from contextlib import nullcontext
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maglev.bench.launches import launches
from maglev.errors import RequestError
from maglev.inference.fast_step import BUCKETS, WARM_UPS, FastDecoder, GraphStepper, bucket_for, fill_rows, first_rows
from maglev.model.decoder import Decoder
from maglev.model.state import DecoderState
from maglev.ops.decode_steps import Backend
from maglev.recipes import RECIPES as RUNS
from tests.helpers import assert_same_state, random_tokens, small
from tests.kernel_cases import run_cases

CASES = "inference/fast_step_cases.py"
CPU = torch.device("cpu")
# Maglev whose memory enters elsewhere: in two places, of every layer its own
BOTH = "shared_kv+layer_residual"
RECIPES = ["swa-ssss", "transformer-slsl", "maglev-shared-0.1", BOTH]


def tiny(recipe: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **settings: Any) -> Decoder:
    shape = {"depth": 2, "width": 32, "heads": 2, "context": 12, "window": 5} | settings
    if recipe not in RUNS:
        recipe, shape["injection"] = "maglev-shared-0.1", recipe
    return small(recipe, scale=0.5, dtype=dtype, **shape).decoder.to(device).requires_grad_(False)


def ragged_state(decoder: Decoder) -> DecoderState:
    """Three rows that have read 0, 3 and 14 tokens."""
    state = decoder.initial_state(3)
    for row, count in enumerate((0, 3, 14)):
        own = first_rows(decoder.initial_state(1), 1)
        for token in random_tokens(1, count, seed=row)[0].to(decoder.device):
            decoder.step_(token[None], own)
        for into, ring in zip(state.caches, own.caches, strict=True):
            into.key[row], into.value[row] = ring.key[0], ring.value[0]
        state.memory[row], state.position[row] = own.memory[0], own.position[0]
    return state


def follow(
    decoder: Decoder, backend: Backend, batch: int, steps: int, bound: float, state: DecoderState | None = None
) -> None:
    """Both take every step; now and then they exchange their states, which must make no difference."""
    fast = FastDecoder(decoder, backend)
    state = fast.initial_state(batch) if state is None else state
    states = [state, state.clone()]
    kept = []
    for slot, token in enumerate(random_tokens(batch, steps).to(decoder.device).T):
        memory, expected = fast.step_(token, states[0]), decoder.step_(token, states[1])
        torch.testing.assert_close(memory, expected, rtol=bound, atol=bound)
        kept.append((memory, memory.clone()))
        if slot % 10 == 7:
            torch.testing.assert_close(fast.readout(memory), decoder.readout(expected), rtol=bound, atol=10 * bound)
            states.reverse()
    assert_same_state(*states, bound)
    assert all(torch.equal(memory, copy) for memory, copy in kept)


@pytest.mark.parametrize("recipe", [*RECIPES, "layer_kv", "residual", "layer_kv+residual"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_twins_equal_the_decoder_beyond_the_window(recipe: str, kv_heads: int) -> None:
    decoder = tiny(recipe, dtype=torch.float64, kv_heads=kv_heads)
    follow(decoder, "torch", batch=2, steps=40, bound=1e-9)
    follow(decoder, "torch", batch=3, steps=9, bound=1e-9, state=ragged_state(decoder))


def test_the_twins_in_a_compute_precision_of_their_own() -> None:
    """Weights in float32, everything else in bfloat16, as a trained run is evaluated."""
    decoder = tiny("maglev-shared-0.1")
    decoder.embedding.compute_dtype = torch.bfloat16
    follow(decoder, "torch", batch=2, steps=6, bound=0.05)


def test_the_kernels_equal_the_decoder_in_the_interpreter() -> None:
    if torch.cuda.is_available():
        pytest.skip("the same cases run on the GPU")
    run_cases(CASES, interpreted=True)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_the_kernels_equal_the_decoder_on_the_gpu() -> None:
    run_cases(CASES, interpreted=False, limit_s=580)


def test_buckets_hold_their_rows() -> None:
    assert [bucket_for(rows) for rows in (1, 2, 3, 16, 17, 200, 256)] == [1, 2, 4, 16, 32, 256, 256]
    assert all(bucket_for(bucket) == bucket for bucket in BUCKETS)
    for rows in (0, -1, 257):
        with pytest.raises(RequestError, match="1 to 256 rows"):
            bucket_for(rows)


def test_padding_rows_do_not_reach_the_others() -> None:
    """Two rows in buffers of four that hold something else: the same memories as two rows alone."""
    decoder = tiny("maglev-shared-0.1", dtype=torch.float64)
    fast, tokens = FastDecoder(decoder, "torch"), random_tokens(4, 12)
    buffers, state = fast.initial_state(8), fast.initial_state(2)
    for slot in range(6):
        fast.step_(tokens[:2, slot], state)
    for tensor in (buffers.memory, *(part for ring in buffers.caches for part in (ring.key, ring.value))):
        tensor.fill_(7.0)
    buffers.position.fill_(1000)
    bucket = first_rows(buffers, bucket_for(3))
    fill_rows(bucket, state)
    assert bucket.position.tolist() == [6, 6, 0, 0] and not bucket.memory[2:].any()
    for slot in range(6, 12):
        fast.advance(tokens[:, slot], bucket, bucket.memory, bucket.position)
        fast.step_(tokens[:2, slot], state)
    assert_same_state(first_rows(buffers, 2), state, 1e-12)
    assert buffers.position[4:].tolist() == [1000] * 4


def test_a_graph_without_a_gpu_is_refused() -> None:
    with pytest.raises(RequestError, match="need a CUDA GPU"):
        GraphStepper(FastDecoder(tiny("swa-ssss")))


def taken(lock: Any) -> bool:
    """Whether some thread holds it, as another one sees it."""
    found: list[bool] = []

    def look() -> None:
        if free := lock.acquire(blocking=False):
            lock.release()
        found.append(not free)

    thread = Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, captures and replays hold the lock; what other threads do meanwhile does not break a capture.

    CUDA is a stand-in here: its graphs run their work when they are recorded, and replays do nothing.
    """
    fast = FastDecoder(tiny("maglev-shared-0.1"), "torch")
    state, seen, advance, modes = fast.initial_state(1), [], fast.advance, []

    def seen_advance(*arguments: Any) -> None:
        seen.append(("work", taken(fast.lock)))
        advance(*arguments)

    def graph(graph: object, pool: object, capture_error_mode: str = "global") -> Any:
        modes.append(capture_error_mode)
        return nullcontext()

    vars(fast)["advance"] = seen_advance
    fast.step_(torch.tensor([5]), state)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    replayed = SimpleNamespace(replay=lambda: seen.append(("replay", taken(fast.lock))))
    cuda = SimpleNamespace(
        device=nullcontext,
        device_of=nullcontext,
        stream=nullcontext,
        Stream=lambda device: stream,
        current_stream=lambda device: stream,
        CUDAGraph=lambda: replayed,
        graph=graph,
    )
    stepper = object.__new__(GraphStepper)
    vars(stepper).update(decoder=fast, greedy=False, buffers=fast.initial_state(2), captured={}, pool=None)
    stepper.tokens = torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(torch, "cuda", cuda)
    stepper.begin(state)
    stepper.step(torch.tensor([6]))
    assert seen == [("work", True)] * (2 + WARM_UPS) + [("replay", True)] and modes == ["thread_local"]
    assert not taken(fast.lock)
    # buffers and logits, whatever the rows were
    stepper.end()
    assert stepper.nbytes == stepper.buffers.nbytes + stepper.captured[1, False].logits.numel() * 4
    with pytest.raises(RequestError, match="begin"):
        stepper.step(torch.tensor([6]))
    # a watched step has a graph of its own, and what it tells is cut to the rows in use
    stepper.begin(state)
    with pytest.raises(RequestError, match="watched=True"):
        stepper.step(torch.tensor([6]), watched=True)
    stepper.begin(fast.initial_state(2), watched=True)
    assert stepper.step(torch.tensor([6, 7]), watched=True).shape == (2, fast.config.vocab_size)
    gates = stepper.gates()
    assert gates is not None and gates.shape == (2,) and set(stepper.captured) == {(1, False), (2, False), (2, True)}
    stepper.step(torch.tensor([6, 7]))
    assert stepper.gates() is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_benchmark_times_are_the_launches_of_a_step(recipe: str) -> None:
    fast = FastDecoder(tiny(recipe), "torch")
    state, tokens = fast.initial_state(2), torch.tensor([5, 7])
    per_layer, per_step = launches(fast, state, tokens)
    for work in (per_layer | per_step).values():
        work()
    assert len(per_layer) == (6 if recipe == BOTH else 5)
    assert ("gate_norm_project" in per_layer) != ("scale_norm_project" in per_layer)
