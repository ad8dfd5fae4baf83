"""How far scores move with what should not matter: the batch they stand in, the way contexts are read, the precision.

    PYTHONPATH=. python3 benchmarks/scores.py RUN --requests requests.safetensors --contexts 200 --out scores.json

Requests are those of `maglev eval tasks --requests`; some contexts of them, drawn by a seed, are answered on recurrent
memories in every way: by single steps or by passes, in the batches of `maglev eval score` or each context alone, in
float32 and in bfloat16. Told are nats from single steps in float32, nats between the two batches, and of how many
contexts with several choices another one is the likeliest; and how many passes a token took, padding included, which
is what scoring costs. A table comes last, then one line of JSON.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

import maglev
from maglev import files
from maglev.bench.clock import machine_facts
from maglev.errors import RequestError
from maglev.evaluate.requests import Request, load_requests
from maglev.evaluate.scoring import READINGS, Limits, RecurrentScorer
from maglev.train.distributed import resolve_device

BATCHES = {"as usual": Limits(), "alone": Limits(1, 1)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def some_of(requests: Sequence[Request], contexts: int, seed: int) -> list[Request]:
    """All that is asked of so many contexts."""
    every = sorted({request.context for request in requests})
    chosen = set(random.Random(seed).sample(every, min(contexts, len(every))))
    return [request for request in requests if request.context in chosen]


def best_choices(requests: Sequence[Request], logprobs: Tensor) -> list[int]:
    """Of every context with several choices, the place of the likeliest one."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.context, []).append(index)
    return [max(own, key=lambda index: float(logprobs[index])) for own in groups.values() if len(own) > 1]


def apart(found: Tensor, expected: Tensor) -> dict[str, float]:
    distance = (found - expected).abs()
    return {"mean": float(distance.mean()), "largest": float(distance.max())}


def measure(run: Path, requests: Sequence[Request], device: torch.device) -> list[dict[str, Any]]:
    scores: dict[tuple[str, ...], Tensor] = {}
    passes: dict[tuple[str, ...], float] = {}
    for dtype, reading, batch in itertools.product(DTYPES, READINGS[::-1], BATCHES):
        lm = maglev.load(run, device=str(device), dtype=DTYPES[dtype])
        scorer = RecurrentScorer(lm, BATCHES[batch], reading)
        found = scorer.score(requests)
        passes[dtype, reading, batch] = round(scorer.effort.passes, 3)
        scores[dtype, reading, batch] = torch.tensor([score.logprob for score in found], dtype=torch.float64)
        print(f"{dtype}, {reading}, {batch}: done", file=sys.stderr, flush=True)
    exact = scores["float32", "step", "as usual"]
    right = best_choices(requests, exact)
    rows = []
    for (dtype, reading, batch), own in scores.items():
        usual, best = scores[dtype, reading, "as usual"], best_choices(requests, own)
        row = {"dtype": dtype, "reading": reading, "batch": batch, "from_exact": apart(own, exact)}
        row |= {"from_usual_batch": apart(own, usual), "choices": len(best)}
        row["passes_per_token"] = passes[dtype, reading, batch]
        row["other_choices"] = sum(mine != theirs for mine, theirs in zip(best, right, strict=True))
        row["other_than_usual_batch"] = sum(
            mine != theirs for mine, theirs in zip(best, best_choices(requests, usual), strict=True)
        )
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    heads = f"{'nats from exact':>22}{'other batch':>22}{'other choice':>16}{'passes':>8}"
    print(f"\n{'precision':10}{'reading':10}{'batch':10}{heads}")
    for row in rows:
        cells = [f"{row[key]['mean']:.2g}, {row[key]['largest']:.2g}" for key in ("from_exact", "from_usual_batch")]
        flips = f"{row['other_choices']}, {row['other_than_usual_batch']} of {row['choices']}"
        print(
            f"{row['dtype']:10}{row['reading']:10}{row['batch']:10}{cells[0]:>22}{cells[1]:>22}{flips:>16}"
            f"{row['passes_per_token']:8.2f}"
        )
    print("Nats: mean, largest. Exact: single steps in float32. Other choice: than exact, than in the usual batch.")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, or weights that come with maglev")
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the contexts that are drawn")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    try:
        asked = load_requests(given.requests)
        if given.contexts < 1:
            raise RequestError(f"--contexts is {given.contexts}; it must be at least 1")
        device = resolve_device(given.device, setting="--device")
        if maglev.load(given.run, device=str(device)).tokenizer.fingerprint != asked.tokenizer:
            raise RequestError(f"{given.requests} was built with another tokenizer; build requests with {given.run}")
    except RequestError as error:
        print(f"scores: {error}", file=sys.stderr)
        return 2
    requests = some_of(asked.requests, given.contexts, given.seed)
    facts = machine_facts(device, torch.float32) | {"run": str(given.run), "requests": len(requests)}
    del facts["dtype"]
    value = {"benchmark": "scores", **facts, "contexts": given.contexts, "rows": measure(given.run, requests, device)}
    if given.out:
        files.write_json(given.out, value)
    print_table(value["rows"])
    print(json.dumps(value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
