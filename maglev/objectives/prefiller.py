"""The prefiller Q: a causal stack that sees the whole history and produces all memory targets in one pass.

It belongs to training alone; what is deployed never imports this file.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from maglev.config import SeparateMaglevConfig, SharedMaglevConfig, Sharing, prefiller_config, sharing_of
from maglev.model.attention import Attention, Block
from maglev.model.decoder import Decoder, Scales, attend_in_parallel, run_blocks
from maglev.model.layers import MLP, Embedding, Linear
from maglev.model_config import ModelConfig, tile_windows
from maglev.objectives.pretrained import PretrainedPrefiller
from maglev.ops.inject import rms_norm
from maglev.ops.rotation import rotation, turn_frequencies


class SharedPrefiller(nn.Module):
    """The plain Transformer over the decoder's blocks: no injection, no gates, residual and input scales of its own."""

    def __init__(self, config: ModelConfig, pattern: str) -> None:
        super().__init__()
        self.windows = tile_windows(pattern, config.depth, config.window, config.context)
        self.config = config
        self.scales = Scales(config.depth)

    def forward(
        self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        """m'_{1:T}: (B, T) -> (B, T, D)."""
        x = decoder.embedding(tokens) if embedded is None else embedded
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = rotation(positions, decoder.frequencies, x.dtype)
        kernel = decoder.attention_kernel
        attends = attend_in_parallel(self.config, self.windows, tokens, starts, dtype=x.dtype, kernel=kernel)
        return run_blocks(x, [*decoder.blocks], self.scales, angles, None, attends)


class OwnParts(nn.ModuleDict):
    """What a layer of Q has of its own where it borrows the rest: its attention, its MLP, or neither."""

    def __init__(self, config: ModelConfig, attention: bool, mlp: bool) -> None:
        own: dict[str, nn.Module] = {"attention": Attention(config)} if attention else {}
        super().__init__(own | ({"mlp": MLP(config.width)} if mlp else {}))

    def within(self, lender: nn.Module) -> Callable[..., Tensor]:
        """The decoder's block, with these in the place of its own."""
        own = dict(self.items())
        return lambda *given: lender(*given, own.get("attention"), own.get("mlp"))


class SeparatePrefiller(nn.Module):
    """Blocks of its own, on the decoder's embedding. With another width, one matrix leads in and one leads out.

    What `objective.sharing` lists is the decoder's, borrowed for each call.
    """

    def __init__(self, config: ModelConfig, objective: SeparateMaglevConfig) -> None:
        super().__init__()
        own, sharing = prefiller_config(config, objective), sharing_of(config, objective)
        self.config, self.windows = own, own.windows
        self.blocks = nn.ModuleList()
        for layer in range(own.depth):
            parts = layer not in sharing.attention, layer not in sharing.mlp
            self.blocks.append(Block(own) if all(parts) else OwnParts(own, *parts))
        self.scales = Scales(own.depth)
        bridged = own.width != config.width
        self.embedding = None if sharing.embedding else Embedding(config.vocab_size, own.width)
        self.entry_proj = Linear(config.width, own.width) if bridged and sharing.embedding else None
        self.exit_proj = Linear(own.width, config.width) if bridged else None
        self.register_buffer("frequencies", turn_frequencies(own.head_dim, own.rope_base), persistent=False)
        self.frequencies: Tensor

    def forward(
        self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        """m'_{1:T}: (B, T) -> (B, T, D)."""
        if self.embedding is not None:
            x = self.embedding(tokens).to(decoder.compute_dtype)
        else:
            x = decoder.embedding(tokens) if embedded is None else embedded
        if self.entry_proj is not None:
            x = rms_norm(self.entry_proj(x))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = rotation(positions, self.frequencies, x.dtype)
        kernel = decoder.attention_kernel
        attends = attend_in_parallel(self.config, self.windows, tokens, starts, dtype=x.dtype, kernel=kernel)
        blocks = [
            block.within(decoder.blocks[layer]) if isinstance(block, OwnParts) else block
            for layer, block in enumerate(self.blocks)
        ]
        memory = run_blocks(x, blocks, self.scales, angles, None, attends)
        return memory if self.exit_proj is None else rms_norm(self.exit_proj(memory))


Prefiller = SharedPrefiller | SeparatePrefiller | PretrainedPrefiller


def build_prefiller(model: ModelConfig, objective: SharedMaglevConfig | SeparateMaglevConfig) -> Prefiller:
    """With its weights unset."""
    if isinstance(objective, SharedMaglevConfig):
        return SharedPrefiller(model, objective.prefiller_pattern)
    if objective.prefiller_from:
        return PretrainedPrefiller(model, objective)
    layers = frozenset(range(model.depth))
    same_depth = prefiller_config(model, objective).depth == model.depth
    if same_depth and sharing_of(model, objective) == Sharing(True, layers, layers):
        return SharedPrefiller(model, objective.prefiller_pattern)
    return SeparatePrefiller(model, objective)
