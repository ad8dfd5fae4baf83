"""What a pass keeps for its backward with each kind of recomputation, by what SWA keeps with none.

    python benchmarks/kept.py [--quick]

Bytes of activations, parameters not counted, in float32 on a CPU, in plain PyTorch and compiled, each by its own SWA:
two rows of 512 tokens, W 128, depth 4. The last line of stdout is JSON.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.config import TrainConfig
from maglev.recipes import run_config
from maglev.train.setup import build_for_training

RECIPES = ("swa-ssss", "maglev-shared-0.1")
WAYS = {"off": "plain PyTorch", "on": "compiled for a CPU"}
KINDS = get_args(get_type_hints(TrainConfig)["recompute"])
# W is a quarter of the context, as in the paper's shape
SHAPE = {"model.context": 512, "model.window": 128, "model.vocab_size": 512}
SMALL = {"model.context": 64, "model.window": 16, "model.vocab_size": 64}
DEPTH, ROWS = 4, 2


def kept_bytes(
    recipe: str, recompute: str, compile: str = "off", depth: int = DEPTH, shape: dict[str, int] = SHAPE
) -> int:
    """Bytes of the storages that a pass keeps for its backward, parameters not counted."""
    config = run_config(recipe, depth, shape | {"train.recompute": recompute, "train.compile": compile})
    objective = build_for_training(config, torch.device("cpu"))
    own = {parameter.untyped_storage().data_ptr() for parameter in objective.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    size = (ROWS, config.model.context + 1)
    row = torch.randint(config.model.vocab_size, size, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        objective(row[:, :-1].contiguous(), row[:, 1:].contiguous())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layer and a short context, to see that it runs")
    asked = parser.parse_args(words)
    depth, shape = (1, SMALL) if asked.quick else (DEPTH, SHAPE)
    rows: list[dict[str, Any]] = []
    print(f"| | {' | '.join(KINDS)} |\n|{'---|' * (1 + len(KINDS))}")
    for compile, way in WAYS.items():
        base = 0
        for recipe in RECIPES:
            found = {kind: kept_bytes(recipe, kind, compile, depth, shape) for kind in KINDS}
            base = base or found["none"]
            rows.append({"recipe": recipe, "compile": compile, "bytes": found})
            print(f"| {recipe}, {way} | {' | '.join(f'{size / base:.3f}' for size in found.values())} |")
    facts = {"benchmark": "kept", "quick": asked.quick, "depth": depth, "torch": torch.__version__}
    print(json.dumps(facts | {"python": platform.python_version(), **shape, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
