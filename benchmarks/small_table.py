"""The small table: recipes and peers trained on one pass over a text, each measured by memory source.

    python benchmarks/small_table.py rows swa-ssss maglev-shared-0.1 "swa-ssss --passes=2" gated-deltanet \\
        --seeds 0 --jobs 3 --data DATA --text FINEWEB --requests REQUESTS --scores SCORES --out small-table.json
    python benchmarks/small_table.py aggregate small-table.json --scores SCORES --tokenizer DATA --data EVAL

DATA and FINEWEB are folders by `maglev data prepare`, REQUESTS is a file by `maglev eval tasks --requests`; with it a
row also answers the tasks, and `aggregate`, where lm_eval is installed, turns the answers into scores. Depth 8, context
1024, W 256 and the rates are those of `text.py`; rows of one seed see the same rows of text in the same order. A row
may have options and settings of its own, as "swa-ssss --passes=2 --set=train.recompute=full"; names are recipes,
peers (`peers.py`) or `levers` (`levers.py`), for what is being tried. Each row is a process, some at a time on one
device, and goes into the JSON file as it ends: `maglev table` makes table and figures of that. A row that fails is told
and does not stop the others.
"""

import argparse
import hashlib
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import levers
import peers
import torch
from text import settings_of

import maglev
from maglev import files
from maglev.__main__ import main as verbs
from maglev.bench.clock import machine_facts
from maglev.bench.jobs import Job, work_through
from maglev.bench.lines import Lines
from maglev.bench.sources import source_fingerprint
from maglev.cli.output import finite
from maglev.config import RunConfig
from maglev.data.loader import Loader
from maglev.data.shards import open_data
from maglev.errors import RequestError, WorkError
from maglev.evaluate.bpb import bits_per_byte
from maglev.evaluate.requests import load_requests, load_scores, save_scores
from maglev.evaluate.scoring import PassScorer
from maglev.evaluate.table_facts import (
    TRAINING,
    Facts,
    facts_of,
    load_facts,
    same_settings,
    save_facts,
    training_of,
    without_places,
)
from maglev.model.accounting import prefiller_parameters
from maglev.recipes import RECIPES, run_config
from maglev.runs import read_config, read_metrics
from maglev.settings import parse_assignments, setting_values
from maglev.train.distributed import Ranks, resolve_device
from maglev.train.setup import compute_dtype
from maglev.train.signals import interruption
from maglev.train.task import Text

LONGEST_NAME = 100
# of every row, unless it is told otherwise
USUAL = {"depth": 8, "window": 256, "passes": 1}
# stepping keeps little of each row and wants many; whole passes keep more
STEPPED_ROWS, PASSED_ROWS = 1024, 64


def row(arguments: argparse.Namespace) -> int:
    """One row, in this process."""
    name = arguments.name or f"{arguments.model}-{arguments.seed}"
    check_inputs(arguments, [arguments.model])
    device = resolve_device(arguments.device, setting="--device")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        run = (arguments.keep or Path(folder)) / name
        measure = measure_peer if arguments.model in peers.PEERS else measure_recipe
        config, facts = measure(arguments, run, device)
    # what `row_seconds` covers
    facts["answered_tasks"] = arguments.requests is not None
    code = {"maglev": maglev.__version__, "sources": source_fingerprint()}
    facts["machine"] = machine_facts(device, compute_dtype(config, device)) | code
    print(json.dumps(facts))
    return 0


def check_inputs(arguments: argparse.Namespace, models: Sequence[str]) -> None:
    """All that is read after training, before it: minutes of it must not end in a missing file."""
    parse_assignments(arguments.set)
    if "levers" in models:
        levers.register()
    for model in models:
        if model not in RECIPES and model not in peers.PEERS:
            raise RequestError(f"no recipe or peer {model!r}; known: {', '.join([*RECIPES, *peers.PEERS])}")
    tokenizer = open_data(arguments.data).tokenizer.fingerprint
    found = {text: open_data(text).tokenizer.fingerprint for text in arguments.text}
    if arguments.requests:
        found[arguments.requests] = load_requests(arguments.requests).tokenizer
    for place, fingerprint in found.items():
        if fingerprint != tokenizer:
            raise RequestError(f"{place} was made with another tokenizer than {arguments.data}; make it with that one")


