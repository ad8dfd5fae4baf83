"""One query over a ring that may be partly filled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maglev.ops import reference
from maglev.ops.decode import decode_attention


def draw(batch: int, window: int, kv_heads: int, group: int, head_dim: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + window)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ring = (batch, window, kv_heads, head_dim)
    return numbers(batch, 1, kv_heads * group, head_dim), numbers(*ring), numbers(*ring)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_equals_the_definition_at_any_filling(data: st.DataObject) -> None:
    batch, window = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    inputs = draw(batch, window, data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 3])))
    filled = torch.tensor(data.draw(st.lists(st.integers(1, window), min_size=batch, max_size=batch)))
    expected = reference.decode_attention(*inputs, filled)
    torch.testing.assert_close(decode_attention(*inputs, filled), expected, rtol=0, atol=1e-12)


def test_is_the_last_query_of_windowed_attention() -> None:
    """A ring that holds T keys and the dense definition at position T - 1 are the same thing."""
    query, key, value = draw(2, 7, 2, 2)
    expected = reference.windowed_attention(query, key, value, 7, range(6, 7))
    torch.testing.assert_close(decode_attention(query, key, value, torch.tensor([7, 7])), expected, rtol=0, atol=1e-12)


def test_the_order_of_the_slots_does_not_matter() -> None:
    query, key, value = draw(1, 9, 1, 2)
    filled = torch.tensor([9])
    turned = decode_attention(query, key.roll(4, 1), value.roll(4, 1), filled)
    torch.testing.assert_close(turned, decode_attention(query, key, value, filled), rtol=0, atol=1e-12)


def test_one_filled_slot_returns_its_value() -> None:
    query, key, value = draw(2, 5, 2, 2)
    out = decode_attention(query, key, value, torch.tensor([1, 1]))
    torch.testing.assert_close(out, value[:, :1].repeat_interleave(2, dim=2), rtol=0, atol=1e-14)


def test_unused_slots_do_not_change_a_bit() -> None:
    query, key, value = draw(2, 8, 1, 2)
    filled = torch.tensor([3, 8])
    before = decode_attention(query, key, value, filled)
    key[0, 3:], value[0, 3:] = 1e30, -1e30
    assert torch.equal(decode_attention(query, key, value, filled), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keeps_the_dtype(dtype: torch.dtype) -> None:
    query, key, value = (tensor.to(dtype) for tensor in draw(1, 4, 1, 2))
    assert decode_attention(query, key, value, torch.tensor([4])).dtype == dtype
