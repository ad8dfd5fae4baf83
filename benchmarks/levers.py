"""The levers of the search for `maglev-closed` that are no settings of it, as one more recipe of every verb: `levers`.

    PYTHONPATH=. python3 benchmarks/levers.py eval recall levers --set objective.noise=0.2 --set objective.rollout=32
    PYTHONPATH=. python3 benchmarks/levers.py train levers --data DATA --out RUN --depth 8 --set objective.own_share=0.5
    PYTHONPATH=. python3 benchmarks/recall.py "levers objective.free=3 objective.stop=carried" maglev-closed --seeds 0 1

As it stands it is `maglev-closed`. What is its own are the fields of `LeversConfig`; `python3 benchmarks/levers.py info
levers` tells what a step of it costs.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from maglev import objectives
from maglev.__main__ import main
from maglev.config import OBJECTIVE_KINDS, ClosedMaglevConfig, RunConfig
from maglev.model.attention import Attend
from maglev.model.decoder import Decoder, Scales, attend_in_parallel
from maglev.model.layers import MLP, Linear, Readout
from maglev.model.memory import Features, Rotation
from maglev.model.state import DecoderState
from maglev.model_config import ModelConfig
from maglev.objectives.closed_loop import ClosedLoopObjective
from maglev.objectives.losses import WHOLE_ROWS, Documents, Losses, next_token_loss, token_mean
from maglev.objectives.prefiller import Prefiller, SharedPrefiller, build_prefiller
from maglev.objectives.sweeps import Sweeps, scatter
from maglev.ops.inject import rms_norm
from maglev.ops.rotation import rotation
from maglev.recipes import RECIPES, Recipe
from maglev.values import require

STOPS = ("carried", "target", "own_target", "memory")


@dataclass(frozen=True)
class LeversConfig(ClosedMaglevConfig):
    """P goes over `own_share` of a batch's rows `passes` times on its own memories, every `rollout`-th position at a
    time: a rollout of 1 is a settling pass. `rollout_start` of training goes without, no passes are Maglev's objective
    with Q's own loss.

    rollout_from: how long rollouts are at first; up to `rollout` they double in even parts of the first half of what is
    left of training. 0 is `rollout` from the beginning.
    free: passes before that without gradient, which bring the memories to where the loop would have them.
    start: what the first of all these reads: P's memories on Q's, or `zeros`.
    own_share_end, consistency_end: what `own_share` and `consistency_weight` have become at the end of training, in a
    straight line; below 0 they stay.
    own_consistency, late_consistency: the consistency's weight in passes on own memories, and in the lifted pass once
    there are such; below 0 they are `consistency_weight`.
    blank: share of the rows whose lifted pass reads zeros in place of Q's memories.
    rise: pass i of n counts (i / n)^rise; 0 is all alike, 20 the last alone.
    late_lifted, late_prefiller: what the lifted pass, and Q's own loss in place of `prefiller_weight`, count once P
    goes over rows on its own memories; the second below 0 stays.
    own_next_token: how much the next token counts in these passes; at 0 Q's memories alone teach.
    stop: where no gradient flows. `carried`: into the memories that a pass on own memories reads; `target`: into Q, to
    bring its memories to P's, or `own_target`, in these passes alone; `memory`: into P, to bring its memories to Q's.
    write_gate: m_t = a m_{t-1} + (1 - a) h_t, with a of every channel from h_t; at the start sigmoid(-4) in the first
    channel to sigmoid(write_gate) in the last. 0 is no gate. write_both: Q's memories are written the same way, by the
    same gate, so that what P is to come near is something that P could have kept.
    carry: m_t = norm(h_t + s m_{t-1}), s of every channel, at the start `carry`: what is in m stays unless something is
    written over it. 0 is none. With write_both Q's memories are carried on the same way.
    tap: what is carried is the stream before the last `tap` blocks, for Q too; what is predicted is behind them: they
    are free to write an answer over what is to be kept. The consistency is of both. 0 is the paper's, one state.
    head: an MLP between memory and readout, for Q too, so that what is predicted need not stand in what is carried.
    snap: what P reads is a memory with every channel at the nearest multiple of this, so that an error below half of it
    is gone with the next step; gradients go past it. 0 is the memory as it was written.
    groups: memories of both networks are normalised in so many groups of channels, each by itself, so that what is
    written in one of them, an answer, makes nothing smaller in the others. 1 is the paper's.
    cut: every so many tokens P's windows begin anew in `cut_share` of the rows, and only memory goes on: what is needed
    of what came before has to be in it. Q sees all. 0 is no cuts.
    """

    kind: Literal["levers"] = "levers"  # type: ignore[assignment]
    passes: int = 1
    rollout_from: int = 0
    free: int = 0
    start: Literal["lifted", "zeros"] = "lifted"
    own_share: float = 1.0
    own_share_end: float = -1.0
    consistency_end: float = -1.0
    own_consistency: float = -1.0
    late_consistency: float = -1.0
    blank: float = 0.0
    rise: float = 0.0
    late_lifted: float = 1.0
    late_prefiller: float = -1.0
    own_next_token: float = 1.0
    stop: str = ""
    write_gate: float = 0.0
    write_both: bool = False
    carry: float = 0.0
    tap: int = 0
    head: bool = False
    snap: float = 0.0
    groups: int = 1
    cut: int = 0
    cut_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "passes",
            "rollout_from",
            "free",
            "carry",
            "tap",
            "snap",
            "rise",
            "late_lifted",
            "own_next_token",
            "own_share",
            "blank",
            "cut",
            "cut_share",
        ):
            value = getattr(self, name)
            require(value >= 0, f"objective.{name} is {value}; it must not be negative")
        for name in ("own_share", "own_share_end", "blank", "cut_share"):
            value = getattr(self, name)
            require(value <= 1, f"objective.{name} is {value}; it is a share, at most 1")
        require(self.groups >= 1, f"objective.groups is {self.groups}; it must be at least 1")
        kinds = [name for name in ("write_gate", "carry", "tap", "snap") if getattr(self, name)]
        kinds += ["groups"] if self.groups > 1 else []
        require(len(kinds) <= 1, f"objective.{' and objective.'.join(kinds)} exclude each other; give one of them")
        require(
            not self.tap or not (self.head or self.write_both),
            "objective.tap goes without head and write_both; leave them away",
        )
        own_q = self.sharing != ClosedMaglevConfig.sharing or self.prefiller_depth or self.prefiller_from
        require(
            not own_q or not (self.tap or self.write_both or self.groups > 1),
            "objective.tap, groups and write_both go with Q in P's blocks alone; leave its settings away",
        )
        require(
            set(filter(None, self.stop.split(","))) <= set(STOPS),
            f"objective.stop is {self.stop!r}; it may list {', '.join(STOPS)}",
        )

    @property
    def own_passes(self) -> float:
        """Without gradients a pass costs a third."""
        if not self.passes:
            return 0.0
        last = self.own_share if self.own_share_end < 0 else self.own_share_end
        first = self.own_share + (last - self.own_share) * self.rollout_start
        return (1 - self.rollout_start) * (first + last) / 2 * (self.passes + self.free / 3)


class WritingDecoder(Decoder):
    """Keeps a part of the last memory, channel by channel. The optimizer's rule and the start follow from the name."""

    def __init__(self, config: ModelConfig, last: float) -> None:
        super().__init__(config)
        self.memory_gate = Linear(config.width, config.width)
        self.register_buffer("offset", torch.linspace(-4, last, config.width), persistent=False)
        self.offset: Tensor

    def run(self, tokens: Tensor, positions: Tensor, previous_memory: Tensor | None, *rest: object) -> Tensor:
        fresh = super().run(tokens, positions, previous_memory, *rest)
        return fresh if previous_memory is None else self.carried(previous_memory, fresh)

    def carried(self, previous_memory: Tensor, fresh: Tensor) -> Tensor:
        keep = torch.sigmoid(self.memory_gate(fresh) + self.offset.to(fresh.dtype))
        return keep * previous_memory.to(fresh.dtype) + (1 - keep) * fresh


