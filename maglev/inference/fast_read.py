"""A chunk of a prompt on the kernels of decoding: its positions are the rows of one step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from maglev.inference.fast_step import FastDecoder
from maglev.model.chunk import Chunk, Span
from maglev.model.state import DecoderState

# positions of all rows together: a smaller pass takes as long
SMALLEST_RECORDED = 256
SHAPES_KEPT = 2


class FastChunk(Chunk):
    """On a GPU the launches of a pass are recorded once per shape; what is shorter or has fewer rows is padded to the
    next shape, which its positions do not see."""

    def __init__(self, fast: FastDecoder, tokens: Tensor, state: DecoderState, room: int | None = None) -> None:
        self.fast, rows = fast, len(tokens)
        room = max(room or 0, tokens.shape[1])
        self.recorded = recorded_passes(fast, rows, room, state) if records(fast.device) else None
        spans = None if self.recorded is None else [span.first_rows(rows) for span in self.recorded.spans]
        super().__init__(tokens, state, room, spans)
        if self.recorded is not None:
            self.recorded.take(tokens, self.position)

    def advance_(self, count: int, tokens: Tensor) -> None:
        super().advance_(count, tokens)
        if self.recorded is not None:
            self.recorded.take(self.tokens, self.position)

    def compute(self, some: range, previous_memory: Tensor | None) -> Tensor:
        if self.recorded is not None:
            return self.recorded.replay(len(self.tokens), some, previous_memory)
        return positions_at_once(self.fast, self.tokens, self.positions, self.spans, some, previous_memory)


def positions_at_once(
    fast: FastDecoder, tokens: Tensor, positions: Tensor, spans: list[Span], some: range, previous_memory: Tensor | None
) -> Tensor:
    """Some positions of every sequence through all layers. tokens, positions (B, C) -> memory (B, Q, D)"""
    steps, at = fast.steps, slice(some.start, some.stop, some.step)
    # kernels start on the current device, wherever their arguments are
    with torch.cuda.device_of(tokens):
        position = positions[:, at].flatten().contiguous()
        start, cos, sin = steps.begin_step(tokens[:, at].flatten(), fast.embedding, position, fast.frequencies)
        features = None
        if fast.memory_weight is not None and previous_memory is not None:
            features = steps.project(previous_memory.flatten(0, 1).contiguous(), fast.memory_weight)
        x = start
        for weights, span in zip(fast.layers, spans, strict=True):
            x, projected, mixed, _ = fast.enter(x, start, weights, features)
            queries = span.queries(some)
            attended = steps.chunk_attend(
                projected, mixed, span.key, span.value, span.empty, queries, span.window, cos, sin, fast.config.heads
            )
            x = steps.project_add(x, attended, weights.output)
            x = steps.project_add(x, steps.norm_project_relu2(x, weights.up), weights.down)
        memory = torch.empty_like(x)
        steps.finish_step(x, position, memory, torch.empty_like(position))
    return memory.unflatten(0, (tokens.shape[0], -1))


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    previous_memory: Tensor | None
    memory: Tensor


class RecordedPasses:
    """Passes over chunks of one shape, from CUDA graphs on fixed addresses: a pass has hundreds of launches, and on
    many machines asking for them takes longer than they do."""

    def __init__(self, fast: FastDecoder, rows: int, length: int, state: DecoderState) -> None:
        self.fast, self.length = fast, length
        self.spans = [Span(ring, length, rows) for ring in state.caches]
        # a recording may read what no pass has written: padding, before the first pass
        for span in self.spans:
            span.key.zero_()
            span.value.zero_()
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=fast.device)
        self.positions = torch.zeros_like(self.tokens)
        self.recordings: dict[tuple[int, int, bool], Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def take(self, tokens: Tensor, position: Tensor) -> None:
        """Another chunk, (B, C) with at most the rows and the length of this shape."""
        rows, length = tokens.shape
        self.tokens[:rows, :length].copy_(tokens)
        self.positions[:rows].copy_(position[:, None] + torch.arange(self.length, device=position.device))

    def replay(self, rows: int, some: range, previous_memory: Tensor | None) -> Tensor:
        """Of the first `rows`, these positions: (rows, Q, D). Those that follow at the same step are computed too, up
        to the end: one recording serves all lengths."""
        whole = range(some.start, self.length, some.step)
        key = whole.start, whole.step, previous_memory is not None
        if previous_memory is not None:
            padding = (0, 0, 0, len(whole) - len(some), 0, len(self.tokens) - rows)
            previous_memory = F.pad(previous_memory, padding)
        if key not in self.recordings:
            self.recordings[key] = self.record(whole, previous_memory)
        recording = self.recordings[key]
        if recording.previous_memory is not None and previous_memory is not None:
            recording.previous_memory.copy_(previous_memory)
        recording.graph.replay()
        return recording.memory[:rows, : len(some)].clone()

    def record(self, some: range, previous_memory: Tensor | None) -> Recording:
        """The pass is run once before, which compiles what it needs; run again, it writes the same."""
        given = None if previous_memory is None else previous_memory.clone()
        device = self.fast.device
        with torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                positions_at_once(self.fast, self.tokens, self.positions, self.spans, some, given)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # another thread may allocate meanwhile
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                memory = positions_at_once(self.fast, self.tokens, self.positions, self.spans, some, given)
        return Recording(graph, given, memory)


def records(device: torch.device) -> bool:
    return device.type == "cuda"


def recorded_shape(rows: int, length: int) -> tuple[int, int]:
    """What a chunk is padded to: few shapes, for each is recorded anew. Rows in quarters of a power of two, lengths in
    powers of two, and together enough to be worth a pass."""
    step = 1 << max(0, rows.bit_length() - 3)
    rows = -(-rows // step) * step
    return rows, max(-(-SMALLEST_RECORDED // rows), 1 << (length - 1).bit_length())


def recorded_passes(fast: FastDecoder, rows: int, room: int, state: DecoderState) -> RecordedPasses:
    """Those of the last shapes are kept: prompts of many lengths have few."""
    shape = recorded_shape(rows, room)
    found = fast.recorded_passes.pop(shape, None) or RecordedPasses(fast, *shape, state)
    fast.recorded_passes[shape] = found
    while len(fast.recorded_passes) > SHAPES_KEPT:
        fast.recorded_passes.pop(next(iter(fast.recorded_passes)))
    return found
