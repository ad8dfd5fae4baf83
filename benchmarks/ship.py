"""Put a trained run into the package, where `maglev generate NAME` finds it: rounded, without Q, with a card.

`python benchmarks/ship.py RUN --name maglev-tiny --data DATA --text "what it was trained on" --machine "and where"
[--beside SWA-RUN]` measures what is shipped, not the run it came from, and keeps the figures in results/NAME.json.
Without RUN the card alone is written, from them.
"""

import argparse
import io
import json
import os
import platform
import shutil
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import maglev
from maglev.__main__ import main as maglev_main
from maglev.config import RunConfig
from maglev.files import write_json, write_text
from maglev.hf.configuration_maglev import MODEL_FILE
from maglev.inference.engine import LanguageModel
from maglev.recipes import run_config
from maglev.runs import CONFIG, SHIPPED, read_config

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PROMPT = "The history of the river begins"
SAMPLING: dict[str, Any] = {"max_tokens": 120, "temperature": 0.7, "top_p": 0.95, "seed": 0}
# what a run has beside what its recipe says, in the order of the command
ALWAYS_GIVEN = ("model", "objective", "train", "optimizer")


def maglev_json(*arguments: str) -> dict[str, Any]:
    """What a verb prints with --json."""
    with redirect_stdout(io.StringIO()) as printed:
        status = maglev_main([*arguments, "--json"])
    if status != 0:
        raise SystemExit(status)
    return json.loads(printed.getvalue())


def bits(run: Path, data: Path, memory: str) -> float:
    return maglev_json("eval", "bpb", str(run), "--data", str(data), "--memory", memory)[f"bpb_{memory}"]


def shipped(run: Path, out: Path) -> dict[str, Any]:
    """Export it, without the code, which is in the package. What was exported."""
    found = maglev_json("export", str(run), str(out), "--without-prefiller", "--dtype", "bfloat16")
    (out / MODEL_FILE).unlink()
    config = json.loads((out / CONFIG).read_text())
    del config["auto_map"]
    write_json(out / CONFIG, config)
    return found


def measured(given: argparse.Namespace, out: Path, exported: dict[str, Any]) -> dict[str, Any]:
    """What the exported weights do."""
    run, data = given.run, given.data
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    lm = maglev.load(out, device="cpu")
    found: dict[str, Any] = {
        "name": given.name,
        "text": given.text,
        "trained_on": given.machine,
        "step": exported["step"],
        "parameters": exported["parameters"]["decoder"],
        "state_bytes": lm.read(PROMPT).nbytes,
        "tokens": exported["step"] * read_config(run).train.tokens_per_step,
        "train_seconds": round(max(line["seconds"] for line in lines if line["kind"] == "train")),
        "bpb_recurrent": bits(out, data, "recurrent"),
        "bpb_lifted_of_the_run": bits(run, data, "lifted"),
        "bpb_recurrent_of_the_run": bits(run, data, "recurrent"),
        "prompt": PROMPT,
        "sampling": SAMPLING,
        "written": written(lm),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
    }
    if given.beside is not None:
        found["beside"] = {"recipe": read_config(given.beside).recipe, "bpb": bits(given.beside, data, "recurrent")}
    return found


def written(lm: LanguageModel) -> str:
    return "".join(lm.generate(PROMPT, **SAMPLING))


def settings(config: RunConfig) -> list[str]:
    """What the command line would have to set for it, apart from the recipe and the depth."""
    plain = run_config(config.recipe, config.model.depth).to_dict()
    given = config.to_dict()
    return [
        f"--set {part}.{key}={value}"
        for part in ALWAYS_GIVEN
        for key, value in given[part].items()
        if value != plain[part].get(key) and (part, key) != ("model", "vocab_size")
    ]


def card(found: dict[str, Any], config: RunConfig) -> str:
    name, model = found["name"], config.model
    begin = f"maglev train {config.recipe} --depth {model.depth} --data data --out run"
    train = " \\\n    ".join([begin, *settings(config)])
    rows = [("shipped, bfloat16", "recurrent", found["bpb_recurrent"])]
    rows.append(("before rounding", "recurrent", found["bpb_recurrent_of_the_run"]))
    rows.append(("before rounding, with Q", "lifted", found["bpb_lifted_of_the_run"]))
    if "beside" in found:
        rows.append((f"`{found['beside']['recipe']}`, same steps and settings", "none", found["beside"]["bpb"]))
    table = "\n".join(f"| {what} | {memory} | {value:.4f} |" for what, memory, value in rows)
    said = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in sorted(found["sampling"].items()))
    quoted = "\n".join(f"> {line}".rstrip() for line in (found["prompt"] + found["written"]).splitlines())
    return f"""---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [maglev, recurrent, bounded-memory]
---

# {name}

A small `{config.recipe}`, so that there are weights to load without training: {found["parameters"]:,} parameters,
{model.depth} layers of width {model.width}, windows of {model.window} tokens, a vocabulary of {model.vocab_size:,}, in
bfloat16. After any number of tokens its state is {found["state_bytes"]:,} bytes. It comes with the package:

```sh
maglev generate {name} --prompt "{found["prompt"]}" --max-tokens 100
maglev serve {name}
maglev export {name} {name}-hf    # a Hugging Face folder, with the code it needs
```

## What it can do
Go on from English prose in something like English prose. It knows no facts, follows no instructions and is no base for
a product: it was trained on {found["tokens"]:,} tokens. It is here to show how a bounded state is read, written, kept
and served. What it writes may offend, and is wrong where it claims anything.

## Measured
Bits per byte of held-out text, lower is better, by where the memories came from. In use the decoder has its own:
recurrent is the number that counts.

| weights | memories | bits per byte |
|---|---|---|
{table}

It goes on like this ({said}):

{quoted}

## How it was made
Trained on {found["text"]}: {found["step"]:,} steps,
{found["train_seconds"] / 60:.0f} minutes on {found["trained_on"]}.

```sh
maglev data prepare TRAIN.parquet... --validation VALIDATION.parquet --vocab-size {model.vocab_size} --out data
{train}
python benchmarks/ship.py run --name {name} --data data --text "{found["text"]}" --machine "{found["trained_on"]}"
```

The figures lie in results/{name}.json; `benchmarks/ship.py` wrote this card from them.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="the run to ship; without it the card alone is written")
    parser.add_argument("--name", required=True)
    parser.add_argument("--data", type=Path, help="what it is measured on")
    parser.add_argument("--beside", type=Path, help="a run without memory to compare it with")
    parser.add_argument("--text", help="what it was trained on, for the card")
    parser.add_argument("--machine", help="where it was trained")
    given = parser.parse_args()
    kept, place = RESULTS / f"{given.name}.json", SHIPPED / given.name
    if given.run is None:
        if not kept.is_file():
            parser.error(f"there is no {kept.name} in results/ to write a card from; name a run")
        write_text(place / "README.md", card(json.loads(kept.read_text()), read_config(place)))
        return
    missing = [name for name in ("data", "text", "machine") if getattr(given, name) is None]
    if missing:
        parser.error(f"with a run, give --{', --'.join(missing)} too")
    with tempfile.TemporaryDirectory() as folder:
        out, measured_in = Path(folder) / "shipped", Path(folder) / "measured"
        exported = shipped(given.run, out)
        # an evaluation keeps its result beside what it measures
        shutil.copytree(out, measured_in)
        found = measured(given, measured_in, exported)
        write_text(out / "README.md", card(found, read_config(out)))
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(out, place)
    RESULTS.mkdir(exist_ok=True)
    write_json(kept, found)


if __name__ == "__main__":
    main()