def measure_recipe(arguments: argparse.Namespace, run: Path, device: torch.device) -> tuple[RunConfig, Facts]:
    """By the verbs, so that what is measured is what a user gets."""
    settings = settings_for(arguments) | {"train.device": device}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    # what --keep holds of an earlier try is gone on with
    words = ["--data", arguments.data, "--out", run, "--depth", arguments.depth, "--resume"]
    verb("train", arguments.model, *words, *given)
    config = read_config(run)
    for text in (arguments.data, *arguments.text):
        for source in sources(config):
            rows = STEPPED_ROWS if source == "recurrent" and config.model.memory != "none" else PASSED_ROWS
            words = ["--data", text, "--memory", source, "--rows-per-pass", rows, "--device", device]
            verb("eval", "bpb", run, *words)
    facts = facts_of(run)
    if arguments.requests and not diverged(facts["bpb"]):
        out = arguments.scores / f"{run.name}.json"
        verb("eval", "score", run, "--requests", arguments.requests, "--out", out, "--device", device)
    return config, facts


def diverged(bpb: Sequence[Facts]) -> bool:
    """Such a run has no numbers, and is a row all the same."""
    values = [each[f"bpb_{each['memory']}"] for each in bpb]
    return any(value is None or not math.isfinite(value) for value in values)


def verb(*words: object) -> None:
    status = verbs([str(word) for word in words])
    if status:
        sys.exit(status)


def sources(config: RunConfig) -> tuple[str, ...]:
    if config.model.memory == "none":
        return ("recurrent",)
    return ("recurrent", "lifted", "refined") if prefiller_parameters(config) else ("recurrent", "refined")


def settings_for(arguments: argparse.Namespace) -> dict[str, Any]:
    data, passes = open_data(arguments.data), arguments.passes
    return settings_of(data, arguments.seed, window=arguments.window, passes=passes, given=arguments.set)


def measure_peer(arguments: argparse.Namespace, run: Path, device: torch.device) -> tuple[RunConfig, Facts]:
    """By our loop and measures; a peer has no configuration of ours, so there is no run that verbs could open."""
    data = open_data(arguments.data)
    settings = settings_for(arguments) | {"model.vocab_size": data.vocab_size}
    config = replace(run_config("swa-ssss", arguments.depth, settings), recipe=arguments.model)
    if device.type == "cuda":
        peers.check_or_fail(arguments.model, device)
    lines = Lines(every=100)
    trainer = peers.PeerTrainer(config, Text(data), run, Ranks(0, 1, 0, device), lines)
    trainer.start()
    with interruption() as noted:
        if number := trainer.train(noted):
            sys.exit(128 + number)
    trainer.close()
    objective, step = trainer.objective.eval(), trainer.progress.step
    about = {"recipe": arguments.model, "step": step, "weights": "plain"}
    found = []
    for text in (arguments.data, *arguments.text):
        loader = Loader(open_data(text), "validation", config.model.context, seed=0, shuffle=False)
        counts = data.tokenizer.token_byte_counts()
        result = bits_per_byte(objective, loader, "recurrent", counts, rows_per_pass=PASSED_ROWS, data=config.data)
        found.append(about | {"split": "validation", "data": text.resolve().name} | result.to_dict())
        lines.say(f"{text}: {result.value:.4f} bits per byte, recurrent")
    if arguments.requests and not diverged(found):
        asked = load_requests(arguments.requests)
        scores = PassScorer(objective, "recurrent", 1).score(asked.requests)
        about |= {"run": run.name, "seed": arguments.seed, "memory": "recurrent", "passes": None}
        about["dtype"] = str(objective.decoder.compute_dtype).removeprefix("torch.")
        save_scores(arguments.scores / f"{run.name}.json", asked, scores, about)
    return config, peer_facts(config, trainer, found)


