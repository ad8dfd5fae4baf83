import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from maglev.errors import RequestError, WorkError
from maglev.train import distributed

ROOT = Path(__file__).parents[2]
WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy training of rank_worker.py on 1, 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "rank_worker.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return folder


def tensors(runs: Path, world: int, stem: str, rank: int) -> dict[str, Tensor]:
    return load_file(runs / f"world-{world}" / f"{stem}-{rank}.safetensors")


def facts(runs: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((runs / f"world-{world}" / f"facts-{rank}.json").read_text()) for rank in range(world)]


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-6, name


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_parameters_of_one_process(runs: Path, world: int) -> None:
    expected = tensors(runs, 1, "final", 0)
    for rank in range(world):
        found = tensors(runs, world, "final", rank)
        assert_close(found, expected)
        first = tensors(runs, world, "final", 0)
        assert all(torch.equal(found[name], first[name]) for name in first), "ranks drifted apart"


@pytest.mark.parametrize("world", [2, 4])
def test_divided_parameters_are_updated_as_whole_ones(runs: Path, world: int) -> None:
    expected = tensors(runs, 1, "final", 0)
    for rank in range(world):
        assert_close(tensors(runs, world, "divided", rank), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_state_does_not_depend_on_the_number_of_ranks(runs: Path, world: int) -> None:
    expected = tensors(runs, 1, "state", 0)
    assert_close(tensors(runs, world, "state", 0), expected)
    # rank 0 saves; the others hold no second copy
    assert all(not tensors(runs, world, "state", rank) for rank in range(1, world))


@pytest.mark.parametrize("world", WORLDS)
def test_state_of_two_ranks_goes_on_anywhere(runs: Path, world: int) -> None:
    expected = tensors(runs, 1, "final", 0)
    for rank in range(world):
        assert_close(tensors(runs, world, "resumed", rank), expected)


@pytest.mark.parametrize(
    ("world", "owned"),
    [(1, [[5, 3, 1]]), (2, [[3, 2, 1], [2, 1, 0]]), (4, [[2, 1, 1], [2, 1, 0], [1, 1, 0], [0, 0, 0]])],
)
def test_momentum_is_divided_over_the_ranks(runs: Path, world: int, owned: list[list[int]]) -> None:
    assert [fact["owned"] for fact in facts(runs, world)] == owned


@pytest.mark.parametrize("world", WORLDS)
def test_messages_between_ranks(runs: Path, world: int) -> None:
    for rank, fact in enumerate(facts(runs, world)):
        assert fact["ranks"] == [rank, world, rank, "cpu"]
        assert fact["sums"] == pytest.approx([world, world * (world - 1) / 2, world * 1e-12], rel=1e-12)
        assert fact["agree"] == ""
        assert fact["texts"] == ["ä" * other for other in range(world)]
        if world == 1:
            assert fact["disagree"] == ""
        else:
            others = ", ".join(map(str, range(1, world)))
            assert f"do not agree on the data: rank {others} differs from rank 0" in fact["disagree"]


def test_without_torchrun_there_is_one_rank_and_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = distributed.start("cpu", timedelta(seconds=60))
    assert ranks == distributed.Ranks(0, 1, 0, torch.device("cpu")) and ranks.is_main
    assert not torch.distributed.is_initialized()
    assert distributed.sum_over_ranks([1, 2.5]) == [1.0, 2.5]
    distributed.all_agree("anything")
    distributed.stop()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        torch.distributed.DistBackendError("NCCL error in: a.cpp:3690, remote process exited, NCCL version 2.27"),
        torch.distributed.DistStoreError("wait timeout after 5000ms, keys: /0"),
    ],
)
def test_what_the_transport_says_tells_of_another_rank(error: RuntimeError) -> None:
    late = "timeout" in str(error)
    told = f"rank 0 lost another rank, which {'did not answer within train.timeout' if late else 'is gone'}: its own"
    with pytest.raises(WorkError, match=told), distributed.exchange():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.distributed.DistBackendError("NCCL error in: a.cpp:3690, unhandled cuda error\nCuda failure 700"),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("a and b must have one shape"),
        WorkError("NCCL has been named here"),
    ],
)
def test_other_trouble_between_messages_is_a_rank_s_own(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as told, distributed.exchange():
        raise error
    assert told.value is error


def test_a_rank_that_cannot_even_tell_of_its_failure_says_why_it_failed() -> None:
    """As where its GPU is gone, over which messages go."""

    def fail() -> None:
        raise WorkError("first")

    def share(status: int) -> list[float]:
        raise RuntimeError("second")

    def share_text(said: str) -> list[str]:
        raise RuntimeError("third")

    with pytest.raises(WorkError, match="first"):
        distributed.all_or_none(fail, 0, share, share_text)
    with pytest.raises(RuntimeError, match="second"):
        distributed.all_or_none(lambda: None, 0, share, share_text)
    # a status that got through, and then nothing more
    with pytest.raises(WorkError, match="first"):
        distributed.all_or_none(fail, 1, lambda status: [0, status], share_text)
    with pytest.raises(WorkError, match="rank 1: failed, and could not say why any more"):
        distributed.all_or_none(lambda: None, 0, lambda status: [status, 1], share_text)


def test_a_mistake_of_ours_keeps_its_trace_and_rank_0_tells_of_it() -> None:
    def fail() -> None:
        raise KeyError("nothing there")

    def texts(said: str) -> list[str]:
        return ["", said or "'nothing there'"]

    with pytest.raises(KeyError, match="nothing there"):
        distributed.all_or_none(fail, 1, lambda status: [0, status], texts)
    with pytest.raises(WorkError, match="rank 1: 'nothing there'"):
        distributed.all_or_none(lambda: None, 0, lambda status: [status, 1], texts)
    with pytest.raises(distributed.SaidElsewhere):
        distributed.all_or_none(lambda: None, 2, lambda status: [0, 1, status], texts)


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is ''"),
        ({"WORLD_SIZE": "two", "RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}, "below WORLD_SIZE = 2"),
    ],
)
def test_broken_places_are_refused(environment: dict[str, str], line: str) -> None:
    with pytest.raises(RequestError, match=line):
        distributed.read_place(environment)


@pytest.mark.parametrize("device", ["tpu", "cpu:1", "cuda:x", "", "auto:0"])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(RequestError, match="auto, cpu, cuda or cuda:N"):
        distributed.resolve_device(device)


def test_devices_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert distributed.resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:0"):
        with pytest.raises(RequestError, match=r"sees no CUDA GPU; set train\.device to cpu or auto"):
            distributed.resolve_device(device)


def test_devices_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.resolve_device("auto", 2, 1) == torch.device("cuda", 1)
    assert distributed.resolve_device("cuda") == torch.device("cuda", 0)
    assert distributed.resolve_device("cuda:1") == torch.device("cuda", 1)
    assert distributed.resolve_device("cpu", 2, 1) == torch.device("cpu")
    with pytest.raises(RequestError, match="GPU 2 is asked for and this machine has 2"):
        distributed.resolve_device("cuda", 3, 2)
    with pytest.raises(RequestError, match="one GPU for 2 processes"):
        distributed.resolve_device("cuda:1", 2, 0)
