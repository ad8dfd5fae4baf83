"""Weights in 8 bits: one function, whether it is stepped, read in passes or evaluated."""

import pytest
import torch

import maglev
from maglev.data.tokenizer import Tokenizer
from maglev.errors import RequestError
from maglev.inference.batch import generate_batch
from maglev.inference.engine import LanguageModel
from maglev.inference.fast_step import FastDecoder
from maglev.inference.rounding import check_weights, rounded
from maglev.model.decoder import Decoder
from maglev.ops.matrix import WeightFormat, matrix
from tests.helpers import ALL_RECIPES, random_tokens, small

FORMATS: list[WeightFormat] = ["int8", "fp8"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TEXT = "some text that goes on, beyond the window of eight"
TOKENIZER = Tokenizer.train(["some text, some more of it, and a prompt beyond the window"], 270)


def decoder_of(recipe: str = "maglev-shared-0.1") -> Decoder:
    return small(recipe, scale=0.3, vocab_size=TOKENIZER.vocab_size).decoder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", FORMATS)
def test_rounding_again_gives_the_same_8_bits(weights: WeightFormat, dtype: torch.dtype) -> None:
    """Otherwise reading, on the rounded values, and stepping, on bits made from them, would be two functions."""
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sizes = torch.logspace(-6, 3, 200, dtype=torch.float64)[:, None]
    weight = torch.cat([rows * sizes, rows.square() * rows, torch.zeros(1, 64)]).to(dtype)
    once = matrix(weight, weights)
    again = matrix(once.dense(dtype), weights)
    assert torch.equal(again.values.view(torch.uint8), once.values.view(torch.uint8))
    torch.testing.assert_close(again.scale, once.scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(again.dense(dtype), once.dense(dtype), rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("weights", FORMATS)
def test_the_rounded_decoder_is_what_8_bits_compute(recipe: str, weights: WeightFormat) -> None:
    original = decoder_of(recipe)
    kept = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    decoder = rounded(original, weights)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in original.state_dict().items())
    same = {name for name, tensor in decoder.state_dict().items() if torch.equal(tensor, kept[name])}
    assert same == {"embedding.weight", "scales.residual_scale", "scales.input_scale"}
    steps = decoder, FastDecoder(original, "torch", weights), FastDecoder(decoder, "torch", weights)
    states = [decoder.initial_state(2) for _ in steps]
    for token in random_tokens(2, 12).T:
        memory, *others = [each.step_(token, state) for each, state in zip(steps, states, strict=True)]
        for other in others:
            torch.testing.assert_close(other, memory, rtol=0, atol=1e-10)
    torch.testing.assert_close(steps[1].readout(memory), decoder.readout(memory), rtol=0, atol=1e-10)


def test_a_run_is_evaluated_with_the_bits_that_it_is_deployed_with() -> None:
    """Evaluation keeps float32 beside arithmetic in bfloat16, `load` keeps bfloat16 alone."""
    evaluated, deployed = decoder_of().float(), decoder_of().float().bfloat16()
    evaluated.embedding.compute_dtype = torch.bfloat16
    pairs = zip(rounded(evaluated, "int8").blocks.parameters(), rounded(deployed, "int8").blocks.parameters())
    assert all(torch.equal(ours, theirs.float()) for ours, theirs in pairs)


@pytest.mark.parametrize("weights", FORMATS)
def test_the_engine_in_8_bits_is_a_model_of_rounded_weights(weights: WeightFormat) -> None:
    lm = LanguageModel(decoder_of(), TOKENIZER, weights)
    plain = LanguageModel(rounded(decoder_of(), weights), TOKENIZER)
    assert (lm.weights, plain.weights) == (weights, "plain") and lm.fingerprint == plain.fingerprint
    stepped = lm.read(TEXT, method="step")
    torch.testing.assert_close(stepped.memory, lm.read(TEXT).memory, rtol=0, atol=1e-8)
    torch.testing.assert_close(stepped.memory, plain.read(TEXT).memory, rtol=0, atol=1e-8)
    text = "".join(lm.generate(TEXT, max_tokens=20, seed=3))
    assert text == "".join(plain.generate(TEXT, max_tokens=20, seed=3))
    assert text == generate_batch(lm, ["a", TEXT], max_tokens=20, seeds=[1, 3])[1].text


def test_states_of_other_weights_are_refused() -> None:
    models = [LanguageModel(decoder_of(), TOKENIZER, weights) for weights in ("plain", "int8", "fp8")]
    assert len({lm.fingerprint for lm in models}) == 3
    for lm in models[1:]:
        with pytest.raises(RequestError, match="another model"):
            lm.read("a", state=models[0].read("b"))


def test_formats_that_are_none_are_refused_before_anything_is_read() -> None:
    with pytest.raises(RequestError, match="'int4'; they must be one of plain, int8, fp8"):
        maglev.load("nowhere", weights="int4")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="'int4'"):
        LanguageModel(decoder_of(), TOKENIZER, "int4")  # type: ignore[arg-type]


def test_fp8_is_refused_where_a_gpu_cannot_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "An older GPU")
    for capability, fits in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        check_weights("int8", gpu)
        if fits:
            check_weights("fp8", gpu)
        else:
            with pytest.raises(RequestError, match="An older GPU cannot read them"):
                check_weights("fp8", gpu)
