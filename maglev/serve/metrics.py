"""What /metrics tells. Every server has a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter("maglev_requests", "Requests by route and status", ["route", "status"], registry=own)
        self.read_tokens = Counter("maglev_read_tokens", "Tokens of prompts that were read", registry=own)
        self.cached_tokens = Counter(
            "maglev_cached_tokens", "Tokens of prompts that were known from earlier ones", registry=own
        )
        self.written_tokens = Counter("maglev_written_tokens", "Tokens that were written", registry=own)
        self.slots = Gauge("maglev_slots", "Texts that can be written at a time", registry=own)
        self.busy = Gauge("maglev_slots_busy", "Texts that are being written", registry=own)
        self.queued = Gauge("maglev_queued", "Texts that wait for a slot", registry=own)
        self.sessions = Gauge("maglev_sessions", "States that are kept by name", registry=own)
        self.step_seconds = Histogram(
            "maglev_step_seconds", "Time of a step of all texts", buckets=STEP_BUCKETS, registry=own
        )
        self.first_token_seconds = Histogram(
            "maglev_first_token_seconds", "From a request to its first text", buckets=WAIT_BUCKETS, registry=own
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
