"""What a report holds: plain numbers and texts, made by whoever ran the runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# In the order in which they are shown. Every number of a model with memory names one of them.
SOURCES = {
    "recurrent": "The decoder's own memory, token after token: what a user gets when it writes. "
    "A model without memory has only this number.",
    "lifted": "Memory computed for all positions at once by the prefiller, a helper used in training only.",
    "refined": "The decoder's own memory, computed for all positions at once in a few repeated passes.",
}


@dataclass(frozen=True)
class Curve:
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class RunReport:
    """One run. `name` picks its colour, the same in every report; `label` is what readers see."""

    name: str
    label: str
    training: Curve  # step, next_token_loss in nats
    consistency: Curve | None = None  # step, consistency_loss
    # "pass", "step": step of training, what is left of a disturbance of the memory after one of them
    contraction: Mapping[str, Curve] = field(default_factory=dict)
    bits_per_byte: Mapping[str, float] = field(default_factory=dict)  # by memory source
    by_position: Mapping[str, Curve] = field(default_factory=dict)  # memory source to (position, bits per byte)
    state_bytes: int | None = None
    gap: Curve | None = None  # step of training, bits per byte recurrent less lifted
    recall_gap: Curve | None = None  # step of training, recall beyond the plain reach recurrent less lifted
    memory_share: Sequence[Curve] = ()  # of every layer: step of training, the part of K/V that is memory


@dataclass(frozen=True)
class StateGrowth:
    """What a decoder keeps while it reads, in bytes, at each of `lengths` tokens."""

    lengths: Sequence[int]
    full_attention: Sequence[int]
    bounded: Sequence[int]
    bounded_label: str = "Maglev"


@dataclass(frozen=True)
class Sample:
    """Text written after `prompt` with memories from `source`."""

    label: str
    prompt: str
    text: str
    source: str = "recurrent"


@dataclass(frozen=True)
class Report:
    title: str
    runs: Sequence[RunReport]
    baseline: str = ""  # name of the run that the others are compared with; empty: no comparison
    introduction: str = ""
    growth: StateGrowth | None = None
    samples: Sequence[Sample] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    commands: Sequence[str] = ()
