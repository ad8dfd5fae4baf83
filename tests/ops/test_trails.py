"""Texts side by side: every step sees what a row with the same keys and values written in would show it."""

import pytest
import torch
from torch import Tensor

from maglev.ops.trails import Trails

ROWS, LENGTH, HEADS, GROUPS, DIM = 2, 14, 4, 2, 8


def draw(
    window: int, step: int, dtype: torch.dtype, device: str = "cpu", rows: int = ROWS, length: int = LENGTH
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Keys and values of whole rows; query, key and value of each step."""
    generator = torch.Generator().manual_seed(window + step)

    def leaf(count: int, heads: int) -> Tensor:
        shape = rows, count, heads, DIM
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()

    steps = range(min(step, length))
    own = [[leaf(len(range(at, length, step)), heads) for heads in (HEADS, GROUPS, GROUPS)] for at in steps]
    return [leaf(length, GROUPS), leaf(length, GROUPS)], own


def as_rows(
    whole: list[Tensor], own: list[list[Tensor]], window: int, step: int, starts: Tensor | None
) -> list[Tensor]:
    """By the definition: what a step writes goes into the rows, and a query looks at the W last places."""
    key, value = whole
    found = []
    for first, (query, *written) in enumerate(own):
        key, value = (
            old.slice_scatter(new, 1, first, None, step) for old, new in zip((key, value), written, strict=True)
        )
        seen = []
        for number, place in enumerate(range(first, key.shape[1], step)):
            begin = max(0, place + 1 - window)
            keys, values = (
                each[:, begin : place + 1].repeat_interleave(HEADS // GROUPS, dim=2) for each in (key, value)
            )
            scores = torch.einsum("bhd,bwhd->bhw", query[:, number], keys) / DIM**0.5
            if starts is not None:
                hidden = torch.arange(begin, place + 1) < starts[:, place, None]
                scores = scores.masked_fill(hidden[:, None], -torch.inf)
            seen.append(torch.einsum("bhw,bwhd->bhd", scores.softmax(-1), values))
        found.append(torch.stack(seen, 1))
    return found


def side_by_side(
    whole: list[Tensor], own: list[list[Tensor]], window: int, step: int, starts: Tensor | None, compiled: bool = False
) -> list[Tensor]:
    trails = Trails(*whole, window, step, starts, compiled)
    chain, found = trails.begin(*whole), []
    for first, given in enumerate(own):
        seen, chain = trails.attend(chain, first, *given)
        found.append(seen)
    return found


def gradients(seen: list[Tensor], leaves: list[Tensor]) -> list[Tensor | None]:
    loss = sum((each.double() * (number + 1)).square().sum() for number, each in enumerate(seen))
    return list(torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True))


@pytest.mark.parametrize(("window", "step"), [(1, 1), (1, 3), (3, 3), (3, 4), (4, 7), (5, 20)])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("until", [1, 2, 20])
def test_what_is_seen_and_its_gradients(window: int, step: int, apart: bool, until: int) -> None:
    """Also of the first few steps alone: what comes after them then has no part in it."""
    whole, own = draw(window, step, torch.float64)
    starts = torch.stack([torch.arange(LENGTH) // 5 * 5, torch.arange(LENGTH) // 9 * 9]) if apart else None
    expected, found = (way(whole, own, window, step, starts) for way in (as_rows, side_by_side))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    leaves = [*whole, *(leaf for given in own[:until] for leaf in given)]
    wanted = gradients(expected[:until], leaves)
    # twice: what one backward has added up is no part of the next
    for _ in range(2):
        for number, (mine, theirs) in enumerate(zip(gradients(found[:until], leaves), wanted, strict=True)):
            missing = torch.zeros_like(leaves[number])
            pair = (missing if each is None else each for each in (mine, theirs))
            torch.testing.assert_close(*pair, rtol=0, atol=1e-12, msg=lambda text, number=number: f"{number}: {text}")


def test_rows_that_need_no_gradient() -> None:
    window, step = 3, 4
    whole, own = draw(window, step, torch.float64)
    leaves = [leaf for given in own for leaf in given]
    expected = gradients(as_rows(whole, own, window, step, None), leaves)
    fixed = [each.detach() for each in whole]
    for mine, theirs in zip(gradients(side_by_side(fixed, own, window, step, None), leaves), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "step"), [(16, 32), (64, 64)])
def test_compiled_on_a_gpu(window: int, step: int) -> None:
    """In the precision of training, against float64 of the same numbers; the last text is shorter."""
    length = 4 * step - 3
    whole, own = draw(window, step, torch.bfloat16, "cuda", length=length)
    wide = [each.detach().double().requires_grad_() for each in whole]
    wide_own = [[each.detach().double().requires_grad_() for each in given] for given in own]
    found = side_by_side(whole, own, window, step, None, compiled=True)
    expected = side_by_side(wide, wide_own, window, step, None)
    mine = [*found, *gradients(found, [*whole, *(leaf for given in own for leaf in given)])]
    theirs = [*expected, *gradients(expected, [*wide, *(leaf for given in wide_own for leaf in given)])]
    for one, other in zip(mine, theirs, strict=True):
        assert float((one - other).norm()) <= 0.02 * float(other.norm()) + 0.01
