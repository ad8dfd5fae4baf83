"""Forward and caches: whole, in parts, step by step, padded, reordered, it is the decoder on its own memories."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.model_config import InjectionKind
from tests.helpers import random_tokens
from tests.hf.models import CONTEXT, KINDS, small_model, stepped_logits

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

LENGTH = 2 * CONTEXT + 5


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("recipe", [*KINDS, "transformer-slsl"])
def test_whole_parts_and_steps_are_the_stepped_decoder(recipe: str) -> None:
    """Beyond the context too, where layers of full attention begin to slide."""
    model, tokens = small_model(recipe), random_tokens(2, LENGTH)
    expected = stepped_logits(model, tokens)
    assert_near(model(tokens).logits, expected)
    cache, found = None, []
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 30), (30, 31), (31, LENGTH - 1), (LENGTH - 1, LENGTH)):
        output = model(tokens[:, begin:end], past_key_values=cache)
        cache = output.past_key_values
        assert cache.get_seq_length() == end
        found.append(output.logits)
    assert_near(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("delay", [1, 5])
@pytest.mark.parametrize("injection", [*get_args(InjectionKind)[1:], "shared_kv+layer_residual"])
def test_caches_hold_what_other_injections_leave(injection: str, delay: int) -> None:
    if delay > 1 and injection in ("slots", "cross_attention"):
        pytest.skip("takes the last memory alone")
    model, tokens = small_model(injection=injection, delay=delay), random_tokens(2, 40)
    expected = stepped_logits(model, tokens)
    output = model(tokens[:, :30])
    found = [output.logits]
    for begin, end in ((30, 31), (31, 38), (38, 39), (39, 40)):
        output = model(tokens[:, begin:end], past_key_values=output.past_key_values)
        found.append(output.logits)
    assert_near(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("window", [1, 2])
def test_the_smallest_windows(window: int) -> None:
    model, tokens = small_model(window=window), random_tokens(1, 12)
    output = model(tokens[:, :8])
    last = [output.logits]
    for slot in range(8, 12):
        output = model(tokens[:, slot : slot + 1], past_key_values=output.past_key_values)
        last.append(output.logits)
    assert_near(torch.cat(last, dim=1), stepped_logits(model, tokens))


@pytest.mark.parametrize(("recipe", "delay"), [("maglev-shared-0.1", 1), ("lrt-slsl", 1), ("maglev-closed", 4)])
def test_padding_is_not_read_wherever_it_stands(recipe: str, delay: int) -> None:
    model = small_model(recipe, delay=delay)
    mask = torch.ones(5, 14, dtype=torch.int64)
    mask[0, :6] = 0
    mask[1, :1] = 0
    mask[2, 9:] = 0
    mask[3, [2, 3, 7]] = 0
    # the padding's own tokens differ, and nothing else may
    ids, more = random_tokens(5, 14, seed=1), random_tokens(5, 9, seed=2)
    expected = [stepped_logits(model, torch.cat((ids[row][mask[row] == 1], more[row]))[None])[0] for row in range(5)]
    output = model(ids, attention_mask=mask)
    for row, own in enumerate(expected):
        assert_near(output.logits[row][mask[row] == 1], own[: int(mask[row].sum())])
    for begin, end in ((0, 1), (1, 2), (2, 9)):
        covers = torch.cat((mask, torch.ones(5, end, dtype=torch.int64)), dim=1)
        output = model(more[:, begin:end], attention_mask=covers, past_key_values=output.past_key_values)
        for row, own in enumerate(expected):
            count = int(mask[row].sum())
            assert_near(output.logits[row], own[count + begin : count + end])


def test_a_token_of_padding_leaves_its_row_as_it_was() -> None:
    model, tokens = small_model(), random_tokens(2, 12)
    cache = model(tokens[:, :10]).past_key_values
    mask = torch.tensor([[1] * 11, [1] * 10 + [0]])
    cache = model(tokens[:, 10:11], attention_mask=mask, past_key_values=cache).past_key_values
    found = model(tokens[:, 11:], past_key_values=cache).logits
    assert_near(found[0, 0], stepped_logits(model, tokens)[0, -1])
    without = torch.cat((tokens[1:, :10], tokens[1:, 11:]), dim=1)
    assert_near(found[1, 0], stepped_logits(model, without)[0, -1])


@pytest.mark.parametrize("delay", [1, 8])
def test_reordering_a_cache_reorders_its_rows(delay: int) -> None:
    model, tokens = small_model(delay=delay), random_tokens(3, 20)
    mask = torch.ones(3, 19, dtype=torch.int64)
    mask[0, :4] = 0
    cache = model(tokens[:, :19], attention_mask=mask).past_key_values
    rows = torch.tensor([2, 0, 0])
    cache.reorder_cache(rows)
    found = model(tokens[rows, 19:], past_key_values=cache).logits
    assert_near(found[0, -1], stepped_logits(model, tokens[2:])[0, -1])
    for row in (1, 2):
        assert_near(found[row, -1], stepped_logits(model, tokens[:1, 4:])[0, -1])


def cache_numbers(cache: Any) -> int:
    return sum(kept.numel() for layer in cache.layers for kept in (layer.keys, layer.values))


def test_reading_costs_in_proportion_and_keeps_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    from maglev.model.decoder import Decoder

    model, run = small_model(dtype=torch.float32, context=64, window=32), Decoder.run
    positions = []

    def counted(self: Decoder, tokens: Tensor, *rest: Any) -> Tensor:
        positions.append(tokens.shape[1])
        return run(self, tokens, *rest)

    monkeypatch.setattr(Decoder, "run", counted)
    work, kept = [], []
    for length in (200, 400):
        positions.clear()
        output = model(random_tokens(1, length), logits_to_keep=1)
        assert output.logits.shape[1] == 1 and len(positions) < length / 2
        work.append(sum(positions))
        kept.append(cache_numbers(output.past_key_values))
    assert work[1] < 2.5 * work[0] and kept[0] == kept[1]


def test_which_logits_are_kept() -> None:
    model, tokens = small_model(), random_tokens(2, 10)
    whole = model(tokens).logits
    for kept, expected in ((1, whole[:, -1:]), (3, whole[:, -3:]), (torch.tensor([0, 4]), whole[:, [0, 4]])):
        assert_near(model(tokens, logits_to_keep=kept).logits, expected)
    assert model(tokens, use_cache=False).past_key_values is None
    assert_near(model(tokens, return_dict=False)[0], whole)


def test_a_new_model_starts_as_a_run_does() -> None:
    """From configuration alone: the numbers of `maglev.build`, in the tensors that no file holds too."""
    import maglev
    from maglev.hf import MaglevConfig

    shape = {"vocab_size": 61, "context": 24, "window": 8}
    config = MaglevConfig.from_recipe("maglev-separate-1", depth=2, **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    objective = maglev.build("maglev-separate-1", depth=2, **shape)
    ours, theirs = objective.state_dict(), model.objective.state_dict()
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(model.decoder.frequencies, objective.decoder.frequencies)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_ids": None}, "input_ids are of shape None"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "shape (3,)"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, "shape (1, 0)"),
        ({"input_ids": torch.tensor([[1, 61]])}, "token id 61"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask is of shape (2, 3)"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "attention_mask is of shape"),
        ({"labels": torch.zeros(2, 5, dtype=torch.int64)}, "labels are of shape (2, 5)"),
        ({"past_key_values": transformers.DynamicCache()}, "DynamicCache(config=model.config)"),
        ({"output_hidden_states": True}, "output_hidden_states is set"),
        ({"output_attentions": True}, "output_attentions is set"),
    ],
)
def test_wrong_input_is_told(arguments: dict[str, Any], words: str) -> None:
    model = small_model()
    with pytest.raises(RequestError) as caught:
        model(**({"input_ids": random_tokens(2, 4)} | arguments))
    assert words in str(caught.value)


def test_what_many_tools_switch_off_may_be_named() -> None:
    model, tokens = small_model(), random_tokens(2, 4)
    named = model(tokens, output_attentions=False, output_hidden_states=False)
    assert torch.equal(named.logits, model(tokens).logits)


def test_other_wrong_requests_are_told() -> None:
    from maglev.hf import MaglevConfig

    model = small_model()
    cache = model(random_tokens(2, 4)).past_key_values
    with pytest.raises(RequestError, match="3 rows of tokens, and 2"):
        model(random_tokens(3, 1), past_key_values=cache)
    static = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(RequestError, match="StaticCache"):
        model(random_tokens(2, 4), past_key_values=static)
    with pytest.raises(RequestError, match="StaticCache"):
        model.generate(random_tokens(2, 4), cache_implementation="static", max_new_tokens=2)
    with pytest.raises(RequestError, match="fixed"):
        model.resize_token_embeddings(99)
    run = model.config.run
    with pytest.raises(RequestError, match=r"unknown key model\.colour"):
        MaglevConfig(run=run | {"model": run["model"] | {"colour": 3}})
    with pytest.raises(RequestError, match="hidden_size is 7 and the run says 32"):
        MaglevConfig(run=run, hidden_size=7)
