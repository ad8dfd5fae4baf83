"""CUDA graphs: what is noted down, and what is left of a failure."""

import pytest
import torch
from torch import Tensor

from maglev.ops.graphs import capture

pytestmark = pytest.mark.gpu


def test_a_replay_computes_anew() -> None:
    given = torch.ones(4, device="cuda")
    result, replay = capture(lambda: given * 2, given.device)
    for value in (1.0, 3.0):
        given.fill_(value)
        replay()
        assert result.tolist() == [2 * value] * 4


def test_after_a_failure_all_is_as_before() -> None:
    given = torch.ones(4, device="cuda")
    before = torch.cuda.current_stream()

    def waits() -> float:
        return float((given * 2).sum())

    # not that the capture could not be ended, which follows from it
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture(waits, given.device)
    assert torch.cuda.current_stream() == before
    large = torch.empty(2**26, device="cuda")
    held = torch.cuda.memory_reserved()
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held
    result, replay = capture(lambda: given + 1, given.device)
    replay()
    assert result.tolist() == [2.0] * 4


def test_backward_on_the_default_stream_before_does_not_keep_one_from_being_recorded() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    given = torch.ones(4, device="cuda")

    def work() -> Tensor:
        loss = (weight * given).sum()
        loss.backward()
        return loss.detach()

    work()
    loss, replay = capture(work, given.device)
    for _ in range(2):
        replay()
    assert loss.item() == 4.0 and weight.grad is not None and weight.grad.tolist() == [3.0] * 4
