"""One token per row in as few launches as it takes, by itself or from a CUDA graph."""

from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from maglev.errors import RequestError
from maglev.inference.gates import mean_gate
from maglev.model.attention import Block
from maglev.model.chunk import Chunk
from maglev.model.decoder import Decoder
from maglev.model.memory import Injection, MemoryProjections, OfEveryLayer, ResidualGate, ResidualProjection, Several
from maglev.model.state import DecoderState, RingCache
from maglev.ops.decode_steps import Backend, decode_steps, memory_logits
from maglev.ops.matrix import ARRIVALS, Matrix, WeightFormat, matrix

if TYPE_CHECKING:
    from maglev.inference.fast_read import RecordedPasses

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WARM_UPS = 2
# fewer tokens are stepped before a graph of the step is worth recording
LEAST_REPLAYED = 64
ALIGNED_ROWS = 8


class LayerWeights(NamedTuple):
    scales: Tensor  # (2,), residual and input scale
    stacked: Matrix  # (N, D): query, key, value, with memory the local gate and the memory gate, and rows of padding
    output: Matrix  # (D, H * Dh)
    up: Matrix  # (4 D, D)
    down: Matrix  # (D, 4 D)
    stream: Matrix | None  # (H, D) and rows of padding: the gates of a memory that enters the residual stream
    # which features of the memory are mixed into its keys and values, and which the gates above let in
    mixed: slice | None
    added: slice | None

    @property
    def matrices(self) -> list[Matrix]:
        own = [self.stacked, self.output, self.up, self.down]
        return own if self.stream is None else [*own, self.stream]


