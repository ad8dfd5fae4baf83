"""A chunk of a prompt on the kernels of decoding: its positions are the rows of one step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maglev.inference.fast_step import FastDecoder
from maglev.model.chunk import Chunk, Span
from maglev.model.state import DecoderState


class FastChunk(Chunk):
    """`repeated` says that more chunks of this shape will come: then the launches of a pass are recorded, once."""

    def __init__(self, fast: FastDecoder, tokens: Tensor, state: DecoderState, repeated: bool = False) -> None:
        self.fast = fast
        self.recorded = recorded_passes(fast, tokens, state) if repeated and fast.device.type == "cuda" else None
        super().__init__(tokens, state, None if self.recorded is None else self.recorded.spans)
        if self.recorded is not None:
            self.recorded.tokens.copy_(tokens)
            self.recorded.positions.copy_(self.positions)

    def compute(self, subset: range, previous_memory: Tensor | None) -> Tensor:
        if self.recorded is not None:
            return self.recorded.replay(subset, previous_memory)
        return positions_at_once(self.fast, self.tokens, self.positions, self.spans, subset, previous_memory)


def positions_at_once(
    fast: FastDecoder,
    tokens: Tensor,
    positions: Tensor,
    spans: list[Span],
    subset: range,
    previous_memory: Tensor | None,
) -> Tensor:
    """Some positions of every sequence through all layers. tokens, positions (B, C) -> memory (B, Q, D)"""
    steps, at = fast.steps, slice(subset.start, None, subset.step)
    # kernels start on the current device, wherever their arguments are
    with torch.cuda.device_of(tokens):
        position = positions[:, at].flatten().contiguous()
        start, cos, sin = steps.begin_step(tokens[:, at].flatten(), fast.embedding, position, fast.frequencies)
        features = None
        if fast.memory_weight is not None and previous_memory is not None:
            features = steps.project(previous_memory.flatten(0, 1).contiguous(), fast.memory_weight)
        x = start
        for weights, span in zip(fast.layers, spans, strict=True):
            x, projected = steps.scale_norm_project(x, start, weights.scales, weights.stacked)
            queries = span.queries(subset)
            attended = steps.chunk_attend(
                projected, features, span.key, span.value, span.empty, queries, span.window, cos, sin, fast.config.heads
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

    def __init__(self, fast: FastDecoder, tokens: Tensor, state: DecoderState) -> None:
        self.fast, self.shape = fast, tokens.shape
        self.spans = [Span(ring, tokens.shape[1]) for ring in state.caches]
        self.tokens, self.positions = torch.zeros_like(tokens), torch.zeros_like(tokens)
        self.recordings: dict[tuple[range, bool], Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def replay(self, subset: range, previous_memory: Tensor | None) -> Tensor:
        key = subset, previous_memory is None
        if key not in self.recordings:
            self.recordings[key] = self.record(subset, previous_memory)
        recording = self.recordings[key]
        if recording.previous_memory is not None and previous_memory is not None:
            recording.previous_memory.copy_(previous_memory)
        recording.graph.replay()
        return recording.memory.clone()

    def record(self, subset: range, previous_memory: Tensor | None) -> Recording:
        """The pass is run once before, which compiles what it needs; run again, it writes the same."""
        given = None if previous_memory is None else previous_memory.clone()
        device = self.fast.device
        with torch.cuda.device(device):
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                positions_at_once(self.fast, self.tokens, self.positions, self.spans, subset, given)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                memory = positions_at_once(self.fast, self.tokens, self.positions, self.spans, subset, given)
        return Recording(graph, given, memory)


def recorded_passes(fast: FastDecoder, tokens: Tensor, state: DecoderState) -> RecordedPasses:
    """Those of the last shape are kept: one set of buffers is memory enough."""
    if fast.recorded_passes is None or fast.recorded_passes.shape != tokens.shape:
        fast.recorded_passes = None
        fast.recorded_passes = RecordedPasses(fast, tokens, state)
    return fast.recorded_passes
