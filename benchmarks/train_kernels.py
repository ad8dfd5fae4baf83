"""Which kernels a training step spends its time in, by name: what `maglev bench train` adds up by kind.

    python benchmarks/train_kernels.py maglev-shared-0.1 [--depth 12] [--rows 16] [--set train.recompute=selective]

Milliseconds per pass, calls per pass, microseconds per call, the most costly first; random tokens, context 2048, W 512.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from maglev.bench.lines import Lines
from maglev.bench.train_worker import RandomTask
from maglev.model.accounting import objective_flops
from maglev.recipes import run_config
from maglev.settings import parse_assignments
from maglev.train.distributed import Ranks
from maglev.train.loop import Trainer

PASSES, WARM, TIMED = 8, 2, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    for name, standard in (("depth", 12), ("rows", 16), ("context", 2048), ("top", 30)):
        parser.add_argument(f"--{name}", type=int, default=standard)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    tokens = PASSES * asked.rows * asked.context
    settings = {
        "model.context": asked.context,
        "train.rows_per_pass": asked.rows,
        "train.tokens_per_step": tokens,
        "train.steps": 1000,
        "train.validate_every": 0,
    }
    config = run_config(asked.recipe, asked.depth, settings | parse_assignments(asked.settings))
    device = torch.device("cuda")
    trainer = Trainer(config, RandomTask(config.model.vocab_size), Path(), Ranks(0, 1, 0, device), Lines())
    for _ in range(WARM):
        trainer.one_step()
    before = trainer.progress.seconds
    for _ in range(TIMED):
        trainer.one_step()
    seconds = (trainer.progress.seconds - before) / TIMED
    rate = 3 * objective_flops(config) * tokens / seconds
    print(f"{tokens / seconds:,.0f} tokens/s, {rate / 1e12:.1f} TFLOP/s, {1e3 * seconds / PASSES:.2f} ms per pass")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.one_step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            times[event["name"]] += event["dur"]
            calls[event["name"]] += 1
    print(f"{sum(times.values()) / 1e3 / PASSES:.2f} ms per pass in kernels")
    for name, total in times.most_common(asked.top):
        each = total / calls[name]
        print(f"{total / 1e3 / PASSES:8.3f} ms {calls[name] / PASSES:6.1f} x {each:8.1f} us  {name[:120]}")


if __name__ == "__main__":
    main()