def peer_facts(config: RunConfig, trainer: peers.PeerTrainer, bpb: list[Facts]) -> Facts:
    """As those of a run; of the settings those that a peer shares with ours."""
    decoder = trainer.objective.decoder
    costs = peers.costs(decoder, peers.PEERS[config.recipe])
    kept = ("model.width", "model.vocab_size", "model.context", *TRAINING)
    values = {
        key: value
        for key, value in setting_values(config).items()
        if key in kept or key.startswith(("optimizer.", "data."))
    }
    tokens = trainer.steps * config.train.tokens_per_step
    rows = [line for line in read_metrics(trainer.run) if line.get("kind") == "train"]
    return {
        "run": trainer.run.name,
        "recipe": config.recipe,
        "seed": config.train.seed,
        "settings": values | {"model.depth": costs["layers"], "train.steps": trainer.steps},
        "parameters": costs["parameters"],
        "tokens": tokens,
        "training_flops": costs["training_flops_per_token"] * tokens,
        "state_bytes": costs["state_bytes"],
        "bpb": bpb,
        "tasks": [],
        "recall": [],
    } | training_of(rows)


def rows(arguments: argparse.Namespace) -> int:
    if not all(words.split() for words in arguments.rows):
        raise RequestError("a row is empty; name a recipe or a peer, with its options behind it")
    check_inputs(arguments, [words.split()[0] for words in arguments.rows])
    if arguments.out.exists():
        load_facts(arguments.out)
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.keep or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        jobs = [job_of(words, seed, arguments, logs) for seed in arguments.seeds for words in arguments.rows]
        results = work_through(
            jobs,
            max(1, arguments.jobs),
            stagger=arguments.stagger,
            limit=arguments.limit,
            ended=partial(add_row, out=arguments.out, logs=logs, at_a_time=arguments.jobs),
        )
    told = [{key: found[key] for key in ("row", "status", "seconds", "error") if key in found} for found in results]
    print(json.dumps({"rows": told, "out": str(arguments.out)}))
    return 1 if any(found["status"] for found in results) else 0


def job_of(words: str, seed: int, arguments: argparse.Namespace, logs: Path) -> Job:
    model, *own = words.split()
    # what all rows are given is part of a row too: else one with other settings would take another's place
    common = [f"{option}-{value}" for option, usual in USUAL.items() if (value := getattr(arguments, option)) != usual]
    told = " ".join([words, *common, *arguments.set, str(seed)])
    name = re.sub(r"[^A-Za-z0-9.]+", "-", told)
    if "=" in told.replace("--passes=", ""):
        # what was cut away or replaced may be all that two of them differ in
        name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
    command = [sys.executable, str(Path(__file__).resolve()), "row", model, "--seed", str(seed), "--name", name]
    for option in ("data", "requests", "scores", "depth", "window", "passes", "device", "keep"):
        value = getattr(arguments, option)
        command += [] if value is None else [f"--{option}", str(value)]
    for option in ("text", "set"):
        command += [word for value in getattr(arguments, option) for word in (f"--{option}", str(value))]
    # the last of two options counts
    return Job({"row": f"{words}, seed {seed}", "name": name}, [*command, *own], logs / name)


def add_row(found: dict[str, Any], out: Path, logs: Path, at_a_time: int = 1) -> None:
    """With what the row took from start to end, earlier tries included; rows that run beside it make it slower."""
    spent = logs / f"{found['name']}.seconds"
    seconds = round(found["seconds"] + (float(spent.read_text()) if spent.exists() else 0.0), 1)
    if "error" in found:
        files.write_text(spent, str(seconds))
        print(f"{found['row']}: {found['error']}, {seconds} s", flush=True)
        return
    facts = finite({key: value for key, value in found.items() if key not in ("row", "name", "status", "seconds")})
    put_run(out, facts | {"row_seconds": seconds, "rows_at_a_time": at_a_time})
    spent.unlink(missing_ok=True)
    shown = ", ".join(
        f"{each['data']} {each['memory']} {math.nan if value is None else value:.4f}"
        for each in facts["bpb"]
        for value in [each[f"bpb_{each['memory']}"]]
    )
    rate = f"{found['tokens_per_second']:,.0f} tokens/s" if found["tokens_per_second"] else ""
    print(f"{found['row']}: {shown}; {rate}, {seconds} s", flush=True)


def put_run(path: Path, facts: Facts) -> None:
    """The same run again takes the old one's place; fewer tokens first, for differences are to the first SWA."""
    kept = load_facts(path) if path.is_file() else []
    kept = [run for run in kept if run["run"] != facts["run"]]
    save_facts(path, sorted([*kept, facts], key=lambda run: (run["tokens"], run["seed"])))


