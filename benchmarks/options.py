"""Train every option that the paper leaves open and set them side by side: how memory is injected and how old it
is, how strong Q is, what it shares with P, a frozen pretrained Q, an SWA as P's start.

    PYTHONPATH=. python3 benchmarks/options.py --steps 2000 --out options.json            # on the recall task
    PYTHONPATH=. python3 benchmarks/options.py --data DATA --depth 8 --window 256 --steps 700    # on a prepared text
    PYTHONPATH=. python3 benchmarks/options.py --recipe maglev-closed                        # where the loop is closed

Each option is a run of the one loop, validated at its end: recurrent quality (recall beyond the plain reach, or bits
per byte), the same lifted, at what mean rate 16 steps of the recurrence shrink a disturbance, and what is left of it
after 1 to 16 of them. Beside it parameters, state bytes in bfloat16, training tokens/s, and tokens/s of single steps in
plain PyTorch (from a CUDA graph on a GPU) and, where there are some, by kernels. The teacher is `--teacher FOLDER`, or
a small Llama that is made here and trained for as many steps on the same rows. `--keep DIR` keeps runs, and takes up
what is there. An option that fails is named in the table and does not stop the others. Rows that `--out` already has
from the same setting stay there, so that options can be
measured some at a time. With `--jobs N` each is a process of its own, N of them at a time, and their tokens/s are those
of models that share a device; rows say how many did. `--timed N` takes training's tokens/s from N steps of every
option that are run for that alone, where the runs of `--keep` were trained beside other work. A table comes last, then
one line of JSON.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev import files
from maglev.bench.clock import graphed, seconds
from maglev.bench.decode import fast_work, plain_work
from maglev.bench.jobs import Job, work_through
from maglev.bench.lines import Lines
from maglev.bench.models import full_state
from maglev.cli.recall import default_settings, rollouts_of
from maglev.data.recall import RecallConfig
from maglev.data.shards import open_data
from maglev.errors import RequestError
from maglev.evaluate.runs import load_objective
from maglev.inference.fast_step import FastDecoder
from maglev.model.accounting import describe
from maglev.model.decoder import Decoder
from maglev.model_config import INJECTIONS
from maglev.runs import read_config, read_metrics
from maglev.train import launch
from maglev.train.param_groups import REFERENCE_TOKENS_PER_STEP
from maglev.train.task import Recall, Task, Text

SWA, SEPARATE, CLOSED = "swa-ssss", "maglev-separate-0.1", "maglev-closed"
TOGETHER = ("shared_kv+slots", "shared_kv+layer_residual", "shared_kv+cross_attention")
# with memories of a window ago
LATER = ("shared_kv", "shared_kv+residual", "shared_kv+layer_residual")
QUICK = {"depth": 2, "context": 64, "window": 8, "steps": 3, "rows": 4, "tokens_per_step": 256}
COLUMNS = ("recurrent", "lifted", "contraction_step", "deployed", "prefiller", "state_bytes")
STABILITY = ("contraction_pass", "contraction_step", "disturbance_left", "disturbance_steps", "memory_share")
RATES = ("train_tokens_per_s", "step_tokens_per_s", "fast_tokens_per_s")


Ended = Callable[[dict[str, Any]], None]


class Option(NamedTuple):
    """`needs` is what has to be made first, and the key that takes its folder."""

    question: str
    recipe: str
    settings: dict[str, Any]
    needs: tuple[str, str] | None = None


def all_options(recipe: str, depth: int, window: int) -> dict[str, Option]:
    """Rows about Q are of a recipe that takes its settings."""
    with_q = recipe if recipe == CLOSED else SEPARATE
    found = {"swa": Option("baseline", SWA, {})}
    for injection in (*INJECTIONS, *TOGETHER):
        found[f"injection {injection}"] = Option("injection", recipe, {"model.injection": injection})
    for injection in LATER:
        settings = {"model.injection": injection, "model.delay": window}
        found[f"delay {injection}"] = Option("injection", recipe, settings)
    half, width = max(1, depth // 2), 64 * depth
    for name, settings in {
        "Q as P": {},
        "Q sliding": {"pattern": "SSSS"},
        "Q full": {"pattern": "L"},
        "Q half as deep": {"depth": half},
        "Q twice as deep": {"depth": 2 * depth},
        "Q half as wide": {"width": max(64, 64 * (depth // 2))},
        "Q twice as wide": {"width": 2 * width},
    }.items():
        keys = {f"objective.prefiller_{key}": value for key, value in settings.items()}
        found[name] = Option("strength", with_q, {"objective.sharing": "embedding"} | keys)
    first, last = f"0-{half - 1}", f"{depth - half}-{depth - 1}"
    for words in ("none", "embedding,attention", "embedding,mlp", f"embedding,{first}", f"embedding,{last}"):
        found[f"sharing {words}"] = Option("sharing", with_q, {"objective.sharing": words})
    found["sharing all"] = Option("sharing", with_q, {"objective.sharing": "embedding,attention,mlp"})
    found["teacher"] = Option("teacher", with_q, {}, ("teacher", "objective.prefiller_from"))
    for injection in ("shared_kv", "residual"):
        start = Option("start", recipe, {"model.injection": injection}, ("swa", "train.init_from"))
        found[f"from swa {injection}"] = start
    return found


class Bench:
    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments, self.work = arguments, work
        self.task: Task = Text(open_data(arguments.data)) if arguments.data else Recall(RecallConfig())
        self.options = all_options(arguments.recipe, arguments.depth, arguments.window)

    def settings(self, seed: int) -> dict[str, Any]:
        """Those of `maglev eval recall`; a text takes rates as its recipes give them, at whatever tokens per step."""
        given = self.arguments
        own = default_settings(given.context, given.window, given.steps, seed, given.tokens_per_step)
        if given.data:
            own = {key: value for key, value in own.items() if not key.startswith("optimizer.")}
            whole = (REFERENCE_TOKENS_PER_STEP / own["train.tokens_per_step"]) ** 0.5
            own |= {"optimizer.matrix_lr": 0.02 * whole, "optimizer.embedding_lr": 0.3 * whole}
            own |= {"optimizer.readout_lr": 0.004 * whole, "optimizer.gate_lr": 0.004 * whole}
            own |= {"optimizer.input_scale_lr": 0.02 * whole, "optimizer.warmup_steps": 20}
        own |= {"train.validate_every": given.steps, "train.validation_rows": given.rows, "train.device": given.device}
        own |= {"train.log_every": 1} if given.quick else {}
        return own | dict(item.split("=", 1) for item in given.set)

    def rollouts(self, recipe: str) -> dict[str, Any]:
        """On the recall task as long as `maglev eval recall` has them."""
        given = self.arguments
        return {} if given.data else rollouts_of(recipe, given.depth, given.window, given.context)

    def run_of(self, name: str, seed: int, timed: int = 0) -> Path:
        """The folder of an option that was trained to its end, now or before, or for so many steps that are timed."""
        run = self.work / f"{name.replace(' ', '-').replace(',', '+')}-{seed}{'-timed' if timed else ''}"
        option = self.options[name]
        settings = self.rollouts(option.recipe) | self.settings(seed) | option.settings
        if timed:
            shutil.rmtree(run, ignore_errors=True)
            settings |= {"train.steps": timed, "train.log_every": 1, "train.validate_every": 0}
        if option.needs is not None:
            needed, key = option.needs
            folder = self.teacher(seed) if needed == "teacher" else self.run_of(needed, seed)
            settings[key] = str(folder)
        torch._dynamo.reset()
        depth, watch = self.arguments.depth, Lines(every=100)
        watch.say(f"{name}, seed {seed}")
        launch.train(option.recipe, self.task, run, watch, depth=depth, settings=settings, resume=run.exists())
        return run

    def teacher(self, seed: int) -> Path:
        """One more than the decoder's heads, so that it is of another width."""
        if self.arguments.teacher:
            return self.arguments.teacher
        from transformers import LlamaConfig, LlamaForCausalLM

        folder, given = self.work / f"llama-{seed}", self.arguments
        if folder.exists():
            return folder
        torch.manual_seed(seed)
        shape = {"hidden_size": 64 * (given.depth + 1), "num_hidden_layers": given.depth}
        shape |= {"num_attention_heads": given.depth + 1, "intermediate_size": 4 * 64 * given.depth}
        shape |= {"max_position_embeddings": given.context, "vocab_size": self.task.vocab_size}
        model = LlamaForCausalLM(LlamaConfig(**shape)).to(given.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        rows = self.task.rows(given.context, seed)
        count = int(self.settings(seed)["train.tokens_per_step"]) // given.context
        fast = torch.autocast("cuda", torch.bfloat16) if given.device == "cuda" else contextlib.nullcontext()
        for step in range(given.steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min((step + 1) / 20, 1.0, 2 * (1 - step / given.steps))
            batch = rows.batch(range(step * count, (step + 1) * count))
            tokens, targets = (
                torch.from_numpy(array).to(given.device).long() for array in (batch.tokens, batch.targets)
            )
            with fast:
                logits = model(tokens, use_cache=False).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.clamp_min(-1).flatten(), ignore_index=-1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            Lines(every=100).step(step + 1, given.steps, f"teacher, loss {loss.item():.4f}")
        model.save_pretrained(folder)
        self.task.save(folder)
        return folder

    def measure(self, name: str, seed: int) -> dict[str, Any]:
        run = self.run_of(name, seed)
        option, told = self.options[name], describe(read_config(run))
        rows = read_metrics(run)
        timed = read_metrics(self.run_of(name, seed, self.arguments.timed)) if self.arguments.timed else rows
        rates = [row["tokens_per_second"] for row in timed if row["kind"] == "train"]
        (validation,) = [row for row in rows if row["kind"] == "validation"][-1:]
        metric = self.task.validation(self.arguments.context, 1).metric
        row = {"option": name, "question": option.question, "recipe": option.recipe, "seed": seed, "metric": metric}
        for source in ("recurrent", "lifted", "refined"):
            row[source] = validation.get(f"{metric}_{source}")
        row |= {key: validation.get(key) for key in STABILITY}
        row |= {key: told["parameters"][key] for key in ("deployed", "prefiller")}
        row |= {"state_bytes": told["state_bytes"]["bfloat16"], "training_flops": told["flops_per_token"]["training"]}
        # the first steps compile
        row["train_tokens_per_s"] = round(statistics.median(rates[len(rates) // 2 :]))
        return row | self.step_rates(run)

    def step_rates(self, run: Path) -> dict[str, Any]:
        """Of one sequence with full rings, readout included."""
        device = torch.device(self.arguments.device)
        _, objective, _ = load_objective(run, device, Lines(every=100).say, with_prefiller=False)
        precision = torch.bfloat16 if device.type == "cuda" else torch.float32
        decoder: Decoder = objective.decoder.to(precision).requires_grad_(False)
        calls, token = 2 if self.arguments.quick else 256, torch.zeros(1, dtype=torch.int64, device=device)
        with torch.inference_mode():
            plain = graphed(plain_work(decoder, full_state(decoder, 1), token), device)
            found: dict[str, Any] = {"step_tokens_per_s": round(1 / seconds(plain, device, calls, 3))}
            if decoder.config.has_kernels and device.type == "cuda":
                fast = graphed(fast_work(FastDecoder(decoder), full_state(decoder, 1), token), device)
                found["fast_tokens_per_s"] = round(1 / seconds(fast, device, calls, 3))
        return found


def print_table(rows: list[dict[str, Any]]) -> None:
    width = max(len(row["option"]) for row in rows)
    names = {"contraction_step": "mean rate", "train_tokens_per_s": "train/s", "step_tokens_per_s": "step/s"}
    names |= {"fast_tokens_per_s": "fast/s", "state_bytes": "state"}
    heads = [names.get(column, column) for column in COLUMNS + RATES]
    print(f"\n{'option':{width}} seed" + "".join(f"{head:>11}" for head in heads))
    for row in rows:
        if "error" in row:
            print(f"{row['option']:{width}} {row['seed']:4} failed: {row['error']}")
            continue
        cells = [row.get(column) for column in COLUMNS + RATES]
        shown = "".join(
            f"{'-' if cell is None else f'{cell:.4f}' if isinstance(cell, float) else f'{cell:,}':>11}"
            for cell in cells
        )
        print(f"{row['option']:{width}} {row['seed']:4}{shown}")


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", nargs="+", metavar="NAME", help="some of them, by the beginning of their names")
    about = f"of all rows if {CLOSED}, else of those that are not about Q"
    parser.add_argument("--recipe", default="maglev-shared-0.1", help=about)
    parser.add_argument("--data", type=Path, help="a prepared text; without it the recall task")
    parser.add_argument("--teacher", type=Path, help="a Hugging Face folder with the task's tokenizer")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    for name, number in {"depth": 4, "context": 1024, "window": 16, "steps": 2000, "rows": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--tokens-per-step", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all options")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="options at a time")
    parser.add_argument("--timed", type=int, default=0, metavar="STEPS", help="run these once more, for tokens/s")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a few tiny steps of each: shows that they run")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which no further option is begun")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where runs stay; else they are removed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    for name, value in QUICK.items() if arguments.quick else ():
        setattr(arguments, name, value)
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    began = time.monotonic()
    before, rows = rows_before(arguments), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        work = arguments.keep or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(arguments, work)
        wanted = [
            option
            for option in bench.options
            if not arguments.options or any(option.startswith(start) for start in arguments.options)
        ]
        if not wanted:
            raise RequestError(f"no option begins with {arguments.options}; known: {', '.join(bench.options)}")
        if arguments.one:
            print(json.dumps(bench.measure(arguments.one, arguments.seeds[0])))
            return 0

        def ended(row: dict[str, Any]) -> None:
            rows.append(row)
            if arguments.out:
                files.write_json(arguments.out, {"setting": setting(arguments), "rows": together(before, rows)})

        pairs = [(option, seed) for seed in arguments.seeds for option in wanted]
        if arguments.jobs > 1:
            side_by_side(bench, pairs, began, ended, words)
        else:
            one_by_one(bench, pairs, began, ended)
    print_table(rows)
    taken = round(time.monotonic() - began, 1)
    print(json.dumps({"setting": setting(arguments), "rows": rows, "seconds": taken}))
    return 1 if any("error" in row for row in rows) else 0


def one_by_one(bench: Bench, pairs: Sequence[tuple[str, int]], began: float, ended: Ended) -> None:
    limit = bench.arguments.limit
    for option, seed in pairs:
        if limit and time.monotonic() - began > limit:
            ended({"option": option, "seed": seed, "error": "there was no time left for it"})
            continue
        try:
            ended(bench.measure(option, seed) | {"at_a_time": 1})
        except Exception as error:  # whatever it is, the others go on, and the table tells
            line = (str(error).splitlines() or [""])[0]
            ended({"option": option, "seed": seed, "error": f"{type(error).__name__}: {line}"})


def side_by_side(
    bench: Bench, pairs: Sequence[tuple[str, int]], began: float, ended: Ended, words: list[str] | None
) -> None:
    """What others need is made before them."""
    given = bench.arguments
    command = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if words is None else words)]
    made = [(option, seed) for option, seed in pairs if bench.options[option].needs is None]
    later = [pair for pair in pairs if pair not in made]
    # the teacher is of one option alone, and made with it
    needed = {(option.needs[0], seed) for name, seed in later if (option := bench.options[name]).needs}
    made += sorted(pair for pair in needed if pair[0] in bench.options and pair not in made)
    for some in (made, later):
        jobs = []
        for option, seed in some:
            own = ["--keep", str(bench.work), "--one", option, "--seeds", str(seed)]
            stem = bench.work / f"{option.replace(' ', '-').replace(',', '+')}-{seed}-job"
            jobs.append(Job({"option": option, "seed": seed, "at_a_time": given.jobs}, [*command, *own], stem))
        left = max(1.0, given.limit - (time.monotonic() - began)) if given.limit else 0.0
        work_through(jobs, given.jobs, stagger=1.0, limit=left, ended=lambda row: ended(without_status(row)))


def without_status(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("status", "seconds")}


def rows_before(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that `--out` has, of the same setting."""
    if arguments.out is None or not arguments.out.exists():
        return []
    told = json.loads(arguments.out.read_bytes())
    theirs, ours = (
        {key: value for key, value in each.items() if key not in ("options", "seeds", "limit", "jobs", "timed", "one")}
        for each in (told["setting"], json.loads(json.dumps(setting(arguments))))
    )
    if theirs != ours:
        other = [key for key in ours if theirs.get(key) != ours[key]]
        raise RequestError(f"{arguments.out} has rows of another setting ({', '.join(other)}); choose another --out")
    return list(told["rows"])


def together(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of each option and seed, the newest that did not fail."""
    found = {(row["option"], row["seed"]): row for row in before}
    for row in rows:
        key = row["option"], row["seed"]
        if "error" not in row or "error" in found.get(key, row):
            found[key] = row
    return list(found.values())


def setting(arguments: argparse.Namespace) -> dict[str, Any]:
    told = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
    return {key: value for key, value in told.items() if key not in ("out", "keep", "one")} | {
        "device_name": name,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RequestError as error:
        sys.exit(f"options: {error}")