class Carry(nn.Module):
    """s, by the optimizer's rule for scales and from 1 on, as its name has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.residual_scale = nn.Parameter(torch.empty(width))


class CarryingDecoder(Decoder):
    """The last memory goes on beside what the blocks found, and both are normalised together."""

    def __init__(self, config: ModelConfig, first: float) -> None:
        super().__init__(config)
        self.carry, self.first = Carry(config.width), first

    def run(self, tokens: Tensor, positions: Tensor, previous_memory: Tensor | None, *rest: object) -> Tensor:
        fresh = super().run(tokens, positions, previous_memory, *rest)
        return fresh if previous_memory is None else self.carried(previous_memory, fresh)

    def carried(self, previous_memory: Tensor, fresh: Tensor) -> Tensor:
        scale = self.first * self.carry.residual_scale.to(fresh.dtype)
        return rms_norm(fresh + scale * previous_memory.to(fresh.dtype))


class SnappingDecoder(Decoder):
    """Reads memories with every channel at a multiple of `step`; gradients take them for what they were."""

    def __init__(self, config: ModelConfig, step: float) -> None:
        super().__init__(config)
        self.step_size = step

    def run(self, tokens: Tensor, positions: Tensor, previous_memory: Tensor | None, *rest: object) -> Tensor:
        if previous_memory is not None:
            near = self.step_size * torch.round(previous_memory.detach() / self.step_size)
            previous_memory = previous_memory + (near - previous_memory).detach()
        return super().run(tokens, positions, previous_memory, *rest)


def in_groups(memory: Tensor, groups: int) -> Tensor:
    return rms_norm(memory.unflatten(-1, (groups, -1))).flatten(-2)


class GroupedDecoder(Decoder):
    def __init__(self, config: ModelConfig, groups: int) -> None:
        super().__init__(config)
        self.groups = groups

    def run(self, tokens: Tensor, positions: Tensor, previous_memory: Tensor | None, *rest: object) -> Tensor:
        return in_groups(super().run(tokens, positions, previous_memory, *rest), self.groups)


class HeadedReadout(Readout):
    """The last memory through one more MLP of its own; what that finds is predicted and not carried."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.width, config.vocab_size, config.logit_softcap)
        self.head = MLP(config.width)

    def found(self, memory: Tensor) -> Tensor:
        return rms_norm(memory + self.head(memory))

    def forward(self, memory: Tensor) -> Tensor:
        return super().forward(self.found(memory))


