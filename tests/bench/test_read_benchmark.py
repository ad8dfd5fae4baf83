"""What `bench read` counts: passes, positions and FLOPs. What the times are is not a test's business."""

import copy
import math

import pytest
import torch
from torch import Tensor

from maglev.bench.models import random_decoder, swa_twin
from maglev.bench.read import (
    largest_by_pass,
    measure_read,
    read_plan,
)
from maglev.errors import RequestError
from maglev.inference.reading import read_
from maglev.model.accounting import pass_flops
from maglev.model.decoder import Decoder
from maglev.recipes import run_config
from tests.helpers import random_tokens, small


def contracting() -> Decoder:
    return small("maglev-shared-0.1", scale=0.3, dtype=torch.float32).decoder


def test_until_settled_is_what_a_user_gets_and_fixed_passes_are_counted() -> None:
    decoder, tokens = contracting(), random_tokens(1, 50)
    report = read_(decoder, tokens, decoder.initial_state(1))
    for passes in (None, 3):
        plan = read_plan(True, passes=passes, steps=2, repeats=1)
        result = measure_read("maglev", decoder, tokens, plan, weights="random", text="random tokens")
        swa, maglev = result["rows"]
        assert swa["passes"] == [1, 1, 1] and swa["block"] == 3 * 7 + 1 and swa["largest_change_by_pass"] == []
        assert maglev["passes"] == (report.passes if passes is None else [3] * 7)
        assert maglev["stepped"] == 0 and (maglev["block"], maglev["blocks"]) == (8, 4)
        computed = report.computed if passes is None else 3 * 50
        assert maglev["passes_per_token"] == computed / 50
        assert maglev["flops"] == computed * pass_flops(decoder.config, 0, 50) / 50
        assert maglev["seconds"] > 0 and maglev["share_of_matrix_rate"] > 0
        assert set(maglev["stepping_by_reading"]) == {"plain", "fast"}
        assert len(maglev["largest_change_by_pass"]) == (passes or max(report.passes) + 2)
        assert result["passes_are"] == ("fixed" if passes else "until settled")
        assert maglev["distance_to_stepping_by_pass"] == []


def test_a_decoder_without_fused_steps_is_set_beside_plain_ones() -> None:
    decoder = small("maglev-shared-0.1", scale=0.3, dtype=torch.float32, injection="tokens").decoder
    plan = read_plan(True, passes=2, steps=2, repeats=1)
    result = measure_read("maglev", decoder, random_tokens(1, 50), plan, weights="random", text="random tokens")
    swa, maglev = result["rows"]
    assert set(swa["stepping_by_reading"]) == {"plain", "fast"} and set(maglev["stepping_by_reading"]) == {"plain"}


def test_a_trained_decoder_is_set_beside_its_steps() -> None:
    plan = read_plan(True, steps=2, repeats=1)
    result = measure_read("maglev", contracting(), random_tokens(1, 50), plan, weights="trained", text="text")
    swa, maglev = result["rows"]
    assert swa["distance_to_stepping_by_pass"] == []
    errors = maglev["distance_to_stepping_by_pass"]
    assert errors[0] > 1e-3 and errors[-1] < 1e-5 and errors[:4] == sorted(errors[:4], reverse=True)
    # nothing is more precise than what it was read in
    assert maglev["distance_to_float32_by_pass"] == [] and maglev["steps_to_float32"] is None


@torch.no_grad()
def stepped(decoder: Decoder, tokens: Tensor) -> Tensor:
    state = decoder.initial_state(1)
    return torch.cat([decoder.step_(token[None], state) for token in tokens[0]]).float()


def test_a_trained_decoder_in_bfloat16_is_set_beside_its_steps_in_float32_too() -> None:
    decoder, tokens = contracting().to(torch.bfloat16), random_tokens(1, 50)
    result = measure_read("m", decoder, tokens, read_plan(True, steps=2, repeats=1), weights="trained", text="text")
    maglev = result["rows"][1]
    own, wanted = stepped(decoder, tokens), stepped(copy.deepcopy(decoder).float(), tokens)
    rounding, errors = maglev["steps_to_float32"], maglev["distance_to_float32_by_pass"]
    assert 1e-3 < rounding < 0.1 and math.isclose(rounding, (own - wanted).norm() / wanted.norm(), rel_tol=0.2)
    assert errors[0] > 2 * rounding > errors[-1] and len(errors) == len(maglev["distance_to_stepping_by_pass"])


def test_the_block_that_moves_most_is_shown() -> None:
    assert largest_by_pass([[1.0, 0.5], [1.0, 0.7]]) == [1.0, 0.7]


def test_the_twin_has_the_shape_and_neither_memory_nor_long_layers() -> None:
    config = run_config("lrt-slsl", 2, {"model.context": 64}).model
    twin = random_decoder(swa_twin(config), torch.device("cpu"), torch.bfloat16)
    assert twin.injection is None and twin.config.windows == (16, 16) and twin.config.width == config.width
    assert twin.compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    "given", [{"tokens": 0}, {"passes": -1}, {"block": 0}, {"blocks": 0}, {"stride": 0}, {"tokens": 1 << 40}]
)
def test_sizes_out_of_range_are_refused_by_name(given: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        read_plan(**given)
