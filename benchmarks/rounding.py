"""Where bfloat16 enters the gradient of a second step: float32, with one kind of value rounded at a time.

    python benchmarks/rounding.py [RECIPE...] [--rows 8]

After one step from the start, a small model's gradient is computed in float32, then again with memories, the residual
stream, products, weights or logits rounded to bfloat16 on their way forward, or their gradients on the way back. For
each: the median over all parameters of how far their gradient moves by its size, and the same for the input scales,
which move fastest. Before that, how far P's memories are from Q's in the first steps: the consistency. The text is that
of benchmarks/follow.py. The last line of stdout is JSON.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.follow import CONTEXT, DEPTH, WIDTH, WINDOW, TextTask
from maglev.bench.lines import Lines
from maglev.model import decoder as stacks
from maglev.model.attention import Block
from maglev.model.layers import Linear
from maglev.ops import loss
from maglev.recipes import RECIPES, run_config
from maglev.train.distributed import Ranks
from maglev.train.loop import Trainer

Gradients = dict[str, Tensor]
CPU = torch.device("cpu")
FIRST_STEPS = 6


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, backward: bool) -> Tensor:
        ctx.back = backward
        return values.clone() if backward else values.bfloat16().float()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        return slope.bfloat16().float() if ctx.back else slope, None


@contextmanager
def rounding(place: str, backward: bool) -> Iterator[None]:
    def result_of(work: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *given, **named: Rounded.apply(work(*given, **named), backward)

    def weight_of(self: Linear, x: Tensor) -> Tensor:
        return self.product(x, Rounded.apply(self.weight, backward))

    places: dict[str, tuple[Any, str, Callable[..., Tensor]]] = {
        "memories": (stacks, "rms_norm", result_of(stacks.rms_norm)),
        "stream": (Block, "forward", result_of(Block.forward)),
        "products": (Linear, "forward", result_of(Linear.forward)),
        "weights": (Linear, "forward", weight_of),
        "logits": (loss, "softcap", lambda logits, cap: softcap(Rounded.apply(logits, backward), cap)),
    }
    softcap = loss.softcap
    owner, name, rounded = places[place]
    with patch.object(owner, name, rounded):
        yield


PLACES = ("memories", "stream", "products", "weights", "logits")


def trainer_of(recipe: str, rows: int) -> tuple[Trainer, list[float]]:
    """And where it puts the consistency of its steps."""
    settings = {
        "model.width": WIDTH,
        "model.context": CONTEXT,
        "model.window": WINDOW,
        "model.vocab_size": 256,
        "train.steps": 200,
        "train.tokens_per_step": rows * CONTEXT,
        "train.rows_per_pass": rows,
        "train.precision": "float32",
        "train.validate_every": 0,
        "train.compile": "off",
    }
    trainer = Trainer(run_config(recipe, DEPTH, settings), TextTask(256), Path(), Ranks(0, 1, 0, CPU), Lines())
    apart: list[float] = []
    trainer.record = lambda losses, *rest: apart.append(losses.consistency)  # type: ignore[method-assign]
    return trainer, apart


def consistency_of_first_steps(recipe: str, rows: int) -> list[float]:
    trainer, apart = trainer_of(recipe, rows)
    for _ in range(FIRST_STEPS):
        trainer.one_step()
    return apart


def gradients_of_second_step(recipe: str, rows: int) -> Callable[[], Gradients]:
    trainer, _ = trainer_of(recipe, rows)
    trainer.one_step()
    batch = trainer.ahead.batch(1)
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)

    def gradients() -> Gradients:
        trainer.objective.zero_grad()
        trainer.objective(tokens, targets).total.backward()
        named = trainer.objective.named_parameters()
        return {name: each.grad.clone() for name, each in named if each.grad is not None}

    return gradients


def moved(found: Gradients, exact: Gradients) -> dict[str, float]:
    apart = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    scales = [gap for name, gap in apart.items() if name.endswith("input_scale")]
    return {"median": statistics.median(apart.values()), "input_scales": max(scales)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["swa-ssss", "maglev-shared-0.1", "maglev-closed"])
    parser.add_argument("--rows", type=int, default=8)
    asked = parser.parse_args()
    unknown = [name for name in asked.recipes if name not in RECIPES]
    if unknown:
        raise SystemExit(f"no recipe {unknown[0]}; there are {', '.join(RECIPES)}")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for recipe in asked.recipes:
        apart = consistency_of_first_steps(recipe, asked.rows)
        print(f"{recipe:20} consistency of the first steps: {', '.join(f'{each:.4f}' for each in apart)}", flush=True)
        gradients = gradients_of_second_step(recipe, asked.rows)
        exact = gradients()
        results[recipe] = {}
        for place in PLACES:
            for way in ("forward", "backward"):
                with rounding(place, way == "backward"):
                    row = moved(gradients(), exact)
                results[recipe][f"{place}, {way}"] = row
                print(
                    f"{recipe:20} {place:9} {way:9} {row['median']:.4f}, input scales {row['input_scales']:.4f}",
                    flush=True,
                )
    print(json.dumps({"rows": asked.rows, "torch": torch.__version__, "recipes": results}))


if __name__ == "__main__":
    main()