def run_tapped(
    x: Tensor,
    blocks: Sequence[Callable[..., Tensor]],
    scales: Scales,
    rotation: Rotation,
    memory: Sequence[Features] | None,
    attends: Sequence[Attend],
    tap: int,
) -> Tensor:
    """`run_blocks` with the state before the last `tap` of them beside the last one, (B, T, 2 D)."""
    start, before = x.view_as(x), x
    features = [None] * len(blocks) if memory is None else [*memory] * (len(blocks) // len(memory))
    entries = zip(scales.residual_scale.unbind(), scales.input_scale.unbind(), strict=True)
    layers = zip(blocks, entries, features, attends, strict=True)
    for number, (block, entry, own, attend) in enumerate(layers, 1):
        x = block(x, start, entry, rotation, own, attend)
        before = x if number == len(blocks) - tap else before
    return torch.cat((rms_norm(before), rms_norm(x)), dim=-1)


class TappedDecoder(Decoder):
    """Memories are both states side by side, of which the first is read and the second is predicted from."""

    def __init__(self, config: ModelConfig, tap: int) -> None:
        super().__init__(config)
        self.tap = tap
        self.readout: Readout = TappedReadout(config.width, config.vocab_size, config.logit_softcap)

    def run(
        self,
        tokens: Tensor,
        positions: Tensor,
        previous_memory: Tensor | None,
        attends: Sequence[Attend],
        embedded: Tensor | None = None,
    ) -> Tensor:
        x = self.embedding(tokens) if embedded is None else embedded
        angles = rotation(positions, self.frequencies, x.dtype)
        features = None
        if self.injection is not None and previous_memory is not None:
            features = self.injection(previous_memory[..., : self.config.width].to(x.dtype), angles)
        return run_tapped(x, [*self.blocks], self.scales, angles, features, attends, self.tap)

    def initial_state(self, batch_size: int) -> DecoderState:
        state = super().initial_state(batch_size)
        state.memory = state.memory.repeat(1, 2)
        return state


class TappedReadout(Readout):
    def found(self, memory: Tensor) -> Tensor:
        return memory[..., -self.weight.shape[1] :]

    def forward(self, memory: Tensor) -> Tensor:
        return super().forward(self.found(memory))


class TappedPrefiller(SharedPrefiller):
    def forward(
        self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        assert isinstance(decoder, TappedDecoder)
        x = decoder.embedding(tokens) if embedded is None else embedded
        angles = rotation(torch.arange(tokens.shape[1], device=tokens.device), decoder.frequencies, x.dtype)
        attends = attend_in_parallel(self.config, self.windows, tokens, starts, dtype=x.dtype)
        return run_tapped(x, [*decoder.blocks], self.scales, angles, None, attends, decoder.tap)


def loss_of(decoder: Decoder, memory: Tensor, targets: Tensor) -> Tensor:
    readout = decoder.readout
    return next_token_loss(
        decoder, readout.found(memory) if isinstance(readout, HeadedReadout | TappedReadout) else memory, targets
    )


class KeepingPrefiller(SharedPrefiller):
    """Its memories, too, keep a part of the last one: a recurrence without anything between two steps."""

    def forward(
        self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        fresh = super().forward(tokens, decoder, starts, embedded)
        require(
            starts is None,
            "objective.write_both carries Q's memories on across documents; leave data.document_mask at false",
        )
        assert isinstance(decoder, WritingDecoder | CarryingDecoder)
        found, memory = [], torch.zeros_like(fresh[:, 0])
        for new in fresh.unbind(1):
            memory = decoder.carried(memory, new)
            found.append(memory)
        return torch.stack(found, dim=1)


class GroupedPrefiller(SharedPrefiller):
    def forward(
        self, tokens: Tensor, decoder: Decoder, starts: Tensor | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        assert isinstance(decoder, GroupedDecoder)
        return in_groups(super().forward(tokens, decoder, starts, embedded), decoder.groups)


class LeversObjective(ClosedLoopObjective):
    def __init__(self, decoder: Decoder, prefiller: Prefiller, config: LeversConfig) -> None:
        super().__init__(decoder, prefiller, config)
        self.config, self.stops = config, config.stop.split(",")

    @property
    def number(self) -> int:
        """One of its own for every step."""
        return int(self.progress * 2**31)

    @property
    def stage(self) -> int:
        """A recorded pass is replayed as long as this stays: not where something moves with training."""
        moving = self.config.blank or max(self.config.own_share_end, self.config.consistency_end) >= 0
        return self.number if moving else int(self.progress >= self.rollout_start) * self.length

    @property
    def length(self) -> int:
        """Of rollouts, at this point of training."""
        first, last = self.config.rollout_from or self.rollout, self.rollout
        doublings = math.ceil(math.log2(last / first)) if first < last else 0
        done = (self.progress - self.rollout_start) / (1 - self.rollout_start) if self.rollout_start < 1 else 1.0
        return min(last, first << max(0, int(2 * done * (doublings + 1)))) if doublings else last

    def forward(self, tokens: Tensor, targets: Tensor, documents: Documents = WHOLE_ROWS) -> Losses:
        config, embedded = self.config, self.decoder.embedding(tokens)
        if config.blank:
            # the same in a run that was interrupted: a step is a function of its number
            self.chance = torch.Generator(tokens.device).manual_seed(self.number)
        target_memory = self.prefiller(tokens, self.decoder, documents.attention_starts, embedded)  # (B, T, D)
        rows, documents = self.own_rows(len(tokens)), self.cut(tokens, documents)
        noise = torch.zeros_like(target_memory) if self.noise is None else self.noise(tokens, target_memory)
        parts, own = [], None
        for some in (slice(0, rows), slice(rows, len(tokens))):
            if len(tokens[some]):
                sweeps = Sweeps(self.decoder, tokens[some], rows_of(documents, some))
                given = self.blanked(target_memory[some] + noise[some])
                memory = sweeps.run(given, range(tokens.shape[1]), embedded[some])
                parts.append(memory)
                own = own or sweeps
        late = config.late_consistency if rows else -1.0
        lifted = self.weighed(torch.cat(parts), target_memory, targets, 1.0, "target", late)
        total, prefiller_weight = lifted.total, config.prefiller_weight
        if rows and own is not None:
            first = target_memory[:rows], targets[:rows], embedded[:rows], noise[:rows]
            found = self.on_own_memories(own, parts[0], *first)
            total = config.late_lifted * total + rows / len(tokens) * found
            prefiller_weight = prefiller_weight if config.late_prefiller < 0 else config.late_prefiller
        if prefiller_weight:
            total = total + prefiller_weight * loss_of(self.decoder, target_memory, targets)
        return Losses(total, lifted.next_token, lifted.consistency)

    def on_own_memories(
        self,
        sweeps: Sweeps,
        memory: Tensor,
        target_memory: Tensor,
        targets: Tensor,
        embedded: Tensor,
        noise: Tensor,
    ) -> Tensor:
        config, before = self.config, memory.detach()
        if config.start == "zeros":
            memory = torch.zeros_like(memory)
        with torch.no_grad():
            for _ in range(config.free):
                memory = sweeps.run(memory + noise, range(memory.shape[1]), embedded)
        total = memory.new_zeros((), dtype=torch.float32)
        for number in range(1, config.passes + 1):
            if "carried" in self.stops:
                memory = memory.detach()
                for buffer in sweeps.before:
                    buffer.key, buffer.value = buffer.key.detach(), buffer.value.detach()
            if config.passes == 1:
                memory = sweeps.rollout(memory, min(self.length, memory.shape[1]), embedded, noise=noise)
            else:
                for first in range(min(self.length, memory.shape[1])):
                    positions = range(first, memory.shape[1], self.length)
                    memory = scatter(memory, sweeps.run(memory + noise, positions, embedded), positions)
            given = config.own_next_token, "own_target", config.own_consistency
            found = self.weighed(memory, target_memory, targets, *given).total
            if config.steady:
                # those before it read nothing
                first = 1 if self.decoder.config.takes_last else self.decoder.config.delay
                apart = self.consistency(memory, before)[:, first:]
                found = found + config.steady * token_mean(apart, targets[:, first:])
            total = total + (number / config.passes) ** config.rise * found
        return total

    def weighed(
        self, memory: Tensor, target_memory: Tensor, targets: Tensor, share: float, stop: str, weight: float
    ) -> Losses:
        next_token = loss_of(self.decoder, memory, targets)
        target_memory = target_memory.detach() if {stop, "target"} & set(self.stops) else target_memory
        memory = memory.detach() if "memory" in self.stops else memory
        apart = token_mean(self.consistency(memory, target_memory), targets)
        if weight < 0:
            weight = self.between(self.consistency_weight, self.config.consistency_end)
        return Losses(share * next_token + weight * apart, next_token, apart)

    def between(self, first: float, last: float) -> float:
        return first if last < 0 else first + (last - first) * self.progress

    def own_rows(self, rows: int) -> int:
        """At least one, as long as the share is not 0: a micro-batch may be small."""
        if self.progress < self.rollout_start or not self.config.passes:
            return 0
        return min(rows, math.ceil(rows * self.between(self.config.own_share, self.config.own_share_end)))

    def cut(self, tokens: Tensor, documents: Documents) -> Documents:
        """Those that P's windows take for such."""
        if not self.config.cut:
            return documents
        rows, length = tokens.shape
        places = torch.arange(length, device=tokens.device) // self.config.cut * self.config.cut
        own = torch.arange(rows, device=tokens.device) < math.ceil(rows * self.config.cut_share)
        starts = torch.where(own[:, None], places, 0)  # (B, T)
        if documents.attention_starts is not None:
            starts = torch.maximum(starts, documents.attention_starts)
        return dataclasses.replace(documents, attention_starts=starts)

    def blanked(self, memory: Tensor) -> Tensor:
        if not self.config.blank:
            return memory
        kept = torch.rand(len(memory), 1, 1, generator=self.chance, device=memory.device) >= self.config.blank
        return torch.where(kept, memory, 0)


def rows_of(documents: Documents, some: slice) -> Documents:
    values = {item.name: getattr(documents, item.name) for item in dataclasses.fields(documents)}
    return Documents(**{name: None if value is None else value[some] for name, value in values.items()})


def build(config: RunConfig) -> LeversObjective:
    own, model = config.objective, config.model
    assert isinstance(own, LeversConfig)
    names = [name for name in ("write_gate", "carry", "tap") if getattr(own, name)]
    require(
        not names or model.delay == 1,
        f"objective.{' and objective.'.join(names)} goes with the last memory alone; leave model.delay at 1",
    )
    if own.tap:
        require(own.tap < model.depth, f"objective.tap is {own.tap}; it must be below the depth of {model.depth}")
        return LeversObjective(TappedDecoder(model, own.tap), TappedPrefiller(model, own.prefiller_pattern), own)
    if own.write_gate:
        decoder: Decoder = WritingDecoder(model, own.write_gate)
    elif own.snap:
        decoder = SnappingDecoder(model, own.snap)
    elif own.groups > 1:
        width = model.width
        require(width % own.groups == 0, f"objective.groups is {own.groups}; it must divide the width of {width}")
        decoder = GroupedDecoder(model, own.groups)
    else:
        decoder = CarryingDecoder(model, own.carry) if own.carry else Decoder(model)
    if own.head:
        decoder.readout = HeadedReadout(model)
    if own.write_both and type(decoder) is not Decoder:
        return LeversObjective(decoder, KeepingPrefiller(model, own.prefiller_pattern), own)
    if isinstance(decoder, GroupedDecoder):
        return LeversObjective(decoder, GroupedPrefiller(model, own.prefiller_pattern), own)
    return LeversObjective(decoder, build_prefiller(model, own), own)


def levers() -> Recipe:
    return RECIPES["maglev-closed"]()._replace(objective=LeversConfig())


def register() -> None:
    OBJECTIVE_KINDS["levers"] = LeversConfig
    RECIPES["levers"] = levers
    objectives.OTHERS[LeversConfig] = build


if __name__ == "__main__":
    register()
    sys.exit(main())
