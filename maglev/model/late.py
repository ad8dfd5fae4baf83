"""A decoder for many small steps in a row. Its matrices get their gradients when backward is through all of them, each
by one product over all steps; a step's own backward is left with what the step before it needs.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from maglev.model.attention import Attention, Block
from maglev.model.decoder import Decoder
from maglev.model.layers import ALIGNED, Linear
from maglev.model_config import ModelConfig
from maglev.ops.inject import rms_norm
from maglev.ops.recompute import KEPT

NOTHING = torch.empty(0)


class Late(Linear):
    """Several matrices of one input as one, (outputs, inputs), with zeros up to an aligned width."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        nn.Module.__init__(self)
        # not to be taken for its own
        self.sources = (*linears,)
        self.inner = linears[0].product
        self.sizes = [len(linear.weight) for linear in linears]
        self.filler = -sum(self.sizes) % ALIGNED if len(linears) > 1 else 0
        self.weight: Tensor  # type: ignore[assignment]
        # of the step that is under way: what its output's gradient goes to, and what came in
        self.tap: Tensor
        self.given: Tensor
        # of all steps
        self.taps: tuple[Tensor, ...]
        self.rows: list[Tensor]
        self.end()

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        self.given = x.detach()
        return Tapped.apply(self.inner(x, weight), self.tap)

    def begin(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        """`shapes` (B, C) of all steps."""
        parameters = [linear.weight for linear in self.sources]
        weights = [each.detach().to(dtype) for each in parameters]
        if len(weights) > 1:
            weights = [torch.cat([*weights, weights[0].new_zeros(self.filler, weights[0].shape[1])])]
        self.weight = weights[0]
        self.rows = []
        self.taps = Taps.apply(self.rows, self.weight, shapes, *parameters)

    def note(self) -> None:
        """What the step was given."""
        self.rows.append(self.given)

    def end(self) -> None:
        """What is left is backward's, and goes with it."""
        self.taps, self.rows = (), []
        self.tap = self.weight = self.given = NOTHING


class Tapped(torch.autograd.Function):
    """A product as it is, whose gradient goes to the tap too."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, tap: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class Taps(torch.autograd.Function):
    """Parameters, one above the other -> a tap for every step: never read, but their gradients are those of what the
    steps made of `rows`, which is (B, C, inputs) of every step by then."""

    @staticmethod
    def forward(
        ctx: Any, rows: list[Tensor], weight: Tensor, shapes: Sequence[tuple[int, ...]], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.rows = rows
        ctx.sizes, ctx.dtypes = [len(each) for each in parameters], [each.dtype for each in parameters]
        ctx.set_materialize_grads(False)
        return tuple(weight.new_empty(1).expand(*shape, len(weight)) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [(own, came) for own, came in zip(gradients, ctx.rows, strict=False) if own is not None]
        if not found:
            return (None,) * (3 + len(ctx.sizes))
        pulls, inputs = (torch.cat([each.flatten(0, -2) for each in some]) for some in zip(*found, strict=True))
        parts = (pulls.T @ inputs.to(pulls.dtype))[: sum(ctx.sizes)].split(ctx.sizes)
        return (None, None, None, *(part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True)))


class LateAttention(Attention):
    """Queries, keys, values and gates from one matrix."""

    def __init__(self, config: ModelConfig, linears: Sequence[Linear]) -> None:
        super().__init__(config)
        del self.query_proj, self.key_proj, self.value_proj
        self.gates = None if self.gates is None else nn.Module()  # type: ignore[assignment]
        self.packed = Late(linears)

    def pack(self, x: Tensor, gated: bool) -> Tensor:
        return self.packed(rms_norm(x))

    def project(self, x: Tensor, gated: bool) -> tuple[Tensor, ...]:
        *parts, _ = self.pack(x, gated).split([*self.packed.sizes, self.packed.filler], -1)
        heads = (each.unflatten(-1, (-1, self.head_dim)) for each in parts[:3])
        return (*heads, *parts[3:])


class LateDecoder(Decoder):
    """Of the parameters of `decoder`, of which it has none itself, for `run` between `begin` and `end`."""

    def __init__(self, decoder: Decoder) -> None:
        with torch.device("meta"):
            super().__init__(decoder.config)
            for mine, block in zip(self.blocks, decoder.blocks, strict=True):
                assert isinstance(block, Block)
                mine.attention = LateAttention(decoder.config, block.attention.linears(True))
        del self.readout, self.embedding, self.scales
        for name, linear in [*self.named_modules()]:
            if isinstance(linear, Linear) and not isinstance(linear, Late):
                parent, _, own = name.rpartition(".")
                setattr(self.get_submodule(parent), own, Late([cast("Linear", decoder.get_submodule(name))]))
        self.embedding, self.scales = decoder.embedding, decoder.scales
        # not to be taken for its own
        self.source = (decoder,)
        self.late = [module for module in self.modules() if isinstance(module, Late)]
        self.traits = traits_of(decoder)
        if decoder.compiled:
            for part in (*self.blocks, self.injection):
                part.compile(dynamic=False)

    def begin(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Of steps with tokens of these shapes (B, C)."""
        self.frequencies = self.source[0].frequencies
        for late in self.late:
            late.begin(shapes, self.compute_dtype)

    def run_step(self, number: int, *given: Any) -> Tensor:
        """`run` as one of them."""
        for late in self.late:
            late.tap = late.taps[number]
        memory = self.run(*given)
        for late in self.late:
            late.note()
        return memory

    def end(self) -> None:
        for late in self.late:
            late.end()


def late_of(decoder: Decoder, before: LateDecoder | None = None) -> LateDecoder | None:
    """`before`, where it still is as `decoder` is. None where parameters are divided over ranks, where somebody else
    has a hand in the blocks, or where backward is to run parts of them again."""
    if any(not isinstance(block, Block) or block.keeping is not KEPT or altered(block) for block in decoder.blocks):
        return None
    if divided(decoder):
        return None
    return before if before is not None and before.traits == traits_of(decoder) else LateDecoder(decoder)


def divided(decoder: Decoder) -> bool:
    # once a process group is there its import costs nothing, and there is none without one
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.tensor import DTensor

    tensors: list[Tensor] = [*decoder.parameters()]
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def altered(block: Block) -> bool:
    """Parameters may be gathered, or activations dropped, by what is hung on a module or put in its place."""
    return "forward" in vars(block) or any(
        module._forward_pre_hooks or module._forward_hooks or module._backward_hooks for module in block.modules()
    )


def traits_of(decoder: Decoder) -> tuple[Any, ...]:
    return decoder.compiled, *(module.product for module in decoder.modules() if isinstance(module, Linear))
