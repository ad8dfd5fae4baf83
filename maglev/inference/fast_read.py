"""A chunk of a prompt on the kernels of decoding: its positions are the rows of one step."""

import torch
from torch import Tensor

from maglev.inference.fast_step import FastDecoder
from maglev.model.chunk import Chunk
from maglev.model.state import DecoderState


class FastChunk(Chunk):
    def __init__(self, fast: FastDecoder, tokens: Tensor, state: DecoderState) -> None:
        super().__init__(tokens, state)
        self.fast = fast

    def compute(self, subset: range, previous_memory: Tensor | None) -> Tensor:
        fast, steps, at = self.fast, self.fast.steps, slice(subset.start, None, subset.step)
        with torch.cuda.device_of(self.tokens):
            position = self.positions[:, at].flatten()
            start, cos, sin = steps.begin_step(self.tokens[:, at].flatten(), fast.embedding, position, fast.frequencies)
            features = None
            if fast.memory_weight is not None and previous_memory is not None:
                features = steps.project(previous_memory.flatten(0, 1), fast.memory_weight)
            x = start
            for weights, span in zip(fast.layers, self.spans, strict=True):
                x, projected = steps.scale_norm_project(x, start, weights.scales, weights.stacked)
                attended = steps.chunk_attend(
                    projected,
                    features,
                    span.key,
                    span.value,
                    span.empty,
                    span.queries(subset),
                    span.window,
                    cos,
                    sin,
                    fast.config.heads,
                )
                x = steps.project_add(x, attended, weights.output)
                x = steps.project_add(x, steps.norm_project_relu2(x, weights.up), weights.down)
            memory = torch.empty_like(x)
            steps.finish_step(x, position, memory, torch.empty_like(position))
        return memory.unflatten(0, (self.tokens.shape[0], -1))
