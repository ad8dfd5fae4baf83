"""Whether kernels compute what plain PyTorch does, at the same weights, all along a training run.

    python benchmarks/same_weights.py [--recipes RECIPE...] [--jobs 8] [--out FILE]
    python benchmarks/same_weights.py --one maglev-shared-0.1 --steps 20 --rows 4 --device cpu --precision bfloat16

Curves of two runs part by rounding alone, however good each of them is: `follow.py` shows how far. Here nothing can
part. A small model is trained for 200 steps by plain PyTorch in float32; before some of the steps its weights are given
to plain PyTorch in bfloat16 and to what training takes on this device, and each computes the losses and all gradients
of that step's rows. What is told is how far either comes from float32: the difference of the next-token loss, and of
the gradients, ||g - g'|| / ||g||. Kernels serve where their gradients are no farther than 1.1 times as far as those of
plain bfloat16, in the mean over the steps. A table comes last, then one line of JSON.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from follow import CONTEXT, DEPTH, ROWS, WIDTH, trainer_of

from maglev import files
from maglev.bench.clock import machine_facts
from maglev.bench.jobs import Job, work_through
from maglev.bench.sources import source_fingerprint
from maglev.recipes import RECIPES
from maglev.train.loop import Trainer

WAYS = ("fast", "plain")
ALLOWED = 1.1
# the first ones, where P and Q are still nearly one network, and then now and then
PROBED = (0, 1, 2, 5, 10, 20, 40, 70, 100, 130, 160, 190)


def gradients_at(trainer: Trainer, step: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Of the rows of that step: the next-token loss, and the gradient of every parameter."""
    trainer.objective.progress = step / trainer.steps
    losses, _ = trainer.passes.gradients(trainer.ahead.batch(step))
    found = {
        name: parameter.grad.detach().double().cpu()
        for name, parameter in trainer.objective.named_parameters()
        if parameter.grad is not None
    }
    trainer.passes.zero_gradients()
    return losses.next_token, found


def apart(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """||g - g'|| / ||g|| over all parameters."""
    assert found.keys() == exact.keys()
    square = sum(float((found[name] - gradient).square().sum()) for name, gradient in exact.items())
    return (square / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


def one(recipe: str, asked: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    exact = trainer_of(recipe, "exact", asked, device)
    others = {way: trainer_of(recipe, way, asked, device) for way in WAYS}
    exact.record = lambda *_: None  # type: ignore[method-assign]
    rows = []
    for step in range(asked.steps):
        if step in PROBED:
            loss, gradients = gradients_at(exact, step)
            row: dict[str, float] = {"step": step, "loss": loss}
            for way, trainer in others.items():
                trainer.objective.load_state_dict(exact.objective.state_dict())
                own, found = gradients_at(trainer, step)
                row |= {f"{way}_loss": abs(own - loss), f"{way}_gradient": apart(found, gradients)}
            rows.append(row)
        exact.one_step()
    return rows


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    means = {key: sum(row[key] for row in rows) / len(rows) for key in rows[0] if key not in ("step", "loss")}
    # what is not a number serves nobody
    return means | {"serves": means["fast_gradient"] <= ALLOWED * means["plain_gradient"], "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=ROWS, help="of a step")
    parser.add_argument("--jobs", type=int, default=8, help="processes at once; nothing is timed here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", metavar="RECIPE", help="one alone, here")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if asked.one:
        print(json.dumps({"rows": one(asked.one, asked, device)}))
        return
    given = [f"--{name}={getattr(asked, name)}" for name in ("steps", "rows", "device", "precision")]
    with tempfile.TemporaryDirectory() as logs:
        jobs = [
            Job({"recipe": name}, [sys.executable, __file__, "--one", name, *given], Path(logs) / name)
            for name in asked.recipes
        ]
        found = work_through(
            jobs, asked.jobs, ended=lambda each: print(f"{each['recipe']}: {each['seconds']} s", file=sys.stderr)
        )
        failed = [f"{each['recipe']}: {each.get('error', each['status'])}" for each in found if each["status"]]
        if failed:
            raise SystemExit("; ".join(failed))
    results = {each["recipe"]: summary(each["rows"]) for each in found}
    print(f"{'recipe':20} {'loss, kernels':>14} {'plain':>8} {'gradient, kernels':>18} {'plain':>8}  from float32")
    for recipe, row in results.items():
        losses = f"{row['fast_loss']:14.5f} {row['plain_loss']:8.5f}"
        print(f"{recipe:20} {losses} {row['fast_gradient']:18.4f} {row['plain_gradient']:8.4f}")
    serving = [recipe for recipe, row in results.items() if row["serves"]]
    print(f"kernels are as near to float32 as plain bfloat16 in {len(serving)} of {len(results)} recipes")
    facts = {"steps": asked.steps, "rows": asked.rows, "depth": DEPTH, "width": WIDTH, "context": CONTEXT}
    facts |= machine_facts(device, torch.bfloat16) | {"sources": source_fingerprint(), "allowed": ALLOWED}
    result = facts | {"serves": len(serving) == len(results), "recipes": results}
    if asked.out:
        files.write_text(asked.out, json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
