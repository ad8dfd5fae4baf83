"""Train recipes on the recall task, several at a time on one device, and measure each in closed loop.

    PYTHONPATH=. python3 benchmarks/recall.py swa-ssss "maglev-shared-0.1 objective.consistency_weight=0.5" \\
        --seeds 0 1 2 --jobs 4 --steps 2000 --out recall.json

An experiment is a recipe with settings and options of its own, as in "lrt-ssss objective.passes=3 --pairs=8
--rates=0.5"; `--settings` and the options below hold for all of them. Each is a process that runs
`maglev eval recall`, so what is measured is what a user gets; the recipe `levers` is that of `levers.py`. One that
fails is named in the table and does not stop the others; `--keep DIR` keeps runs and logs. `--plot` draws recall by
distance, `--cost-plot` recall against the FLOPs of training, of all rows in `--out`: an experiment with several
`--steps` is a curve there. A table comes last, then one line of JSON; `cost` is that of a step, in those of the paper's
objective at the same size.

What costs, at the default size. Measured on one CPU core that others used too: 64 rows are made in 3 to 5 ms, serially
before every step; a step of the decoder takes 3 ms for 1 row, 14 for 64, 52 for 256, so its launches alone are some
3 ms; forward and backward go at 2,100 (SWA), 900 (Maglev) and 580 (LRT) tokens/s, so that a CPU is for toy sizes. What
follows for a GPU, and was not measured: it waits for the host in every single process, and two or more at a time fill
the gaps. Processes share the compiler's cache on disk, but those that start together all compile: `--stagger` seconds
apart the first one's kernels are there for the others.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev import files
from maglev.bench.jobs import Job, work_through
from maglev.cli.output import check_place
from maglev.errors import RequestError
from maglev.evaluate.recall_results import add_rows, draw_costs, draw_rows, read_rows
from maglev.plots import check_plot

# has one recipe more
LEVERS = Path(__file__).resolve().with_name("levers.py")


def experiment(words: str, seed: int, arguments: argparse.Namespace, number: int, work: Path) -> Job:
    recipe, *own = words.split()
    run = work / f"{number:03d}-{recipe}-seed{seed}"
    verbs = [str(LEVERS)] if recipe == "levers" else ["-m", "maglev"]
    command = [sys.executable, *verbs, "eval", "recall", recipe, "--json", "--out", str(run)]
    command += ["--seed", str(seed)]
    passed_on = ("steps", "depth", "window", "context", "pairs", "variant", "data", "query_share", "spread", "rows")
    for name in passed_on:
        value = getattr(arguments, name)
        command += [] if value is None else ["--" + name.replace("_", "-"), str(value)]
    command += ["--keys", str(arguments.keys), "--values", str(arguments.values), "--device", arguments.device]
    settings = [*arguments.settings, *(word for word in own if not word.startswith("-"))]
    command += [word for setting in settings for word in ("--set", setting)]
    # the last of two options counts
    command += [word for word in own if word.startswith("-")]
    return Job({"experiment": words, "seed": seed, "rows": []}, command, run)


def tell(found: dict[str, Any], out: Path | None) -> None:
    state = found.get("error") or f"recurrent {found['recall_recurrent']:.3f} beyond 1 x"
    print(f"{found['experiment']} seed {found['seed']}: {state}, {found['seconds']} s", flush=True)
    if out is not None and found["rows"]:
        add_rows(out, found["rows"])


def print_table(results: list[dict[str, Any]]) -> None:
    distances = list(dict.fromkeys(row["distance"] for result in results for row in result["rows"]))
    distances.sort(key=lambda label: int(label.split("-")[0]))
    width = max(len(result["experiment"]) for result in results)
    heads = "".join(f"{label:>7}" for label in distances)
    print(f"\n{'experiment':{width}} seed memory    {heads}    cost seconds")
    for result in results:
        head = f"{result['experiment']:{width}} {result['seed']:4}"
        if result["status"]:
            print(f"{head} failed: {result['error']}")
        for source in dict.fromkeys(row["memory"] for row in result["rows"]):
            cells = {row["distance"]: row["accuracy"] for row in result["rows"] if row["memory"] == source}
            shown = "".join(f"{cells[label]:7.3f}" if label in cells else " " * 7 for label in distances)
            print(f"{head} {source:9} {shown} {result['rows'][0]['cost']:7.2f} {result['seconds']:7.0f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", metavar="'RECIPE [KEY=VALUE]...'")
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="for all experiments")
    parser.add_argument("--set", action="append", dest="settings", metavar="KEY=VALUE", help="the same, one at a time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between two starts")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which what is left is stopped")
    for name in ("steps", "depth", "window", "context", "pairs", "rows"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--variant")
    parser.add_argument("--data", type=Path, metavar="DIR", help="the text of needles")
    parser.add_argument("--query-share", type=float)
    parser.add_argument("--spread")
    parser.add_argument("--keys", type=int, default=32)
    parser.add_argument("--values", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a JSON file to add the rows to")
    parser.add_argument("--plot", type=Path, help="recall by distance: SVG, PNG or PDF")
    parser.add_argument("--cost-plot", type=Path, help="recall against training cost")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where runs and logs stay; else they are removed")
    arguments = parser.parse_args()
    plots = {draw: path for draw, path in ((draw_rows, arguments.plot), (draw_costs, arguments.cost_plot)) if path}
    try:
        for option, path in (("--plot", arguments.plot), ("--cost-plot", arguments.cost_plot)):
            if path is not None:
                check_plot(path, option)
                check_place(option, path)
        if arguments.out is not None:
            check_place("--out", arguments.out)
            read_rows(arguments.out, "--out")
    except RequestError as error:
        # before anything is trained
        parser.error(str(error))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        work = arguments.keep or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        wanted = [(words, seed) for seed in arguments.seeds for words in arguments.experiments]
        jobs = [experiment(*each, arguments, number, work) for number, each in enumerate(wanted)]
        results = work_through(
            jobs,
            max(1, arguments.jobs),
            stagger=arguments.stagger,
            limit=arguments.limit,
            ended=partial(tell, out=arguments.out),
        )
        if arguments.keep:
            files.write_json(work / "results.json", results)
    print_table(results)
    rows = [row for result in results for row in result["rows"]]
    for draw, path in plots.items():
        draw(path, read_rows(arguments.out) if arguments.out else rows)
    told = ("experiment", "seed", "status", "seconds", "error")
    runs = [{key: result[key] for key in told if key in result} for result in results]
    print(json.dumps({"runs": runs, "rows": rows, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if any(run["status"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
