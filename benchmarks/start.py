"""Where the start of a training run goes, from the process to the end of its first step, with nothing compiled before.

    PYTHONPATH=. python3 benchmarks/start.py lrt-ssss --depth 12 --rows 32 --tokens 524288 [--set KEY=VALUE]

A fresh process with empty caches trains two steps on random tokens and tells when each part was over and what was
compiled meanwhile: by function, forward (with the graph of its backward) or backward alone. `waited` is for the
compiler's workers; what is neither imported, built nor compiled is kernels of ours, tuning and the step itself. The
last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def work(asked: argparse.Namespace) -> dict[str, Any]:
    began = float(os.environ["MAGLEV_BEGAN"])
    parts: dict[str, float] = {}

    def over(part: str) -> None:
        parts[part] = time.time() - began - sum(parts.values())

    import torch  # noqa: F401

    over("import torch")
    from maglev.bench.clock import machine_facts
    from maglev.bench.lines import Lines
    from maglev.bench.train_worker import RandomTask
    from maglev.recipes import run_config
    from maglev.settings import parse_assignments
    from maglev.train.distributed import Ranks, resolve_device
    from maglev.train.loop import Trainer
    from maglev.train.setup import compute_dtype

    over("import maglev")
    compiled, waited = watch_compiler()
    over("import the compiler")
    device = resolve_device(asked.device, setting="--device")
    settings = parse_assignments(asked.set) | {"train.tokens_per_step": asked.tokens, "train.rows_per_pass": asked.rows}
    config = run_config(asked.recipe, asked.depth, settings | {"train.validate_every": 0})
    trainer = Trainer(config, RandomTask(config.model.vocab_size), Path(), Ranks(0, 1, 0, device), Lines())
    over("build")
    trainer.fit_rows()
    trainer.one_step()
    over("first step")
    start = sum(parts.values())
    trainer.one_step()
    over("second step")
    facts = {"recipe": asked.recipe, "depth": asked.depth, "rows": asked.rows, "tokens": asked.tokens, "set": asked.set}
    facts |= machine_facts(device, compute_dtype(config, device))
    return facts | {"start_s": start, "parts": parts, "compiled": compiled, "waited_s": sum(waited)}


def watch_compiler() -> tuple[list[dict[str, Any]], list[float]]:
    """What is compiled from here on, and the waits for workers."""
    import torch._dynamo.convert_frame as frames
    import torch._inductor.compile_fx as graphs
    from torch._inductor.async_compile import AsyncCompile

    compiled: list[dict[str, Any]] = []
    waited: list[float] = []

    def timed(owner: Any, name: str, note: Callable[[tuple[Any, ...], dict[str, Any], float], None]) -> None:
        inner = getattr(owner, name)

        def run(*arguments: Any, **named: Any) -> Any:
            before = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                note(arguments, named, time.perf_counter() - before)

        setattr(owner, name, run)

    def frame(arguments: tuple[Any, ...], named: dict[str, Any], seconds: float) -> None:
        code = arguments[0]
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        compiled.append({"what": f"{code.co_name} ({place})", "seconds": round(seconds, 2)})

    def graph(arguments: tuple[Any, ...], named: dict[str, Any], seconds: float) -> None:
        if named.get("is_backward"):
            compiled.append({"what": "a backward", "seconds": round(seconds, 2)})

    timed(frames, "_compile", frame)
    timed(graphs, "compile_fx_inner", graph)
    timed(AsyncCompile, "wait", lambda arguments, named, seconds: waited.append(seconds))
    return compiled, waited


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rows", type=int, default=32, help="of a pass")
    parser.add_argument("--tokens", type=int, default=524_288, help="of a step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    # nothing of PyTorch yet: its import is measured
    from maglev.errors import RequestError, WorkError
    from maglev.recipes import run_config
    from maglev.settings import parse_assignments

    try:
        if "MAGLEV_BEGAN" in os.environ:
            print(json.dumps(work(asked)))
            return 0
        run_config(asked.recipe, asked.depth, parse_assignments(asked.set))
    except (RequestError, WorkError) as error:
        print(f"start: {error}", file=sys.stderr)
        return 2 if isinstance(error, RequestError) else 1
    with TemporaryDirectory(prefix="maglev-start-", ignore_cleanup_errors=True) as caches:
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        own |= {"MAGLEV_BEGAN": str(time.time())}
        command = [sys.executable, *sys.argv]
        done = subprocess.run(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    result = json.loads(done.stdout.splitlines()[-1])
    for name, seconds in result["parts"].items():
        print(f"{name:20} {seconds:7.2f} s")
    for each in result["compiled"]:
        print(f"    compiled {each['what']:40} {each['seconds']:6.2f} s")
    print(f"    waited for workers {result['waited_s']:.2f} s\nto the end of the first step {result['start_s']:.2f} s")
    if asked.out:
        from maglev import files

        files.write_json(asked.out, result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
