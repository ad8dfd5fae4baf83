"""The engine on CUDA graphs writes what the plain decoder writes on a CPU."""

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
import torch

from maglev.data.tokenizer import Tokenizer
from maglev.inference.batch import generate_batch
from maglev.inference.engine import LanguageModel
from maglev.inference.fast_step import GraphStepper
from maglev.inference.sampling import Sampling
from maglev.model.state import DecoderState
from maglev.ops.matrix import WeightFormat
from tests.helpers import small

pytestmark = pytest.mark.gpu

SHAPE = {"depth": 2, "width": 128, "heads": 2, "kv_heads": 1, "window": 24, "context": 96}
PROMPTS = ["a", "some longer prompt, which goes on beyond the window of twenty-four tokens", "the window"]


def model(device: str, dtype: torch.dtype = torch.float32, weights: WeightFormat = "plain") -> LanguageModel:
    tokenizer = Tokenizer.train(["some text, some more of it, and a prompt beyond the window"], 270)
    shape = SHAPE | {"vocab_size": tokenizer.vocab_size}
    decoder = small("maglev-shared-0.1", scale=0.3, dtype=dtype, **shape).decoder.to(device)
    return LanguageModel(decoder, tokenizer, weights)


def greedy(lm: LanguageModel, prompt: str) -> str:
    return "".join(lm.generate(prompt, max_tokens=30, temperature=0))


@pytest.mark.parametrize("weights", ["plain", "int8", "fp8"])
def test_greedy_texts_are_those_of_the_cpu(weights: WeightFormat) -> None:
    here, there = model("cpu", weights=weights), model("cuda", weights=weights)
    for prompt in PROMPTS:
        assert greedy(there, prompt) == greedy(here, prompt)
    ((_, stepper),) = there.steppers.idle
    assert isinstance(stepper, GraphStepper)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_read_by_steps_as_by_single_ones(dtype: torch.dtype) -> None:
    """float64 has no kernels: the twins are captured."""
    lm = model("cuda", dtype)
    replayed = lm.read(PROMPTS[1], method="step")
    single = lm.read("")
    for token in lm.tokenizer.encode(PROMPTS[1]):
        lm.step_through([token], single)
    assert replayed.position == single.position
    bound = 1e-10 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(replayed.memory, single.memory, rtol=0, atol=bound)


def test_texts_written_by_turns_do_not_meet() -> None:
    lm = model("cuda")
    alone = [greedy(lm, prompt) for prompt in PROMPTS]
    writing = [lm.generate(prompt, max_tokens=30, temperature=0) for prompt in PROMPTS]
    turns = list(zip_longest(*writing, fillvalue=""))
    assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == alone
    assert len(lm.steppers.idle) == len(PROMPTS)


def test_a_batch_in_a_larger_bucket_writes_what_its_rows_write_alone() -> None:
    lm = model("cuda")
    found = generate_batch(lm, PROMPTS, max_tokens=30, sampling=Sampling(0))
    assert [room for room, _ in lm.steppers.idle] == [4]
    for prompt, row in zip(PROMPTS, found, strict=True):
        assert row.text == greedy(lm, prompt)
        alone = lm.read(prompt)
        lm.step_through(row.tokens, alone)
        assert row.state.position == alone.position
        torch.testing.assert_close(row.state.memory, alone.memory, rtol=0, atol=1e-3)


def test_rows_of_one_bucket_agree_to_the_bit() -> None:
    lm = model("cuda", torch.bfloat16)
    three = generate_batch(lm, PROMPTS, max_tokens=20, seeds=[1, 2, 3])
    four = generate_batch(lm, [*PROMPTS, "another"], max_tokens=20, seeds=[1, 2, 3, 4])
    for one, other in zip(three, four, strict=False):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
        assert torch.equal(one.state.memory, other.state.memory)


def test_threads_write_and_capture_side_by_side() -> None:
    """Batches of several buckets, so that one thread captures while others write."""
    lm = model("cuda")

    def texts(rows: int) -> list[str]:
        return [row.text for row in generate_batch(lm, PROMPTS[:1] * rows, max_tokens=20, sampling=Sampling(0))]

    expected = greedy(lm, PROMPTS[0])[:5]
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(texts, [1, 2, 4, 8] * 3):
            assert all(text.startswith(expected) for text in found)


def test_a_state_of_the_cpu_goes_on_on_the_gpu_and_back() -> None:
    here, there = model("cpu"), model("cuda")
    for one, other in ((here, there), (there, here)):
        more = other.read(" and more", state=one.read(PROMPTS[1]))
        assert more.memory.device == other.decoder.device
        torch.testing.assert_close(more.memory.cpu(), here.read(" and more", here.read(PROMPTS[1])).memory.cpu())


def test_release_frees_graphs_and_buffers() -> None:
    lm = model("cuda")
    greedy(lm, PROMPTS[1])
    # what earlier tests left behind is not to go meanwhile
    gc.collect()
    held = torch.cuda.memory_allocated()
    generate_batch(lm, PROMPTS * 20, max_tokens=2)
    assert torch.cuda.memory_allocated() > held
    lm.release()
    gc.collect()
    assert lm.steppers.idle == [] and torch.cuda.memory_allocated() < held


def test_a_row_that_begins_anew_is_the_one_it_would_be_alone() -> None:
    lm = model("cuda")
    first, second, third = (lm.read(prompt) for prompt in PROMPTS)
    with lm.steppers.lend(2) as stepper:
        stepper.begin(DecoderState.join([first.inner, second.inner]))
        stepper.step(torch.tensor([1, 2]))
        stepper.put(0, third.inner)
        logits = stepper.step(torch.tensor([3, 4]))
    lm.step_through([3], third)
    lm.step_through([2, 4], second)
    # two rows are added up in another order than one: float32 differs by 1e-5, another row's logits by whole numbers
    torch.testing.assert_close(logits[0], lm.next_logits(third), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits[1], lm.next_logits(second), rtol=1e-5, atol=1e-4)
