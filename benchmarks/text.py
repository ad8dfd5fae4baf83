"""Train recipes on one pass over a text and measure each by memory source, one after another on one device.

    python benchmarks/text.py --train TEXT/train-*.parquet --validation TEXT/validation-*.parquet

The setting is the one our first measurements used: depth 8, context 1024, W 256, 65,536 tokens per step. The rates of
the recipes are given for 524,288 tokens per step; RATES undoes that scaling. The last line of stdout is JSON.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import maglev
from maglev import files
from maglev.bench.lines import Lines
from maglev.data.loader import Loader
from maglev.data.prepare import prepare
from maglev.data.shards import TokenData, open_data
from maglev.evaluate.bpb import bits_per_byte
from maglev.evaluate.memories import sources_of
from maglev.evaluate.runs import load_objective
from maglev.recipes import RECIPES
from maglev.settings import parse_assignments
from maglev.train import launch

TOKENS_PER_STEP = 65_536
UNSCALED = (524_288 / TOKENS_PER_STEP) ** 0.5
RATES = {
    "optimizer.matrix_lr": 0.02 * UNSCALED,
    "optimizer.embedding_lr": 0.3 * UNSCALED,
    "optimizer.readout_lr": 0.004 * UNSCALED,
    "optimizer.gate_lr": 0.004 * UNSCALED,
    "optimizer.residual_scale_lr": 0.005 * UNSCALED,
    "optimizer.input_scale_lr": 0.02 * UNSCALED,
    "optimizer.weight_decay": 0.1 * (8 / 12) ** 2,
    "optimizer.warmup_steps": 20,
    "optimizer.final_lr_share": 0.02,
}


def settings_of(
    data: TokenData, seed: int, *, window: int, steps: int = 0, passes: int = 1, given: Sequence[str] = ()
) -> dict[str, Any]:
    """Of a run that goes over the text so many times, or takes so many steps; those given as KEY=VALUE come last."""
    steps = steps or passes * data.splits["train"].tokens // TOKENS_PER_STEP
    settings = RATES | {
        "model.context": 1024,
        "model.window": window,
        "train.tokens_per_step": TOKENS_PER_STEP,
        "train.steps": steps,
        # once, at the end: whether the loop holds
        "train.validate_every": max(1, steps),
        "train.checkpoint_every": 10**6,
        "train.seed": seed,
    }
    return settings | parse_assignments([*given])


def measure(recipe: str, seed: int, data: TokenData, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    run = work / f"{recipe}-{seed}"
    settings = settings_of(data, seed, window=arguments.window, steps=arguments.steps, given=arguments.set)
    summary = launch.train(recipe, data.folder, run, Lines(every=100), depth=arguments.depth, settings=settings)
    config, objective, step = load_objective(run, torch.device(arguments.device), Lines(every=100).say)
    loader = Loader(data, "validation", config.model.context, seed=0, shuffle=False)
    row: dict[str, Any] = {"recipe": recipe, "seed": seed, "window": config.model.window, "steps": step}
    row |= {"tokens": summary["tokens"], "train_seconds": round(summary["seconds"], 1)}
    for source in sources_of(objective):
        result = bits_per_byte(
            objective,
            loader,
            source,
            data.tokenizer.token_byte_counts(),
            passes=3,
            rows=arguments.rows,
            rows_per_pass=1024,
        )
        row[f"bpb_{source}"] = round(result.value, 5)
        row[f"by_position_{source}"] = [round(value, 4) for _, _, value in result.by_position]
    if not arguments.keep:
        shutil.rmtree(run)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs="+", required=True)
    parser.add_argument("--validation", required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), help="all of them unless given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--steps", type=int, default=0, help="0 is one pass over the text")
    parser.add_argument("--rows", type=int, default=0, help="validation rows, 0 is all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all recipes")
    parser.add_argument("--keep", type=Path, help="a folder where data and runs stay")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = arguments.keep or Path(name)
        prepare(arguments.train, work / "data", 8192, tokenizer=arguments.tokenizer, validation=arguments.validation)
        data = open_data(work / "data")
        rows = []
        for seed in arguments.seeds:
            for recipe in arguments.recipes:
                rows.append(measure(recipe, seed, data, arguments, work))
                shown = {key: value for key, value in rows[-1].items() if not key.startswith("by_position")}
                print(json.dumps(shown), flush=True)
                if arguments.out:
                    files.write_json(arguments.out, {"setting": describe(arguments), "rows": rows})
    print(json.dumps({"setting": describe(arguments), "rows": rows}))


def describe(arguments: argparse.Namespace) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    return {
        "depth": arguments.depth,
        "context": 1024,
        "window": arguments.window,
        "set": arguments.set,
        "rates": RATES,
        "maglev": maglev.__version__,
        "device": name,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
