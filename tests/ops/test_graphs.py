"""CUDA graphs: what is noted down, and what is left of a failure."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from maglev.ops import graphs
from maglev.ops.graphs import capture


def test_what_a_graph_reads_lives_as_long_as_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has addresses: where nothing else keeps the tensors, it would read what comes after them."""

    class Noted:
        def replay(self) -> None:
            pass

    for name, value in (("CUDAGraph", Noted), ("graph_pool_handle", object), ("Stream", lambda device: None)):
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("current_stream", "device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, **named: nullcontext())
    monkeypatch.setattr(graphs, "own_stream", lambda device: None)

    def recorded() -> tuple[Any, "weakref.ref[Tensor]"]:
        given = torch.ones(4)
        return capture(lambda: given * 2, given.device)[1], weakref.ref(given)

    replay, given = recorded()
    gc.collect()
    assert given() is not None
    replay()
    del replay
    gc.collect()
    assert given() is None


@pytest.mark.gpu
def test_tensors_that_nothing_else_keeps_are_not_written_over() -> None:
    def recorded() -> Any:
        given = torch.ones(1000, device="cuda")
        return capture(lambda: given * 2, given.device)

    result, replay = recorded()
    others = [torch.full((1000,), 7.0, device="cuda") for _ in range(100)]
    replay()
    assert result.tolist() == [2.0] * 1000 and len(others) == 100


@pytest.mark.gpu
def test_a_replay_computes_anew() -> None:
    given = torch.ones(4, device="cuda")
    result, replay = capture(lambda: given * 2, given.device)
    for value in (1.0, 3.0):
        given.fill_(value)
        replay()
        assert result.tolist() == [2 * value] * 4


@pytest.mark.gpu
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


@pytest.mark.gpu
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
