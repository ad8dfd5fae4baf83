"""Run by test_distributed.py: the same toy training on 2, 1 and 4 gloo ranks. `rank_worker.py FOLDER`.

torch is imported once and every rank is a fork, before any thread exists.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from maglev.config import OptimizerConfig
from maglev.errors import WorkError
from maglev.train import distributed
from maglev.train.optimizer import Optimizer
from maglev.train.param_groups import build_param_groups
from maglev.train.sharding import local, whole
from tests.processes import free_ports

# Stacks of 5, 3 and 1 matrices: none divides by 2 or 4, and some ranks own nothing.
SHAPES = (
    {"embedding.weight": (7, 4), "readout.weight": (7, 4), "residual_scale": (3,), "input_scale": (3,)}
    | {f"blocks.{i}.up_proj.weight": (6, 4) for i in range(5)}
    | {f"blocks.{i}.down_proj.weight": (4, 6) for i in range(3)}
    | {f"blocks.{i}.local_gate.weight": (2, 4) for i in range(3)}
    | {"injection.memory_key_proj.weight": (4, 4)}
)
# parameters without a gradient
UNREACHED = ("blocks.1.local_gate.weight", "blocks.2.up_proj.weight")


def start_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def build(parameters: dict[str, nn.Parameter]) -> Optimizer:
    return Optimizer(build_param_groups(parameters.items(), OptimizerConfig(), 64, 3, 524_288))


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """As they arrive, summed over the ranks; none of some parameters."""
    for index, (name, parameter) in enumerate(parameters.items()):
        if name not in UNREACHED:
            generator = torch.Generator().manual_seed(1000 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(parameters: dict[str, nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step(1.0 - 0.1 * step, 0.85 + 0.01 * step, 1.0 - 0.2 * step)
        optimizer.zero_grad()


def train_divided(ranks: distributed.Ranks) -> dict[str, Tensor]:
    """The same with every parameter divided by rows, and gradients that arrive summed, as FSDP's do."""
    mesh = init_device_mesh("cpu", (ranks.world,))
    plain = start_parameters()
    divided = {name: nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for name, p in plain.items()}
    optimizer = build(divided)
    for step in range(4):
        set_gradients(plain, step)
        for name, parameter in plain.items():
            if parameter.grad is not None:
                divided[name].grad = distribute_tensor(parameter.grad, mesh, [Shard(0)])
        optimizer.step(1.0 - 0.1 * step, 0.85 + 0.01 * step, 1.0 - 0.2 * step)
        optimizer.zero_grad()
    held = [stack.momentum.size(0) for stack in optimizer.stacks]
    assert held == [stack.momentum.size(0) for stack in build(start_parameters()).stacks]
    assert all(
        part.tensor.shape == local(divided[name.split("/")[1]]).shape
        for name, part in optimizer.adamw[0].state().items()
    )
    return {name: whole(parameter).detach().clone() for name, parameter in divided.items()}


def values(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def disagreement(fingerprint: str) -> str:
    try:
        distributed.all_agree(fingerprint, "data")
    except WorkError as error:
        return str(error)
    return ""


def work(folder: Path, world: int) -> None:
    ranks = distributed.start("cpu", timedelta(seconds=60))
    out = folder / f"world-{world}"
    parameters = start_parameters()
    optimizer = build(parameters)
    train(parameters, optimizer, range(2))
    state = optimizer.state_tensors()
    save_file(state, out / f"state-{ranks.rank}.safetensors")
    if ranks.is_main:
        save_file(values(parameters), out / "half.safetensors")
    train(parameters, optimizer, range(2, 4))
    save_file(values(parameters), out / f"final-{ranks.rank}.safetensors")

    half = folder / "world-2"
    resumed = start_parameters()
    for name, tensor in load_file(half / "half.safetensors").items():
        resumed[name].data.copy_(tensor)
    optimizer = build(resumed)
    optimizer.load_state_tensors(load_file(half / "state-0.safetensors"))
    train(resumed, optimizer, range(2, 4))
    save_file(values(resumed), out / f"resumed-{ranks.rank}.safetensors")

    if world > 1:
        save_file(train_divided(ranks), out / f"divided-{ranks.rank}.safetensors")
    facts = {
        "ranks": [ranks.rank, ranks.world, ranks.local_rank, str(ranks.device)],
        "sums": distributed.sum_over_ranks([1.0, ranks.rank, 1e-12]),
        "agree": disagreement("same"),
        "disagree": disagreement("one" if ranks.rank < 1 else "other"),
        "texts": distributed.gather_texts("ä" * ranks.rank),
        "owned": [stack.momentum.size(0) for stack in optimizer.stacks],
    }
    (out / f"facts-{ranks.rank}.json").write_text(json.dumps(facts))
    distributed.stop()


def run_rank(folder: Path, world: int, rank: int, port: int) -> None:
    """Never returns: the fork ends here."""
    status = 1
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        work(folder, world)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(folder: Path) -> None:
    for world in (2, 1, 4):
        (folder / f"world-{world}").mkdir()
        port = free_ports(1)[0]
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                run_rank(folder, world, rank, port)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit(f"world {world}: ranks ended with {statuses}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
