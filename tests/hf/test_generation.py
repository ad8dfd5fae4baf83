"""transformers' own `generate` on stock caches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import random_tokens
from tests.hf.models import small_model

transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")

NEW = 12


def write(model: Any, ids: Tensor, **settings: Any) -> Any:
    # without a mask, transformers would take every token 0 for padding
    defaults = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW}
    return model.generate(ids, **(defaults | settings))


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths to the right of padding, and their mask."""
    width = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, width - len(row) :], mask[number, width - len(row) :] = row, 1
    return ids, mask


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("recipe", ["maglev-shared-0.1", "lrt-slsl"])
def test_a_padded_batch_writes_what_each_row_alone_does(recipe: str, settings: dict[str, Any]) -> None:
    model = small_model(recipe)
    rows = [random_tokens(1, length, seed=length)[0] for length in (3, 17, 30)]
    ids, mask = padded(rows)
    together = write(model, ids, attention_mask=mask, **settings)
    alone = torch.cat([write(model, row[None], **settings)[:, -NEW:] for row in rows])
    assert torch.equal(together[:, -NEW:], alone)


def test_the_cache_changes_nothing() -> None:
    model, ids = small_model(), random_tokens(2, 15)
    for settings in ({}, {"num_beams": 3}):
        assert torch.equal(write(model, ids, **settings), write(model, ids, use_cache=False, **settings))
    assert torch.equal(write(model, ids, prefill_chunk_size=4), write(model, ids))


def test_greedy_takes_the_likeliest_of_the_stepped_decoder() -> None:
    model, ids = small_model(), random_tokens(1, 9)
    state = model.decoder.initial_state(1)
    with torch.no_grad():
        for token in ids[0]:
            memory, state = model.decoder.step(token[None], state)
        expected = []
        for _ in range(NEW):
            expected.append(int(model.decoder.readout(memory).argmax()))
            memory, state = model.decoder.step(torch.tensor(expected[-1:]), state)
    assert write(model, ids)[0, -NEW:].tolist() == expected


def test_going_on_from_a_returned_cache() -> None:
    model, ids = small_model(), random_tokens(2, 15)
    ids, mask = padded([ids[0], ids[1, :11]])
    first = write(model, ids, attention_mask=mask, return_dict_in_generate=True)
    covers = torch.cat((mask, torch.ones(2, NEW, dtype=torch.int64)), dim=1)
    more = write(model, first.sequences, attention_mask=covers, past_key_values=first.past_key_values)
    whole = write(model, ids, attention_mask=mask, max_new_tokens=2 * NEW)
    assert torch.equal(more, whole)


def test_sampling_repeats_under_its_seed() -> None:
    model, ids = small_model(), random_tokens(1, 5)
    texts = []
    for seed in (1, 1, 2):
        transformers.set_seed(seed)
        texts.append(write(model, ids, do_sample=True, temperature=0.9, top_k=20, top_p=0.95).tolist())
    assert texts[0] == texts[1] != texts[2]
