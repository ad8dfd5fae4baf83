"""The same app as a Ray Serve deployment: replicas behind one address, on one machine or on a Ray cluster.

Every replica loads the run and keeps sessions in the same folder, so that a session is found wherever a request lands.
On several machines that folder, and the run, have to be on storage that they share. Requests with the same header
`x-session-id` go to the same replica, which has the states of their prompts in memory.
"""

import logging
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica
from starlette.types import ASGIApp

from maglev.ops.matrix import WeightFormat
from maglev.serve.guard import is_loopback
from maglev.serve.limits import Limits

NAME = "maglev"


@dataclass(frozen=True)
class Replica:
    """What each of them starts from: paths and plain values, which is all that travels."""

    run: Path
    name: str
    sessions: Path
    limits: Limits
    key: str | None
    only_local: bool
    device: str
    weights: WeightFormat
    created: int


class Router(ConsistentHashRouter):
    """A session by its hash; a request that names none by who is less busy, as Ray does it elsewhere."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or pending_request.metadata.session_id or len(candidate_replicas) < 2:
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        return [random.sample(candidate_replicas, 2)]


def deployment(replica: Replica, count: int) -> serve.Application:
    """To give to `serve.run`, or to deploy on a cluster of one's own."""
    on_gpu = replica.device.startswith("cuda")

    def app() -> ASGIApp:
        import maglev
        from maglev.serve.app import create_app

        own = replica
        lm = maglev.load(own.run, device=own.device, weights=own.weights)
        return create_app(
            lm,
            own.name,
            own.sessions,
            own.limits,
            key=own.key,
            only_local=own.only_local,
            created=own.created,
        )

    deploy = serve.deployment(
        name=NAME,
        num_replicas=count,
        # a replica refuses by itself what is too much for it
        max_ongoing_requests=replica.limits.slots + replica.limits.queue + 100,
        request_router_config={"request_router_class": Router},
        ray_actor_options={"num_gpus": 1} if on_gpu else {"num_cpus": 1},
    )
    return deploy(serve.ingress(app)()).bind()


def run_cluster(replica: Replica, count: int, host: str, port: int, say: Callable[[str], None]) -> None:
    """Until it is interrupted or terminated."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    try:
        serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "ERROR"})
        serve.run(deployment(replica, count), name=NAME, route_prefix="/")
        if replica.key is None and not is_loopback(host):
            say(f"anyone who reaches {host} can use this server; --api-key-file FILE sets a key")
        say(f"serving {replica.name} with {count} replicas on http://{host}:{port}")
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