class FastDecoder:
    """`Decoder.step_` on the same state, five launches per layer; six where memory enters the residual stream.

    The weights are those of the decoder when this was made; the stacked matrices are copies. Steps of one FastDecoder
    go one after another, on one stream: they share counters. Threads take turns by `lock`.
    """

    def __init__(self, decoder: Decoder, backend: Backend | None = None, weights: WeightFormat = "plain") -> None:
        if not decoder.config.has_steps:
            raise RequestError(
                f"there are no fused steps for model.injection = {decoder.config.injection!r} and "
                f"model.delay = {decoder.config.delay}; use the decoder itself"
            )
        self.config = decoder.config
        self.weights = weights
        self.dtype, self.device = decoder.compute_dtype, decoder.device
        self.steps = decode_steps(backend, self.device, self.dtype)

        def weight(*parts: Tensor) -> Matrix:
            # cuBLAS is slow where a row of its result does not begin at 16 bytes
            rows = sum(part.shape[0] for part in parts)
            padding = parts[0].new_zeros(-rows % ALIGNED_ROWS, parts[0].shape[1])
            return matrix(torch.cat([*(part.detach() for part in parts), padding]).to(self.dtype), weights)

        # of the memory, for all layers at once
        features, columns = memory_rows(decoder)

        def layer_weights(layer: int, block: Block) -> LayerWeights:
            attention = block.attention
            parts = [attention.query_proj, attention.key_proj, attention.value_proj]
            if attention.gates is not None:
                parts += [attention.gates.local_gate, attention.gates.memory_gate]
            scales = torch.stack((decoder.scales.residual_scale[layer], decoder.scales.input_scale[layer]))
            return LayerWeights(
                scales=scales.detach().to(torch.promote_types(scales.dtype, torch.float32)),
                stacked=weight(*(part.weight for part in parts)),
                output=weight(attention.output_proj.weight),
                up=weight(block.mlp.up_proj.weight),
                down=weight(block.mlp.down_proj.weight),
                stream=weight(block.stream.memory_gate.weight) if isinstance(block.stream, ResidualGate) else None,
                mixed=columns[layer][0],
                added=columns[layer][1],
            )

        self.layers: list[LayerWeights] = []
        for layer, block in enumerate(decoder.blocks):
            assert isinstance(block, Block)
            self.layers.append(layer_weights(layer, block))
        self.embedding = decoder.embedding.weight.detach().to(self.dtype).contiguous()
        self.readout_weight = matrix(decoder.readout.weight.detach().to(self.dtype), weights)
        self.frequencies = decoder.frequencies
        self.memory_weight = weight(*features) if features else None
        self.arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=self.device)
        self.recorded_passes: dict[tuple[int, int], RecordedPasses] = {}  # of reading, the last one used last
        self.lock = RLock()

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def weight_bytes(self) -> int:
        """What a step with its readout reads whatever the batch: everything but rows of the embedding."""
        matrices = [each for layer in self.layers for each in layer.matrices]
        matrices += [self.readout_weight] if self.memory_weight is None else [self.readout_weight, self.memory_weight]
        scales = sum(layer.scales.numel() * layer.scales.element_size() for layer in self.layers)
        return scales + sum(each.nbytes for each in matrices)

    def initial_state(self, batch_size: int) -> DecoderState:
        return DecoderState.zeros(self.config, batch_size, self.dtype, self.device)

    def chunk(self, tokens: Tensor, state: DecoderState, room: int | None = None) -> Chunk:
        """Tokens (B, C) after `state`, on the kernels of steps."""
        from maglev.inference.fast_read import FastChunk

        return FastChunk(self, tokens, state, room)

    @torch.no_grad()
    def step_(self, tokens: Tensor, state: DecoderState, gates: list[Tensor] | None = None) -> Tensor:
        """Read one token per row and rewrite `state`. tokens (B,) -> memory (B, D)"""
        memory, position = torch.empty_like(state.memory), torch.empty_like(state.position)
        with self.lock:
            self.advance(tokens, state, memory, position, gates)
        state.memory, state.position = memory, position
        return memory

    def step_on_(self, tokens: Tensor, state: DecoderState) -> list[Tensor]:
        """tokens (B, T), one after another, from a graph where that pays. -> the memories of each, (B, 1, D)"""
        rows, count = tokens.shape
        if self.device.type != "cuda" or count < LEAST_REPLAYED:
            return [self.step_(token, state)[:, None] for token in tokens.T]
        found: list[list[Tensor]] = []
        for first in range(0, rows, max(BUCKETS)):
            part = tokens[first : first + max(BUCKETS)]
            stepper = GraphStepper(self, part.shape[0])
            stepper.begin(DecoderState.join([state.row(first + row) for row in range(part.shape[0])]))
            found.append([])
            for token in part.T:
                stepper.step(token)
                found[-1].append(stepper.buffers.memory[: part.shape[0], None].clone())
            at = torch.arange(first, first + part.shape[0], device=part.device)
            state.put_rows_(at, stepper.state())
        return [torch.cat(parts) for parts in zip(*found)]

    @torch.no_grad()
    def readout(self, memory: Tensor) -> Tensor:
        """Soft-capped logits in float32 or better. (B, D) -> (B, V)"""
        with torch.cuda.device_of(memory):
            return self.steps.read_out(memory, self.readout_weight, self.config.logit_softcap)

    def release(self) -> None:
        """Let go of the passes that were recorded for the last shape of chunks."""
        with self.lock:
            self.recorded_passes.clear()

    def advance(
        self,
        tokens: Tensor,
        state: DecoderState,
        memory_out: Tensor,
        position_out: Tensor,
        gates: list[Tensor] | None = None,
    ) -> None:
        """The step itself: rings in place, memory and position into tensors that may be the state's own.

        `gates` gets the logits (B, G) of every layer's memory gate, where there are any.
        """
        steps, position, config = self.steps, state.position, self.config
        # kernels start on the current device, wherever their arguments are
        with torch.cuda.device_of(tokens):
            start, cos, sin = steps.begin_step(tokens, self.embedding, position, self.frequencies)
            features = None if self.memory_weight is None else steps.project(state.memory, self.memory_weight)
            x = start
            for weights, ring in zip(self.layers, state.caches, strict=True):
                x, projected, mixed, logits = self.enter(x, start, weights, features)
                if gates is not None and logits is not None:
                    gates.append(logits)
                attended = steps.ring_attend(
                    projected, mixed, ring.key, ring.value, position, cos, sin, self.arrivals, config.heads
                )
                x = steps.project_add(x, attended, weights.output)
                x = steps.project_add(x, steps.norm_project_relu2(x, weights.up), weights.down)
            steps.finish_step(x, position, memory_out, position_out)

    def enter(
        self, x: Tensor, start: Tensor, weights: LayerWeights, features: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """A layer up to its attention. -> the stream, what attention takes of it, and of the memory, and the logits
        (B, G) of the memory gates"""
        steps, config, logits = self.steps, self.config, None
        if features is None or weights.stream is None or weights.added is None:
            x, projected = steps.scale_norm_project(x, start, weights.scales, weights.stacked)
        else:
            x, logits = steps.scale_norm_project(x, start, weights.scales, weights.stream)
            added = features[:, weights.added]
            x, projected = steps.gate_norm_project(x, added, logits, config.heads, weights.stacked)
            logits = logits[:, : config.heads]
        if features is None or weights.mixed is None:
            return x, projected, None, logits
        logits = memory_logits(projected, config.kv_heads, config.head_dim, config.heads)
        return x, projected, features[:, weights.mixed], logits


def memory_rows(decoder: Decoder) -> tuple[list[Tensor], list[tuple[slice | None, slice | None]]]:
    """What makes features of a memory, one above the other: [W_k^rec; W_v^rec] for keys and values, W for the residual
    stream. Beside it, for every layer, where those of the two are that it takes."""
    rows: list[Tensor] = []
    found: dict[type[Injection], list[slice]] = {}
    injection = decoder.injection
    parts = [*injection.parts.values()] if isinstance(injection, Several) else [injection] if injection else []
    for part in parts:
        for each in part.layers if isinstance(part, OfEveryLayer) else [part]:
            first = sum(len(above) for above in rows)
            if isinstance(each, MemoryProjections):
                rows += [each.memory_key_proj.weight, each.memory_value_proj.weight]
            else:
                assert isinstance(each, ResidualProjection)
                rows.append(each.residual_proj.weight)
            found.setdefault(type(each), []).append(slice(first, sum(len(above) for above in rows)))

    def of_layer(kind: type[Injection], layer: int) -> slice | None:
        own = found.get(kind, [])
        return own[layer % len(own)] if own else None

    layers = range(decoder.config.depth)
    return rows, [(of_layer(MemoryProjections, layer), of_layer(ResidualProjection, layer)) for layer in layers]


def fastest(decoder: Decoder, weights: WeightFormat = "plain") -> "Decoder | FastDecoder":
    """What steps and reads on the decoder's device: kernels on a GPU, where there are some for this network.

    A CPU takes the decoder itself: the order of work that suits kernels gains next to nothing there.
    """
    fused = decoder.device.type == "cuda" and decoder.config.has_steps
    return FastDecoder(decoder, weights=weights) if fused else decoder


def bucket_for(batch: int) -> int:
    """The smallest captured batch that holds this many rows."""
    if not 1 <= batch <= max(BUCKETS):
        raise RequestError(f"a batch of {batch} rows has no CUDA graph; use 1 to {max(BUCKETS)} rows")
    return min(bucket for bucket in BUCKETS if bucket >= batch)


def first_rows(state: DecoderState, rows: int) -> DecoderState:
    """The same memory, fewer rows: what is written to one is seen in the other."""
    caches = [RingCache(cache.key[:rows], cache.value[:rows]) for cache in state.caches]
    return DecoderState(caches, state.memory[:rows], state.position[:rows], state.older[:rows])


def fill_rows(into: DecoderState, state: DecoderState) -> None:
    """Copy `state` into the first rows of `into`; the others are padding and start anew.

    Rows never meet, so what a padding row's ring still holds does not matter as long as it is a number.
    """
    rows = state.batch_size
    for target, source in zip(into.caches, state.caches, strict=True):
        target.key[:rows].copy_(source.key)
        target.value[:rows].copy_(source.value)
    into.memory[:rows].copy_(state.memory)
    into.position[:rows].copy_(state.position)
    into.memory[rows:].zero_()
    into.position[rows:].zero_()


@dataclass
class CapturedStep:
    graph: torch.cuda.CUDAGraph
    # rewritten by every replay
    logits: Tensor  # (bucket, V)
    gates: Tensor | None  # (bucket,), where it was asked for and the network has some


class GraphStepper:
    """Steps with readout from CUDA graphs, one graph per bucket of rows, all on one set of buffers.

    `begin` copies a state in, `step` advances it, `state` copies it out. With `greedy`, each step ends by choosing the
    most likely tokens, and `step()` without tokens goes on with them: nothing then waits for the host.

    Watched steps, which tell the gates too, have graphs of their own: the others do nothing for them.
    """

    def __init__(self, decoder: FastDecoder, largest: int = 1, *, greedy: bool = False) -> None:
        if decoder.device.type != "cuda" or not torch.cuda.is_available():
            raise RequestError(
                f"CUDA graphs need a CUDA GPU, the weights are on {decoder.device}; use FastDecoder.step_"
            )
        self.decoder, self.greedy = decoder, greedy
        bucket = bucket_for(largest)
        self.buffers = decoder.initial_state(bucket)
        self.tokens = torch.zeros(bucket, dtype=torch.int64, device=decoder.device)
        # by bucket, and whether they are watched
        self.captured: dict[tuple[int, bool], CapturedStep] = {}
        self.last: CapturedStep | None = None
        self.pool = torch.cuda.graph_pool_handle()
        self.rows = 0

    @torch.inference_mode()
    def begin(self, state: DecoderState, *, watched: bool = False) -> None:
        """Go on from here. The graphs are captured first, since trying them out rewrites the buffers."""
        rows, room = state.batch_size, self.tokens.shape[0]
        if rows > room:
            raise RequestError(f"{rows} rows do not fit into {room}; make GraphStepper with largest={rows}")
        bucket = bucket_for(rows)
        with self.decoder.lock:
            for key in [(bucket, False), (bucket, True)] if watched else [(bucket, False)]:
                if key not in self.captured:
                    self.captured[key] = self.capture(*key)
            fill_rows(first_rows(self.buffers, bucket), state)
            self.tokens[rows:bucket].zero_()
        self.rows, self.last = rows, None

    @torch.inference_mode()
    def step(self, tokens: Tensor | None = None, *, watched: bool = False) -> Tensor:
        """tokens (B,) -> logits (B, V) in float32, valid until the next step."""
        if not self.rows:
            raise RequestError("GraphStepper has no state yet; call begin(state) first")
        if tokens is None and not self.greedy:
            raise RequestError("only a greedy GraphStepper goes on without tokens; give tokens or greedy=True")
        if tokens is not None and tokens.shape != (self.rows,):
            raise RequestError(f"tokens have shape {tuple(tokens.shape)}; the state has {self.rows} rows")
        captured = self.captured.get((bucket_for(self.rows), watched))
        if captured is None:
            raise RequestError("these steps are not watched; call begin(state, watched=True) first")
        with self.decoder.lock:
            if tokens is not None:
                self.tokens[: self.rows].copy_(tokens)
            captured.graph.replay()
        self.last = captured
        return captured.logits[: self.rows]

    def gates(self) -> Tensor | None:
        """(B,), how far the memory gates stood open in the last step, if that was watched."""
        found = None if self.last is None else self.last.gates
        return None if found is None else found[: self.rows]

    @torch.inference_mode()
    def logits(self) -> Tensor:
        """(B, V), of the tokens after the last ones read: what a state that was just copied in goes on with."""
        # padding too: a product may add up in another order where it has other rows
        return self.decoder.readout(self.buffers.memory[: bucket_for(self.rows)])[: self.rows]

    def state(self) -> DecoderState:
        """A copy of where the rows are now."""
        return first_rows(self.buffers, self.rows).clone()

    def memory(self) -> Tensor:
        """(B, D), of the last tokens read; a copy."""
        return self.buffers.memory[: self.rows].clone()

    def row(self, index: int) -> DecoderState:
        """A copy of one of them, as a batch of one."""
        return self.buffers.row(index)

    @torch.inference_mode()
    def put(self, index: int, state: DecoderState) -> None:
        """One row begins anew; the others go on. In place, since the graphs are on these buffers."""
        assert 0 <= index < self.rows and state.batch_size == 1
        with self.decoder.lock:
            for target, source in zip(self.buffers.caches, state.caches, strict=True):
                target.key[index].copy_(source.key[0])
                target.value[index].copy_(source.value[0])
            self.buffers.memory[index].copy_(state.memory[0])
            self.buffers.position[index].copy_(state.position[0])

    def end(self) -> None:
        """The buffers stay, since the graphs are on them."""
        self.rows, self.last = 0, None

    @property
    def nbytes(self) -> int:
        logits = sum(step.logits.numel() * step.logits.element_size() for step in self.captured.values())
        return self.buffers.nbytes + logits

    @torch.inference_mode()
    def capture(self, bucket: int, watched: bool) -> CapturedStep:
        buffers, tokens = first_rows(self.buffers, bucket), self.tokens[:bucket]

        def work() -> tuple[Tensor, Tensor | None]:
            gates: list[Tensor] | None = [] if watched else None
            self.decoder.advance(tokens, buffers, buffers.memory, buffers.position, gates)
            logits = self.decoder.readout(buffers.memory)
            if self.greedy:
                torch.argmax(logits, dim=-1, out=tokens)
            return logits, mean_gate(gates or [])

        device = self.decoder.device
        with self.decoder.lock, torch.cuda.device(device):
            # kernels are compiled and cuBLAS gets its workspace before anything is recorded
            side = torch.cuda.Stream(device)
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    work()
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # what other threads ask of the GPU meanwhile is no part of this and no error
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                logits, gates = work()
        return CapturedStep(graph, logits, gates)
