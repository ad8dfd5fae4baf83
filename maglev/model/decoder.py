"""The decoder P: all positions at once on given memories, or one step at a time on its own."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from maglev.model.attention import Attend, Block
from maglev.model.layers import Embedding, Readout
from maglev.model.memory import Features, Rotation, injection_of, shift_by
from maglev.model.state import DecoderState
from maglev.model_config import ModelConfig
from maglev.ops.attention import plan_attention, windowed_attention
from maglev.ops.inject import rms_norm
from maglev.ops.rotation import rotation, turn_frequencies


class Scales(nn.Module):
    """Residual and input scale of every layer: block l begins with x <- a_l x + b_l x_0."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.residual_scale = nn.Parameter(torch.empty(depth))
        self.input_scale = nn.Parameter(torch.empty(depth))


def run_blocks(
    x: Tensor,
    blocks: Sequence[Callable[..., Tensor]],
    scales: Scales,
    rotation: Rotation,
    memory: Sequence[Features] | None,
    attends: Sequence[Attend],
) -> Tensor:
    """Embedded tokens through a stack to its final normalised state. (B, T, D) -> (B, T, D)

    `memory` holds the features of every layer, or of all of them at once.
    """
    entries = zip(scales.residual_scale.unbind(), scales.input_scale.unbind(), strict=True)
    # another object than x: given one tensor twice, the compiler would build the first layer apart
    start = x.view_as(x)
    features = [None] * len(blocks) if memory is None else [*memory] * (len(blocks) // len(memory))
    for block, entry, own, attend in zip(blocks, entries, features, attends, strict=True):
        x = block(x, start, entry, rotation, own, attend)
    return rms_norm(x)


def attend_in_parallel(
    config: ModelConfig,
    windows: Sequence[int],
    tokens: Tensor,
    starts: Tensor | None,
    *,
    dtype: torch.dtype,
    kernel: str | None = None,
    entries: int = 1,
) -> list[Attend]:
    """For all positions of tokens (B, T), with the heads of `config`."""
    plan = partial(
        plan_attention,
        starts=starts,
        dtype=dtype,
        head_dim=config.head_dim,
        heads=(config.heads, config.kv_heads),
        kernel=kernel,
        entries=entries,
    )
    plans = {window: plan(window, tokens.shape[1], tokens.device) for window in set(windows)}
    return [partial(windowed_attention, plan=plans[window]) for window in windows]


class Decoder(nn.Module):
    """Keyword `starts` (B, T) is the first position that each position may attend to, for rows of many documents."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # what training passes take in place of their own choice
        self.attention_kernel: str | None = None
        # whether they are compiled
        self.compiled = False
        self.embedding = Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.scales = Scales(config.depth)
        self.injection = injection_of(config)
        self.readout = Readout(config.width, config.vocab_size, config.logit_softcap)
        frequencies = turn_frequencies(config.head_dim, config.rope_base)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.embedding.compute_dtype or self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(
        self,
        tokens: Tensor,
        previous_memory: Tensor | None = None,
        *,
        starts: Tensor | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T), previous_memory (B, T, D) from `shift_right` -> memory (B, T, D). With a delay, older memories
        may stand beside them, (B, T, 2 D); else they are found among them, which is right for rows where memory begins
        anew nowhere: where it does, give `shift_right` the delay.

        A decoder without memory ignores `previous_memory`. None is not zeros: it is the stack without gates. Who has
        the tokens' embeddings already gives them along.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        config = self.config
        entries = 1 if previous_memory is None else config.entries
        if previous_memory is not None and config.delay > 1 and previous_memory.shape[-1] == config.width:
            previous_memory = torch.cat((previous_memory, shift_by(previous_memory, None, config.delay - 1)), dim=-1)
        attends = attend_in_parallel(
            config,
            config.windows,
            tokens,
            starts,
            dtype=self.compute_dtype,
            kernel=self.attention_kernel,
            entries=entries,
        )
        return self.run(tokens, positions, previous_memory, attends, embedded)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        previous_memory: Tensor | None,
        attends: Sequence[Attend],
        embedded: Tensor | None = None,
    ) -> Tensor:
        """Any subset of positions, with keys and values wherever `attends` keeps them. positions (T,) or (B, T);
        previous_memory (B, T, D), with a delay (B, T, 2 D)"""
        x = self.embedding(tokens) if embedded is None else embedded
        angles = rotation(positions, self.frequencies, x.dtype)
        features = None
        if self.injection is not None and previous_memory is not None:
            features = self.injection(previous_memory.to(x.dtype), angles)
        return run_blocks(x, [*self.blocks], self.scales, angles, features, attends)

    def initial_state(self, batch_size: int) -> DecoderState:
        return DecoderState.zeros(self.config, batch_size, self.compute_dtype, self.device)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Read one token per row. tokens (B,) -> memory (B, D) and the next state; `state` stays as it was."""
        following = state.clone()
        return self.step_(tokens, following), following

    def step_(self, tokens: Tensor, state: DecoderState) -> Tensor:
        """`step` that rewrites `state` in place: no copy of the rings."""
        attends = [cache.attend_at(state.position, self.config.entries) for cache in state.caches]
        memory = self.run(tokens[:, None], state.position[:, None], state.previous_memory, attends)[:, 0]
        state.push_(memory)
        return memory
