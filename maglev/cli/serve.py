"""`maglev serve`"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from maglev.cli.options import Device, ModelArgument
from maglev.cli.output import say
from maglev.cli.weights import Weights, weight_format
from maglev.errors import RequestError
from maglev.runs import is_shipped
from maglev.serve.limits import Limits

if TYPE_CHECKING:
    from maglev.ops.matrix import WeightFormat

DEFAULTS = Limits()
SHORTEST_KEY = 16


def serve(
    run: ModelArgument,
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Every request must bring the key in it.")
    ] = None,
    sessions: Annotated[
        Path | None,
        typer.Option(
            "--sessions", metavar="DIR", help="Where states are kept by name. [RUN/sessions; NAME-sessions, by name]"
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What clients call the model. [the folder's name]")] = None,
    slots: Annotated[int, typer.Option("--slots", help="Texts written at a time.")] = DEFAULTS.slots,
    queue: Annotated[int, typer.Option("--queue", help="Texts that may wait; then it is 429.")] = DEFAULTS.queue,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of one text.")] = DEFAULTS.max_tokens,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of one prompt.")] = DEFAULTS.prompt_tokens,
    choices: Annotated[int, typer.Option("--choices", help="Prompts times n of one request.")] = DEFAULTS.choices,
    body_bytes: Annotated[int, typer.Option("--body-bytes", help="Of one request.")] = DEFAULTS.body_bytes,
    seconds: Annotated[float, typer.Option("--seconds", help="One request may take.")] = DEFAULTS.seconds,
    transfer_seconds: Annotated[
        float, typer.Option("--transfer-seconds", help="For a head or body to arrive, or an answer to be taken.")
    ] = DEFAULTS.transfer_seconds,
    session_count: Annotated[int, typer.Option("--session-count", help="States kept.")] = DEFAULTS.session_count,
    session_days: Annotated[
        float, typer.Option("--session-days", help="A state is forgotten so long after its last use.")
    ] = DEFAULTS.session_days,
    chunk: Annotated[
        int, typer.Option("--chunk", help="Tokens of a prompt read between two steps of the others.")
    ] = DEFAULTS.chunk,
    cache_bytes: Annotated[
        int, typer.Option("--cache-bytes", help="For states of prompts that later ones may extend.")
    ] = DEFAULTS.cache_bytes,
    replicas: Annotated[int, typer.Option("--replicas", help="Above 1: so many copies under Ray Serve.")] = 1,
    weights: Weights = "plain",
    device: Device = "auto",
) -> None:
    """Serve a run to OpenAI's clients."""
    given: dict[str, Any] = locals()
    limits = Limits(**{field.name: given[field.name] for field in fields(Limits) if field.name in given})
    key = None if api_key_file is None else read_key(api_key_file)
    if not 0 <= port < 1 << 16:
        raise RequestError(f"--port is {port}; it must be from 0 to 65535")
    if replicas < 1:
        raise RequestError(f"--replicas is {replicas}; it must be at least 1")
    serve_it = serve_here if replicas == 1 else partial(serve_replicas, count=replicas)
    # what comes with the package is not written to
    usual = Path(f"{run.resolve().name}-sessions") if is_shipped(run) else run / "sessions"
    places: dict[str, Any] = {"sessions": sessions or usual, "name": name or run.resolve().name}
    try:
        serve_it(run, host, port, limits, key=key, weights=weight_format(weights), device=device, **places)
    except ModuleNotFoundError as error:
        extra = "serve" if replicas == 1 else "ray"
        raise RequestError(f"maglev serve needs {error.name}; install it with: pip install 'maglev[{extra}]'") from None


def serve_here(
    run: Path, host: str, port: int, limits: Limits, *, weights: "WeightFormat", device: str, **more: Any
) -> None:
    import maglev
    from maglev.serve.run import listen, run_server

    # a port that is taken is told before a large model is loaded
    with listen(host, port) as socket:
        lm = maglev.load(run, device=device, report=say, weights=weights)
        run_server(lm, run, socket, host, limits, say=say, **more)


def serve_replicas(
    run: Path,
    host: str,
    port: int,
    limits: Limits,
    *,
    count: int,
    key: str | None,
    weights: "WeightFormat",
    device: str,
    sessions: Path,
    name: str,
) -> None:
    from maglev.runs import read_config
    from maglev.serve.cluster import Replica, run_cluster
    from maglev.serve.guard import is_loopback
    from maglev.serve.run import listen, made
    from maglev.train.distributed import resolve_device

    read_config(run)
    # Ray binds by itself: what is wrong with the address, or a free port, is found out here
    with listen(host, port) as socket:
        port = socket.getsockname()[1]
    replica = Replica(
        run.resolve(),
        name,
        sessions.resolve(),
        limits,
        key,
        is_loopback(host),
        str(resolve_device(device, setting="--device")),
        weights,
        made(run),
    )
    run_cluster(replica, count, host, port, say)


def read_key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--api-key-file {path} cannot be read ({error}); name a text file with the key") from None
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise RequestError(
            f"--api-key-file {path}: a key has at least {SHORTEST_KEY} printable ASCII characters and no space; "
            f"make one with: openssl rand -hex 32"
        )
    return key
