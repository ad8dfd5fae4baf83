"""The kernels of decoding against their plain twins; `test_fused_decode.py` runs this file."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from maglev.ops import decode_steps as twins
from maglev.ops import fused_decode, fused_product, fused_ring
from maglev.ops.matrix import ARRIVALS, Matrix, WeightFormat, matrix
from maglev.ops.rotation import rotation, turn_frequencies
from tests.kernel_cases import DEVICE, INTERPRETED, poisoned_memory, round_like_the_gpu

__all__ = ["poisoned_memory"]

if INTERPRETED:
    round_like_the_gpu()


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes the interpreter about a millisecond."""
    fused_product.batch_tile.cache_clear()
    monkeypatch.setattr(fused_product, "PROGRAMS", 8)
    monkeypatch.setattr(fused_ring, "PROGRAMS", 1)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return drawn.to(DEVICE)


Operation = Callable[[object, torch.dtype], list[Tensor]]


def product_operations(batch: int, inputs: int, outputs: int, weights: WeightFormat = "plain") -> dict[str, Operation]:
    """Every product as a function of the module that computes it and the precision of its arguments."""
    x, start, base = numbers(batch, inputs), numbers(batch, inputs, seed=1), numbers(batch, outputs, seed=2)
    weight, scales = numbers(outputs, inputs, seed=3) / inputs**0.5, torch.tensor([0.9, 0.3], device=DEVICE)

    def to(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
        # what bfloat16 holds, in whatever precision it is computed
        return [tensor.to(torch.bfloat16).to(dtype) for tensor in tensors]

    def held(dtype: torch.dtype, factor: float = 1.0) -> Matrix:
        return matrix((weight * factor).to(torch.bfloat16).to(dtype), weights)

    def scale_norm_project(ops: object, dtype: torch.dtype) -> list[Tensor]:
        return list(ops.scale_norm_project(*to(dtype, x, start), scales, held(dtype)))  # type: ignore[attr-defined]

    def gate_norm_project(ops: object, dtype: torch.dtype) -> list[Tensor]:
        # the first number of heads that divides the width, and logits of some more, as padding gives them
        heads = next(heads for heads in (4, 3, 1) if inputs % heads == 0)
        logits = numbers(batch, heads + 3, seed=4)
        # what gates let in lies among other features
        stream, wide, logits = to(dtype, x, torch.cat((base, start, base), 1), logits)
        memory = wide[:, outputs : outputs + inputs]
        return list(ops.gate_norm_project(stream, memory, logits, heads, held(dtype)))  # type: ignore[attr-defined]

    return {
        "scale_norm_project": scale_norm_project,
        "gate_norm_project": gate_norm_project,
        "project": lambda ops, dtype: [ops.project(*to(dtype, x), held(dtype))],  # type: ignore[attr-defined]
        "project_add": lambda ops, dtype: [ops.project_add(*to(dtype, base, x), held(dtype))],  # type: ignore[attr-defined]
        "norm_project_relu2": lambda ops, dtype: [ops.norm_project_relu2(*to(dtype, x), held(dtype))],  # type: ignore[attr-defined]
        "read_out": lambda ops, dtype: [ops.read_out(*to(dtype, x), held(dtype, 9.0), 15.0)],  # type: ignore[attr-defined]
    }


def agree(operation: Operation, tolerance: float = 1e-5) -> None:
    for got, expected in zip(operation(fused_decode, torch.float32), operation(twins, torch.float32), strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def at_most_twice_the_error_of_plain_bfloat16(operation: Operation) -> None:
    exact, plain = operation(twins, torch.float32), operation(twins, torch.bfloat16)
    for got, expected, naive in zip(operation(fused_decode, torch.bfloat16), exact, plain, strict=True):
        assert got.dtype == naive.dtype
        error, allowed = (got.float() - expected).abs().max(), (naive.float() - expected).abs().max()
        assert error <= 2 * allowed + 1e-6, f"{error:.2e} against {allowed:.2e} of plain bfloat16"


SHAPES = [(32, 48), (48, 37), (64, 64), (33, 5), (256, 3), (300, 17)]
BATCHES = [1, 2, 3, 5]
if INTERPRETED:
    # odd sizes and more than one chunk of columns: the interpreter takes its time
    SHAPES, BATCHES = [(48, 37), (33, 5), (300, 17)], [1, 3]
NAMES = list(product_operations(1, 2, 2))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_products_agree(name: str, batch: int, inputs: int, outputs: int) -> None:
    agree(product_operations(batch, inputs, outputs)[name])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_products_in_bfloat16(name: str, batch: int) -> None:
    at_most_twice_the_error_of_plain_bfloat16(product_operations(batch, 64, 37)[name])


@pytest.mark.parametrize("weights", ["int8", "fp8"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_products_with_weights_in_8_bits(name: str, batch: int, weights: WeightFormat) -> None:
    operation = product_operations(batch, 300, 37, weights)[name]
    agree(operation)
    at_most_twice_the_error_of_plain_bfloat16(operation)


@pytest.mark.parametrize("weights", ["plain", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_products_whose_columns_are_shared_by_programs(
    name: str, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch takes two tiles, the second one not filled."""
    monkeypatch.setattr(fused_product, "MEETING", -(10**9))
    monkeypatch.setattr(fused_product, "LARGEST_BATCH_TILE", 16)
    for inputs in (384, 300):
        assert fused_product.batch_tile(19, 37, inputs).splits == 3
        operation = product_operations(19, inputs, 37, weights)[name]
        agree(operation)
    at_most_twice_the_error_of_plain_bfloat16(operation)


def test_counters_are_left_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_product, "MEETING", -(10**9))
    weight, x = matrix(numbers(37, 384)), numbers(3, 384)
    first = fused_decode.project(x, weight)
    assert not weight.arrivals.any() and torch.equal(fused_decode.project(x, weight), first)


@pytest.mark.parametrize("name", NAMES)
def test_products_of_large_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "LARGEST_FUSED_BATCH", 2)
    operation = product_operations(3, 48, 37)[name]
    agree(operation)
    at_most_twice_the_error_of_plain_bfloat16(operation)


class Ring(NamedTuple):
    window: int = 16
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    batch: int = 2
    memory: bool = True
    programs: int = 1
    padding: int = 0


RINGS = {
    "plain": Ring(),
    "without memory": Ring(memory=False),
    "window of one": Ring(window=1, batch=3),
    "window of one, split": Ring(window=1, batch=3, programs=64),
    "padded": Ring(batch=3, padding=5),
    "one row": Ring(batch=1, window=33, head_dim=32),
    "odd window": Ring(window=5, batch=5),
    "odd window, grouped": Ring(window=33, group=3, kv_heads=1, batch=3, head_dim=32),
    "two queries per key": Ring(window=33, group=2, batch=2, memory=False),
    "odd head": Ring(window=5, head_dim=12, group=3),
    "split": Ring(window=33, batch=1, head_dim=32, programs=64),
    "split, grouped": Ring(window=33, batch=2, group=3, head_dim=32, programs=64),
    "split, without memory": Ring(window=40, batch=3, kv_heads=1, group=2, memory=False, programs=64),
}

# in the interpreter, and made of what others have
SLOW = {"split, without memory", "odd window, grouped", "window of one, split"}


def ring_operation(case: Ring, positions: list[int], arrivals: Tensor, blocks_of: int) -> Operation:
    """`blocks_of` slots at a time, so that a small window takes several."""
    batch, heads = case.batch, case.kv_heads * case.group
    width = (heads + 2 * case.kv_heads) * case.head_dim + 2 * case.kv_heads * case.memory + case.padding
    projected, memory = numbers(batch, width), numbers(batch, 2 * case.kv_heads * case.head_dim, seed=1)
    rings = [numbers(batch, case.window, case.kv_heads, case.head_dim, seed=seed) for seed in (2, 3)]
    position = torch.tensor(positions, device=DEVICE)
    frequencies = turn_frequencies(case.head_dim, 10_000.0).to(DEVICE)
    cos, sin = (part[:, 0] for part in rotation(position, frequencies, torch.float32))
    unused = torch.arange(case.window, device=DEVICE)[None] >= (position + 1).clamp_max(case.window)[:, None]

    def operation(ops: object, dtype: torch.dtype) -> list[Tensor]:
        key, value = (ring.to(torch.bfloat16).to(dtype) for ring in rings)
        if ops is fused_decode:
            slot = (position % case.window)[:, None] == torch.arange(case.window, device=DEVICE)
            for ring in (key, value):
                ring[unused | slot] = float("nan")
        own = [tensor.to(torch.bfloat16).to(dtype) for tensor in (projected, memory)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused_ring, "PROGRAMS", case.programs)
            tile = blocks_of * fused_ring.power_of_two(case.group) * 2 * fused_ring.power_of_two(case.head_dim // 2)
            patch.setattr(fused_ring, "TILE", tile)
            out = ops.ring_attend(  # type: ignore[attr-defined]
                own[0], own[1] if case.memory else None, key, value, position, cos, sin, arrivals, heads
            )
        if ops is fused_decode:
            assert key[unused].isnan().all() and value[unused].isnan().all()
        return [out, key[~unused], value[~unused]]

    return operation


@pytest.mark.parametrize("name", [name for name in RINGS if name not in SLOW or not INTERPRETED])
def test_rings_agree_at_any_filling_whatever_unused_slots_hold(name: str) -> None:
    case = RINGS[name]
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=DEVICE)
    # an empty ring, one that is about to be full, one far behind; the interpreter sees all three of one case
    fillings = (0, case.window - 1, 10**15 + 3)
    for first in fillings if not INTERPRETED or name == "plain" else fillings[1:]:
        positions = [first + 3 * row for row in range(case.batch)]
        operation = ring_operation(case, positions, arrivals, blocks_of=8)
        agree(operation)
        assert not arrivals.any()
    at_most_twice_the_error_of_plain_bfloat16(operation)


class Span(NamedTuple):
    window: int = 8
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 16
    memory: bool = True
    # more than a window; every position takes the interpreter some programs
    length: int = 11
    padding: int = 0
    room: int = 0
    first: int = 0
    step: int = 1


SPANS = {
    "plain": Span(),
    "without memory": Span(memory=False),
    "window of one": Span(window=1),
    "room for more": Span(room=9),
    "grouped": Span(group=3, kv_heads=1, head_dim=32, room=2),
    "odd head": Span(head_dim=12, window=5),
    "longer than a block": Span(length=18 if INTERPRETED else 150, window=20, padding=4),
    "all keys": Span(length=9, window=20),
    "every third": Span(length=40 if INTERPRETED else 500, window=20, first=1, step=3, room=2),
}


def span_operation(case: Span) -> Operation:
    """Two sequences, the second one with empty slots in front; what comes after the positions is anything."""
    batch, heads, history = 2, case.kv_heads * case.group, case.window - 1
    queries = range(history + case.first, history + case.length, case.step)
    rows = batch * len(queries)
    width = (heads + 2 * case.kv_heads) * case.head_dim + 2 * case.kv_heads * case.memory + case.padding
    projected, memory = numbers(rows, width), numbers(rows, 2 * case.kv_heads * case.head_dim, seed=1)
    spans = [
        numbers(batch, history + case.length + case.room, case.kv_heads, case.head_dim, seed=seed) for seed in (2, 3)
    ]
    angles = numbers(rows, case.head_dim // 2, seed=4)
    empty = torch.tensor([0, history // 2], device=DEVICE)

    def operation(ops: object, dtype: torch.dtype) -> list[Tensor]:
        key, value = (span.to(torch.bfloat16).to(dtype) for span in spans)
        own = [tensor.to(torch.bfloat16).to(dtype) for tensor in (projected, memory)]
        if ops is fused_decode:
            # what is empty, or not there yet, is not read
            key[1, : int(empty[1])] = value[1, : int(empty[1])] = float("nan")
            key[:, queries.stop :] = value[:, queries.stop :] = float("nan")
        out = ops.chunk_attend(  # type: ignore[attr-defined]
            own[0], own[1] if case.memory else None, key, value, empty, queries, case.window,
            angles.cos(), angles.sin(), heads,
        )  # fmt: skip
        return [out, *(each[row, int(empty[row]) : queries.stop] for each in (key, value) for row in range(2))]

    return operation


@pytest.mark.parametrize("name", SPANS)
def test_spans_agree(name: str) -> None:
    operation = span_operation(SPANS[name])
    agree(operation)
    at_most_twice_the_error_of_plain_bfloat16(operation)


def test_a_ring_is_written_in_its_slot_and_nowhere_else() -> None:
    ring = torch.full((2, 5, 1, 16), float("nan"), device=DEVICE)
    key, value = ring.clone(), ring.clone()
    position = torch.tensor([0, 0], device=DEVICE)
    angles = numbers(2, 8), numbers(2, 8, seed=1)
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=DEVICE)
    out = fused_decode.ring_attend(numbers(2, 48), None, key, value, position, *angles, arrivals, 1)
    assert out.isfinite().all()
    for tensor in (key, value):
        assert tensor[:, 0].isfinite().all() and tensor[:, 1:].isnan().all()
    torch.testing.assert_close(out, value[:, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 7, 10**15])
def test_a_step_begins_and_ends_as_its_twin_does(position: int, dtype: torch.dtype) -> None:
    embedding, frequencies = numbers(11, 48).to(dtype), turn_frequencies(12, 10_000.0).to(DEVICE)
    tokens, positions = torch.tensor([3, 10, 0], device=DEVICE), torch.arange(3, device=DEVICE) + position
    arguments = tokens, embedding, positions, frequencies
    for got, expected in zip(fused_decode.begin_step(*arguments), twins.begin_step(*arguments), strict=True):
        tolerance = 1e-6 if got.dtype == torch.float32 else 0.01
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    ends = []
    for ops in (fused_decode, twins):
        memory, after = torch.empty_like(embedding[:3]), torch.empty_like(positions)
        ops.finish_step(embedding[:3].contiguous(), positions, memory, after)
        assert after.tolist() == [position + 1, position + 2, position + 3]
        ends.append(memory)
    torch.testing.assert_close(ends[0], ends[1], rtol=0.01 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_a_token_outside_of_the_vocabulary_spoils_its_own_row_alone() -> None:
    tokens, position = torch.tensor([3, 11, -1, 2], device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    x, cos, sin = fused_decode.begin_step(tokens, numbers(11, 48), position, turn_frequencies(12, 100.0).to(DEVICE))
    assert x.isnan().all(1).tolist() == [False, True, True, False] and x[[0, 3]].isfinite().all()
    assert (cos == 1).all() and (sin == 0).all()


@pytest.mark.parametrize("outputs", [1, 20, 1280, 3860, 5120, 32_768])
@pytest.mark.parametrize("inputs", [32, 48, 300, 768, 1280, 5120])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_suit_the_threads(outputs: int, inputs: int, element_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tile = fused_product.vector_tile(outputs, inputs, element_size)
    assert tile.warps in (1, 2, 4) and tile.columns.bit_count() == tile.rows.bit_count() == 1
    assert tile.columns * element_size <= tile.warps * 32 * 16
    assert inputs % tile.columns == 0 or inputs % 128 or tile.columns >= inputs


@pytest.mark.parametrize("window", [1, 5, 33, 512, 2048])
@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_splits_cover_the_window(window: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for group, head_dim in ((1, 128), (4, 64), (3, 12)):
        lanes, splits = fused_ring.lanes_and_splits(batch, window, 10, group, head_dim)
        assert lanes.bit_count() == splits.bit_count() == 1
        assert splits == 1 or splits < 2 * -(-window // lanes)
