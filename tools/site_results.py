"""A hook of the site: tables of what lies in results/, made when the site is built, so that no number is typed.

`<!-- results: KIND -->` in a page becomes the tables of all files of that kind, `<!-- results -->` the list of files.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "results"
# of the places for questions of recall that hold one
USUAL_SHARE = 0.75
MARK = re.compile(r"<!-- results(?:: (\w+))? -->")
Content = dict[str, Any]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def share(value: float) -> str:
    return f"{100 * value:.1f}%"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def shipped(content: Content) -> str:
    row = [f"`{content['name']}`", whole(content["parameters"]), whole(content["tokens"])]
    row += [f"{content[key]:.4f}" for key in ("bpb_lifted_of_the_run", "bpb_recurrent")]
    return table(["weights", "parameters", "tokens", "lifted", "recurrent"], [row])


def text(content: Content) -> str:
    """Bits per byte, a column per memory source that some row has."""
    sources = [
        name for name in ("lifted", "refined", "recurrent") if any(f"bpb_{name}" in row for row in content["rows"])
    ]
    rows = []
    for row in content["rows"]:
        found = [f"{row[f'bpb_{name}']:.4f}" if f"bpb_{name}" in row else "-" for name in sources]
        rows.append([f"`{row['recipe']}`", str(row["seed"]), whole(row["tokens"]), *found])
    return table(["recipe", "seed", "tokens", *sources], rows)


def paper_table(content: Content) -> str:
    """As `maglev table --no-paper` writes it."""
    from maglev.evaluate.table import make_table
    from maglev.evaluate.table_formats import as_markdown

    return as_markdown(make_table(content["runs"], paper=False))


def recall(content: Content) -> str:
    """Accuracy by distance, a row per recipe, settings and memory source: the mean over seeds."""
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in content["rows"]:
        shape = (
            f"depth {row['depth']}, W {row['window']}, {row['pairs']} pairs ({row['variant']}), {row['steps']} steps"
        )
        changed = [f"{key}={value}" for key, value in row["settings"].items()]
        # asked otherwise than usual, or than in training
        if row.get("query_share", USUAL_SHARE) != USUAL_SHARE:
            changed.append(f"questions at {row['query_share']} of the places")
        changed += [f"trained with {key} {value}" for key, value in row.get("trained", {}).items()]
        name = (", ".join([f"`{row['recipe']}`", shape, *changed]), f"{row['cost']:.2f}", row["memory"])
        found.setdefault(name, {}).setdefault(row["distance"], []).append(row["accuracy"])
    distances = list(dict.fromkeys(row["distance"] for row in content["rows"]))
    rows = []
    for (name, cost, memory), by_distance in found.items():
        means = [by_distance.get(each) for each in distances]
        seeds = max(len(values) for values in by_distance.values())
        rows.append(
            [name, str(seeds), cost, memory, *(f"{sum(each) / len(each):.3f}" if each else "" for each in means)]
        )
    return table(["recipe", "seeds", "cost", "memory", *distances], rows)


def options(content: Content) -> str:
    """What the paper leaves open: quality, stability, size and speed of each."""
    columns = {"contraction_step": ".2f", "deployed": ",", "prefiller": ",", "state_bytes": ","}
    columns |= {"train_tokens_per_s": ",", "step_tokens_per_s": ",", "fast_tokens_per_s": ","}
    measured = [row for row in content["rows"] if "error" not in row]
    rows = [
        [row["option"], str(row["seed"])]
        + ["-" if row[key] is None else f"{row[key]:.4f}" for key in ("recurrent", "lifted")]
        + ["-" if row.get(key) is None else format(row[key], form) for key, form in columns.items()]
        for row in measured
    ]
    metrics = ", ".join(sorted({row["metric"] for row in measured}))
    heads = [f"{metrics}, recurrent", "lifted", "mean rate of 16 steps", "deployed", "Q's own", "state", "trained/s"]
    return table(["option", "seed", *heads, "steps/s", "by kernels"], rows)


def length(content: Content) -> str:
    """Recurrent bits per byte by position, in lengths of the training rows."""
    runs = content["runs"]
    trained = runs[0]["trained_context"]
    rows = [
        [f"{parts[0]['first'] // trained} to {(parts[0]['last'] + 1) // trained}"]
        + [f"{part['bpb_recurrent']:.4f}" for part in parts]
        for parts in zip(*(run["by_position"] for run in runs), strict=True)
    ]
    return table(["positions", *(f"`{run['recipe']}`, seed {run['seed']}" for run in runs)], rows)


def history(content: Content) -> str:
    """What history beyond one plain reach takes off bits per byte, by memory source."""
    first = content["runs"][0]
    heads = [f"gained by {row['reaches']}" for row in first["rows"][1:]]
    rows = []
    for run in content["runs"]:
        for source in run["sources"]:
            gains = [
                f"{row[f'gain_{source}']:+.5f}"
                + ("" if row[f"error_{source}"] is None else f" ± {row[f'error_{source}']:.5f}")
                for row in run["rows"][1:]
            ]
            start = f"{run['rows'][0][f'bpb_{source}']:.4f}"
            rows.append([f"`{run['label']}`", source if run["memory"] else "-", run["far"], start, *gains])
    return table(["run", "memories", "far text", f"after {first['plain_reach']} tokens", *heads], rows)


def train(content: Content) -> str:
    rows = []
    for row in (row for row in content["rows"] if "error" not in row):
        numbers = [whole(row["tokens_per_s"]), share(row["mfu"]), f"{row['peak_bytes'] / 1e9:.1f}"]
        rows.append([f"`{row['recipe']}`", str(row["depth"]), *numbers])
    return table(["recipe", "depth", "tokens/s", "share of the matrix rate", "peak memory, GB"], rows)


def decode(content: Content) -> str:
    """The fused step at the longest position, and how much positions differ."""
    groups: dict[tuple[str, str, int], list[Content]] = {}
    for row in content["rows"]:
        if row["step"] == "fast":
            groups.setdefault((row["model"], row["weight_format"], row["batch"]), []).append(row)
    rows = []
    for (model, stored, batch), measured in groups.items():
        times = [row["ms"] for row in measured]
        last = max(measured, key=lambda row: row["position"])
        numbers = [f"{last['ms']:.3f}", whole(last["tokens_per_s"]), share(last["share_of_copy"])]
        rows.append([model, stored, str(batch), whole(last["position"]), *numbers, f"{max(times) / min(times):.3f}"])
    head = ["model", "weights", "batch", "position", "ms", "tokens/s", "share of the copy bandwidth"]
    return table([*head, "slowest by fastest position"], rows)


def read(content: Content) -> str:
    rows = []
    for row in content["rows"]:
        numbers = [f"{row['passes_per_token']:.1f}", whole(row["tokens_per_s"]), share(row["share_of_matrix_rate"])]
        rows.append([row["model"], row["weights"], whole(row["tokens"]), *numbers])
    return table(["model", "weights", "tokens", "passes", "tokens/s", "share of the matrix rate"], rows)


def weights(content: Content) -> str:
    return table(["weights", "recurrent"], [[name, f"{value:.5f}"] for name, value in content["bpb_recurrent"].items()])


def follow(content: Content) -> str:
    """Mean next-token loss of the last steps, by who computed them."""
    columns = list(dict.fromkeys(name for row in content["recipes"].values() for name in row["last"]))
    rows = [
        [f"`{recipe}`", *(f"{row['last'][name]:.4f}" if name in row["last"] else "" for name in columns)]
        for recipe, row in content["recipes"].items()
    ]
    return table(["recipe", *columns], rows)


def attention_cost(content: Content) -> str:
    rows = [
        [f"{along}", f"{content[key]['exponent_forward']:.2f}", f"{content[key]['exponent_both']:.2f}"]
        for along, key in (("length", "by_length"), ("window", "by_window"))
    ]
    return table(["time grows with the power of", "forward", "forward and backward"], rows)


def load(content: Content) -> str:
    first = content["first_piece_seconds"]
    rows = [
        ["streams at a time, seconds", f"{content['streams']}, {content['seconds']:.0f}"],
        ["texts, pieces per second", f"{whole(content['texts'])}, {whole(content['pieces_per_second'])}"],
        ["first piece after, p50 and p99", f"{first['p50']:.1f} s, {first['p99']:.1f} s"],
        ["refused with 429; errors", f"{whole(content['refused_429'])}; {len(content['errors'])}"],
        ["memory grew by", f"{content['largest_growth_bytes'] / 1e6:.1f} MB"],
    ]
    return table(["load", ""], rows)


def hostile(content: Content) -> str:
    failures = sum(count for status, count in content["statuses"].items() if status.startswith("5"))
    rows = [
        ["malformed or hostile requests", whole(content["requests"])],
        ["answered with 5xx", str(failures)],
        ["memory grew by", f"{content['grown_bytes'] / 1e6:.1f} MB"],
    ]
    return table(["fuzz", ""], rows)


def kills(content: Content) -> str:
    rows = [
        ["`kill -9` during saves", str(content["kills"])],
        ["states checked afterwards", str(content["states_checked"])],
    ]
    return table(["faults", ""], rows)


def ray(content: Content) -> str:
    rows = [["replicas", str(content["replicas"])], ["tests of the client passed", str(content["client_tests_passed"])]]
    return table(["Ray Serve", ""], rows)


def oldest(content: Content) -> str:
    rows = [["transformers", content["transformers"]], ["tests passed", str(content["passed"])]]
    return table(["oldest release", ""], rows)


@dataclass(frozen=True)
class Kind:
    render: Callable[[Content], str]
    command: str
    matches: Callable[[str, Content], bool]


def named(name: str) -> Callable[[str, Content], bool]:
    return lambda stem, content: content.get("benchmark") == name


def is_table(stem: str, content: Content) -> bool:
    return content.get("format") == "maglev-table-1"


KINDS = {
    "train": Kind(train, "maglev bench train", named("train")),
    "decode": Kind(decode, "maglev bench decode", named("decode")),
    "read": Kind(read, "maglev bench read", named("read")),
    "attention": Kind(attention_cost, "python benchmarks/attention_cost.py", named("attention_cost")),
    "weights": Kind(weights, "maglev eval bpb", lambda stem, content: stem.startswith("weights")),
    "follow": Kind(follow, "python benchmarks/follow.py", lambda stem, content: stem.startswith("follow")),
    "load": Kind(load, "make soak", lambda stem, content: stem == "serve-load"),
    "hostile": Kind(hostile, "make soak", lambda stem, content: stem in ("serve-hostile", "serve-described")),
    "kills": Kind(kills, "make soak", lambda stem, content: stem == "serve-kills"),
    "ray": Kind(ray, "make soak", lambda stem, content: stem == "serve-ray"),
    "oldest": Kind(oldest, "make soak", lambda stem, content: stem == "hf-oldest"),
    "recall": Kind(recall, "python benchmarks/recall.py", lambda stem, content: stem.startswith("recall")),
    "table": Kind(
        paper_table,
        "python benchmarks/small_table.py",
        is_table,
    ),
    "options": Kind(options, "python benchmarks/options.py", lambda stem, content: stem.startswith("options")),
    "length": Kind(length, "maglev eval length", lambda stem, content: stem.startswith("length")),
    "history": Kind(history, "maglev eval history", lambda stem, content: stem.startswith("history")),
    "shipped": Kind(shipped, "python benchmarks/ship.py", lambda stem, content: "bpb_lifted_of_the_run" in content),
    "text": Kind(text, "python benchmarks/text.py", lambda stem, content: stem.startswith("text")),
}


def found() -> list[tuple[Path, Content, str]]:
    """Every file of results/ with its kind, empty where no table is known for it."""
    contents = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(FOLDER.glob("*.json"))]
    kinds = [next((name for name, kind in KINDS.items() if kind.matches(path.stem, of)), "") for path, of in contents]
    return [(path, content, kind) for (path, content), kind in zip(contents, kinds, strict=True)]


def machine(content: Content) -> str:
    """Where it was measured, as far as the file says."""
    on = content.get("machine")
    if is_table("", content):
        content = next((run["machine"] for run in content["runs"] if "machine" in run), {})
    facts = [content.get("device"), content.get("dtype"), content.get("torch") and f"torch {content['torch']}"]
    if isinstance(on, dict):
        facts = [f"{on['cpus']} CPUs", f"torch {on['torch']}"]
    return ", ".join(fact for fact in facts if fact)


def section(name: str) -> str:
    parts = []
    for path, content, kind in found():
        if kind == name:
            where = machine(content)
            source = f"[{path.name}](../results/{path.name})" + (f": {where}" if where else "")
            parts.append(f"{KINDS[kind].render(content)}\n\n{source}; `{KINDS[kind].command}`.\n")
    return "\n".join(parts) or "Nothing is kept here yet."


def listing() -> str:
    rows = [
        [f"[{path.name}](../results/{path.name})", f"`{KINDS[kind].command}`" if kind else "", machine(content)]
        for path, content, kind in found()
    ]
    return table(["file", "made by", "measured on"], rows)


def on_page_read_source(page: Any, config: Any) -> str | None:
    return expanded(page.file.content_string) if page.file.src_uri == "results.md" else None


def expanded(markdown: str) -> str:
    return MARK.sub(lambda match: section(match[1]) if match[1] else listing(), markdown)