def aggregate(arguments: argparse.Namespace) -> int:
    """Answers to scores, by the harness; rows that have them already are left as they are."""
    from maglev.cli.tasks import aggregate as aggregated

    found = {run["run"]: run for run in load_facts(arguments.results)}
    paths = {path.stem: path for path in sorted(arguments.scores.glob("*.json"))}
    if not paths:
        raise RequestError(f"{arguments.scores} holds no scores; name the folder that 'rows --scores' wrote")
    wanted = {name: path for name, path in paths.items() if name in found and not found[name]["tasks"]}
    for name, path in paths.items():
        if name not in found:
            print(f"{path}: no row {name!r} in {arguments.results}; left out", flush=True)
    # all of them before the first, which takes minutes
    for name, path in wanted.items():
        check_answers(path, found[name])
    for name, path in wanted.items():
        with redirect_stdout(sys.stderr):
            value = aggregated(arguments.tokenizer, path, arguments.data)
        put_run(arguments.results, found[name] | {"tasks": [without_places(value)]})
        average = value.get("average_recurrent")
        shown = f"{len(value['tasks'])} tasks" if average is None else f"average {average:.4f}"
        print(f"{name}: {shown}, recurrent", flush=True)
    return 0


def check_answers(path: Path, run: Facts) -> None:
    """Whether they are this row's: the folder may hold those of an earlier run of the same name."""
    scores = load_scores(path)
    if scores.setting.get("limit") is not None:
        raise RequestError(f"{path} answers the first items of each task alone; build requests without --limit")
    own = run["recipe"], run["seed"], run["settings"]["train.steps"]
    theirs = tuple(scores.model.get(key) for key in ("recipe", "seed", "step"))
    if theirs != own or not same_settings(scores.model.get("settings"), run["settings"]):
        raise RequestError(
            f"{path} is of {theirs[0]}, seed {theirs[1]}, step {theirs[2]}, and the row {run['run']} of {own[0]}, seed "
            f"{own[1]}, step {own[2]} or of other settings; make the row again with --requests"
        )


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs_of = parser.add_subparsers(required=True, dest="verb")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--data", type=Path, required=True, help="prepared text to train on, with its validation")
    common.add_argument("--text", type=Path, action="append", default=[], help="another one to measure on")
    common.add_argument("--requests", type=Path, help="what tasks ask, to be answered too")
    common.add_argument("--scores", type=Path, default=Path("scores"), help="the folder for the answers")
    common.add_argument("--depth", type=int, default=USUAL["depth"])
    common.add_argument("--window", type=int, default=USUAL["window"])
    common.add_argument("--passes", type=int, default=USUAL["passes"], help="over the text")
    common.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    common.add_argument("--device", default="auto")
    common.add_argument("--keep", type=Path, metavar="DIR", help="where runs and logs stay; else they are removed")
    many = verbs_of.add_parser("rows", parents=[common], help="rows as processes, some at a time")
    many.add_argument("rows", nargs="+", metavar="'NAME [OPTION]...'")
    many.add_argument("--seeds", nargs="+", type=int, default=[0])
    many.add_argument("--jobs", type=int, default=1, help="processes at a time")
    many.add_argument("--stagger", type=float, default=0.0, help="seconds between two starts")
    many.add_argument("--limit", type=float, default=0.0, help="seconds after which what is left is stopped")
    many.add_argument("--out", type=Path, default=Path("results/small-table.json"))
    many.set_defaults(work=rows)
    one = verbs_of.add_parser("row", parents=[common], help="one row in this process; its facts on stdout")
    one.add_argument("model", metavar="NAME")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--name")
    one.set_defaults(work=row)
    last = verbs_of.add_parser("aggregate", help="answers to scores, where lm_eval is installed")
    last.add_argument("results", type=Path)
    last.add_argument("--scores", type=Path, default=Path("scores"))
    last.add_argument("--tokenizer", type=Path, required=True, metavar="DIR", help="prepared data")
    last.add_argument("--data", type=Path, required=True, help="files of the tasks, as the requests were built with")
    last.set_defaults(work=aggregate)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse(words)
    try:
        return int(arguments.work(arguments))
    except (RequestError, WorkError) as error:
        print(f"small_table: {error}", file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1


if __name__ == "__main__":
    sys.exit(main())
