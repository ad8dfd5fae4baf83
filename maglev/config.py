"""What a run is, as frozen dataclasses. Every value is checked where it enters; nothing here imports torch."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from maglev.errors import RequestError
from maglev.values import parse_value, read_section, require

FULL, SLIDING = "L", "S"
Memory = Literal["none", "kv"]
# where memory enters: with the keys and values of tokens, beside them, or in the residual stream
WithTokens = Literal["shared_kv", "layer_kv", "tokens"]
IntoStream = Literal["residual", "layer_residual", "cross_attention"]
InjectionKind = Literal[WithTokens, "slots", IntoStream]
INJECTIONS: tuple[InjectionKind, ...] = get_args(InjectionKind)
# keys and values that `slots` and `cross_attention` make of a memory
MEMORY_SLOTS = 4


def tile_windows(
    pattern: str, depth: int, window: int, context: int, key: str = "model.window_pattern"
) -> tuple[int, ...]:
    """Keys that a query of each layer sees, itself included: `window` for S, the whole context for L."""
    require(
        bool(pattern) and set(pattern) <= {FULL, SLIDING},
        f"{key} is {pattern!r}; it may hold only the letters S (sliding) and L (full), for example SLSL",
    )
    letters = (pattern[layer % len(pattern)] for layer in range(depth))
    return tuple(window if letter == SLIDING else context for letter in letters)


def check_injections(names: tuple[str, ...]) -> None:
    """Known ones, and no two that go to one place."""
    given = "+".join(names)
    unknown = [name for name in names if name not in INJECTIONS]
    require(
        not unknown,
        f"model.injection is {given!r}; it may be {', '.join(INJECTIONS)}, or several of them joined by '+'",
    )
    for place in (get_args(WithTokens), ("slots",), get_args(IntoStream)):
        found = [name for name in names if name in place]
        require(
            len(found) <= 1,
            f"model.injection is {given!r}; {' and '.join(found)} enter at one place: take one of them, once",
        )


# far beyond what any machine holds, and small enough that nothing overflows on the way to saying so
MODEL_LIMITS = {
    "depth": 10_000,
    "width": 1 << 20,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "vocab_size": 1 << 24,
    "context": 1 << 30,
    "window": 1 << 30,
}
LARGEST_COUNT = 10**12


@dataclass(frozen=True)
class ModelConfig:
    """The deployed network. `memory` says whether a decoder takes its own last state, `injection` where it enters: in
    the paper's way or in one of those that the paper leaves open (`model/memory.py`), or in several, as in
    "shared_kv+residual"."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    vocab_size: int
    context: int
    window: int
    window_pattern: str
    memory: Memory
    rope_base: float = 10_000.0
    logit_softcap: float = 15.0
    injection: str = "shared_kv"

    def __post_init__(self) -> None:
        for name, most in MODEL_LIMITS.items():
            value = getattr(self, name)
            require(1 <= value <= most, f"model.{name} is {value}; it must be at least 1 and at most {most:,}")
        require(
            self.window <= self.context,
            f"model.window is {self.window}, larger than model.context = {self.context}; "
            f"set model.window to at most {self.context}",
        )
        require(
            self.width % self.heads == 0 and self.head_dim % 2 == 0,
            f"model.width is {self.width}, which does not divide into {self.heads} heads of an even size; "
            f"set model.width or model.heads",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.kv_heads is {self.kv_heads}; it must divide the number of heads, {self.heads}",
        )
        require(self.rope_base > 1, f"model.rope_base is {self.rope_base}; it must be above 1")
        require(self.logit_softcap > 0, f"model.logit_softcap is {self.logit_softcap}; it must be above 0")
        require(
            self.memory != "none" or self.injection == "shared_kv",
            f"model.injection is {self.injection!r} and this decoder has no memory; leave it away, "
            f"or take a recipe with memory",
        )
        check_injections(self.injections)
        tile_windows(self.window_pattern, self.depth, self.window, self.context)

    @property
    def injections(self) -> tuple[str, ...]:
        """The ways in which memory enters, by name; those of a decoder without memory do nothing."""
        return tuple(self.injection.split("+"))

    @property
    def has_kernels(self) -> bool:
        """Whether the fused kernels of training compute its attention: where memory is mixed in as in the paper, or
        enters elsewhere. Every other takes plain PyTorch."""
        return self.memory == "none" or not {"layer_kv", "tokens"} & {*self.injections}

    @property
    def has_steps(self) -> bool:
        """Whether there are fused steps of it, for decoding and reading."""
        return self.memory == "none" or not {"tokens", "slots", "cross_attention"} & {*self.injections}

    @property
    def gated(self) -> bool:
        """Whether gates of every layer let memory into its keys and values."""
        return self.memory != "none" and bool({"shared_kv", "layer_kv"} & {*self.injections})

    @property
    def tells_gates(self) -> bool:
        """Whether every layer has gates through which memory enters, wherever that is."""
        return self.gated or (self.memory != "none" and bool({"residual", "layer_residual"} & {*self.injections}))

    @property
    def entries(self) -> int:
        """Keys and values that a position leaves in a layer: its own, mixed with its memory's or followed by them."""
        return 2 if "tokens" in self.injections else 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def windows(self) -> tuple[int, ...]:
        return tile_windows(self.window_pattern, self.depth, self.window, self.context)

    @property
    def plain_reach(self) -> int:
        """How many positions back the stack sees without memory."""
        return sum(window - 1 for window in self.windows)


@dataclass(frozen=True)
class NextTokenConfig:
    """Transformer and SWA: the next token, nothing else."""

    kind: Literal["next_token"] = "next_token"


@dataclass(frozen=True)
class LRTConfig:
    """Latent recurrent Transformer: S interleaved subsets after a full pass, or K full passes; `passes` is S or K."""

    kind: Literal["lrt"] = "lrt"
    schedule: Literal["interleaved", "full"] = "interleaved"
    passes: int = 2

    def __post_init__(self) -> None:
        require(
            1 <= self.passes <= LARGEST_COUNT,
            f"objective.passes is {self.passes}; it must be at least 1 and at most {LARGEST_COUNT:,}",
        )


@dataclass(frozen=True)
class SharedMaglevConfig:
    """Maglev whose prefiller Q borrows the decoder's blocks."""

    kind: Literal["maglev_shared"] = "maglev_shared"
    consistency_weight: float = 0.1
    prefiller_pattern: str = "SLSL"

    def __post_init__(self) -> None:
        check_consistency_weight(self.consistency_weight)


@dataclass(frozen=True)
class ClosedMaglevConfig(SharedMaglevConfig):
    """Maglev for the loop that it will run in: Q predicts tokens too, with a loss of this weight, and P reads `rollout`
    tokens in a row on memories of its own, once `rollout_start` of training is done. `steady` weighs how far the
    memories that it writes there are from those that it wrote on Q's: the nearer, the fewer passes reading takes."""

    kind: Literal["maglev_closed"] = "maglev_closed"  # type: ignore[assignment]
    prefiller_weight: float = 0.5
    rollout: int = 4
    rollout_start: float = 0.6
    steady: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rollout = self.rollout
        for name in ("prefiller_weight", "steady"):
            weight = getattr(self, name)
            require(weight >= 0, f"objective.{name} is {weight}; it must not be negative")
        require(
            1 <= rollout <= LARGEST_COUNT,
            f"objective.rollout is {rollout}; it must be at least 1 and at most {LARGEST_COUNT:,}",
        )
        start = self.rollout_start
        require(0 <= start < 1, f"objective.rollout_start is {start}; it must be at least 0 and below 1")

    @property
    def own_passes(self) -> float:
        """Of P on its own memories in a step, the mean over training."""
        return 1 - self.rollout_start


@dataclass(frozen=True)
class SeparateMaglevConfig:
    """Maglev whose prefiller Q has blocks of its own; depth and width of 0 mean the decoder's.

    `sharing` lists what it takes of the decoder all the same: `embedding`, `attention` or `mlp` of all its layers,
    whole layers by number (`0`, `2-5`), or `none`. `prefiller_from` is the folder of a Hugging Face model that serves
    as Q, frozen; depth and width are then that model's.
    """

    kind: Literal["maglev_separate"] = "maglev_separate"
    consistency_weight: float = 1.0
    prefiller_pattern: str = "SLSL"
    prefiller_depth: int = 0
    prefiller_width: int = 0
    sharing: str = "embedding"
    prefiller_from: str = ""

    def __post_init__(self) -> None:
        check_consistency_weight(self.consistency_weight)
        for name in ("prefiller_pattern", "sharing") if self.prefiller_from else ():
            require(
                getattr(self, name) == getattr(SeparateMaglevConfig, name),
                f"objective.{name} does not go with objective.prefiller_from, which is taken as it is; leave one away",
            )
        for name in ("prefiller_depth", "prefiller_width"):
            value = getattr(self, name)
            require(value >= 0, f"objective.{name} is {value}; it must be at least 1, or 0 for the decoder's")


@dataclass(frozen=True)
class Sharing:
    """What a separate Q takes of the decoder: its embedding, and attention and MLP of these layers."""

    embedding: bool
    attention: frozenset[int]
    mlp: frozenset[int]


def pretrained_shape(folder: str) -> tuple[int, int]:
    """Depth and width of a Hugging Face model, as its config.json tells them."""
    try:
        told = json.loads((Path(folder) / "config.json").read_bytes())
        found = [
            next(told[name] for name in names if name in told)
            for names in (("num_hidden_layers", "n_layer", "num_layers"), ("hidden_size", "n_embd", "d_model"))
        ]
        depth, width = (parse_value("objective.prefiller_from", value, int) for value in found)
    except (OSError, ValueError, TypeError, StopIteration) as error:
        reason = str(error) or type(error).__name__
        raise RequestError(
            f"objective.prefiller_from is {folder!r}, where no config.json tells depth and width ({reason}); "
            f"give the folder of a Hugging Face language model"
        ) from None
    return depth, width


def sharing_of(model: ModelConfig, objective: SeparateMaglevConfig) -> Sharing:
    """`objective.sharing`, read and checked: layer l of Q borrows of layer l of P, which has to be as wide."""
    own = prefiller_config(model, objective)
    words = [word.strip() for word in objective.sharing.split(",")]
    layers: dict[str, set[int]] = {"attention": set(), "mlp": set()}
    for word in words:
        first, dash, last = word.partition("-")
        if word in layers:
            layers[word].update(range(own.depth))
        elif first.isdecimal() and (last.isdecimal() if dash else True) and int(last or first) < MODEL_LIMITS["depth"]:
            for part in layers.values():
                part.update(range(int(first), int(last or first) + 1))
        else:
            require(
                word == "embedding" or words == ["none"],
                f"objective.sharing is {objective.sharing!r}; it may list embedding, attention, mlp and layers such as "
                f"0 or 2-5, or be none",
            )
    borrowed = layers["attention"] | layers["mlp"]
    shallower = min(model.depth, own.depth)
    require(
        all(layer < shallower for layer in borrowed),
        f"objective.sharing is {objective.sharing!r}, which takes in layer {max(borrowed, default=0)}; "
        f"prefiller and decoder both have layers 0 to {shallower - 1}",
    )
    require(
        not borrowed or own.width == model.width,
        f"objective.sharing is {objective.sharing!r} and objective.prefiller_width is {own.width}; "
        f"layers are shared at the decoder's width alone, {model.width}",
    )
    return Sharing("embedding" in words, frozenset(layers["attention"]), frozenset(layers["mlp"]))


def check_consistency_weight(weight: float) -> None:
    require(weight >= 0, f"objective.consistency_weight is {weight}; it must not be negative")


def head_count(width: int) -> int:
    """Heads of 128 where that divides the width, else of 64."""
    return max(1, width // (128 if width % 128 == 0 else 64))


def prefiller_config(model: ModelConfig, objective: SeparateMaglevConfig) -> ModelConfig:
    """The stack of a separate Q: the decoder's, where nothing else is said, without memory."""
    width = objective.prefiller_width or model.width
    own = width != model.width
    tile_windows(objective.prefiller_pattern, 1, model.window, model.context, "objective.prefiller_pattern")
    require(
        not own or width % (2 * head_count(width)) == 0,
        f"objective.prefiller_width is {width}, which does not divide into {head_count(width)} heads of an even size; "
        f"use a multiple of 64",
    )
    return dataclasses.replace(
        model,
        depth=objective.prefiller_depth or model.depth,
        width=width,
        heads=head_count(width) if own else model.heads,
        kv_heads=head_count(width) if own else model.kv_heads,
        window_pattern=objective.prefiller_pattern,
        memory="none",
        injection="shared_kv",
    )


ObjectiveConfig = NextTokenConfig | LRTConfig | SharedMaglevConfig | SeparateMaglevConfig | ClosedMaglevConfig
# those that a run's configuration may name
OBJECTIVE_KINDS: dict[str, Any] = {kind.kind: kind for kind in get_args(ObjectiveConfig)}


@dataclass(frozen=True)
class OptimizerConfig:
    """Learning rates for width 768 and 524,288 tokens per step; `train/param_groups.py` scales them."""

    matrix_lr: float = 0.02
    embedding_lr: float = 0.3
    readout_lr: float = 0.004
    gate_lr: float = 0.004
    residual_scale_lr: float = 0.005
    input_scale_lr: float = 0.5
    weight_decay: float = 0.2
    warmup_steps: int = 0
    cooldown_share: float = 0.5
    final_lr_share: float = 0.0

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            require(value >= 0, f"optimizer.{item.name} is {value}; it must not be negative")
        for name in ("cooldown_share", "final_lr_share"):
            value = getattr(self, name)
            require(value <= 1, f"optimizer.{name} is {value}; it is a share, at most 1")


@dataclass(frozen=True)
class DataConfig:
    """How documents meet in a row. Off by default, as in the paper."""

    document_mask: bool = False
    memory_reset: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """How a run goes. Zeros mean "derive it": steps from the token budget, rows from the device.

    `sharding=full` divides parameters over the ranks; `timeout` is how many seconds a rank waits for another.
    """

    steps: int = 0
    tokens_per_parameter: float = 100.0
    tokens_per_step: int = 524_288
    rows_per_pass: int = 0
    seed: int = 0
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    recompute: Literal["none", "selective", "full"] = "none"
    attention: Literal["auto", "blockwise", "flex", "fused", "varlen", "sdpa"] = "auto"
    products: Literal["plain", "fp8"] = "plain"
    graphs: Literal["auto", "on", "off"] = "auto"
    sharding: Literal["none", "full"] = "none"
    timeout: int = 1800
    threads: int = 0
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    validate_every: int = 1000
    validation_rows: int = 64
    log_every: int = 1
    max_bad_steps: int = 10
    tensorboard: bool = True
    init_from: str = ""

    def __post_init__(self) -> None:
        for name in (
            "tokens_per_step",
            "checkpoint_every",
            "keep_checkpoints",
            "log_every",
            "max_bad_steps",
        ):
            value = getattr(self, name)
            require(
                1 <= value <= LARGEST_COUNT,
                f"train.{name} is {value}; it must be at least 1 and at most {LARGEST_COUNT:,}",
            )
        for name in ("steps", "rows_per_pass", "threads", "validate_every", "validation_rows", "seed"):
            value = getattr(self, name)
            require(
                0 <= value <= LARGEST_COUNT,
                f"train.{name} is {value}; it must not be negative and at most {LARGEST_COUNT:,}",
            )
        require(
            1 <= self.timeout <= 10**6,
            f"train.timeout is {self.timeout}; it is in seconds, at least 1 and at most 1,000,000",
        )
        require(
            0 < self.tokens_per_parameter <= LARGEST_COUNT,
            f"train.tokens_per_parameter is {self.tokens_per_parameter}; "
            f"it must be above 0 and at most {LARGEST_COUNT:,}",
        )


@dataclass(frozen=True)
class RunConfig:
    recipe: str
    model: ModelConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        learns_memory = not isinstance(self.objective, NextTokenConfig)
        require(
            learns_memory == (self.model.memory != "none"),
            f"objective {self.objective.kind!r} does not go with model.memory = {self.model.memory!r}",
        )
        if isinstance(self.objective, SharedMaglevConfig):
            model, key = self.model, "objective.prefiller_pattern"
            tile_windows(self.objective.prefiller_pattern, model.depth, model.window, model.context, key)
        if isinstance(self.objective, SeparateMaglevConfig) and not self.objective.prefiller_from:
            sharing_of(self.model, self.objective)
        elif isinstance(self.objective, SeparateMaglevConfig):
            require(
                not self.data.document_mask,
                "data.document_mask does not go with objective.prefiller_from, which sees whole rows; leave one away",
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "RunConfig":
        """Read what `to_dict` wrote, each value as its type; an unknown key is an error, so that a newer run is
        never half understood."""
        require(isinstance(value, dict), "the run's configuration is not a JSON object")
        sections = {name: content for name, content in value.items() if name != "recipe"}
        for name, content in sections.items():
            require(isinstance(content, dict), f"section {name!r} of the run's configuration is not a JSON object")
        kind = sections.get("objective", {}).get("kind")
        require(kind in OBJECTIVE_KINDS, f"objective.kind is {kind!r}; known: {', '.join(OBJECTIVE_KINDS)}")
        types: dict[str, Any] = {
            "model": ModelConfig,
            "objective": OBJECTIVE_KINDS[kind],
            "optimizer": OptimizerConfig,
            "data": DataConfig,
            "train": TrainConfig,
        }
        require("model" in sections, "the run's configuration has no section 'model'")
        built = {name: read_section(name, content, types) for name, content in sections.items()}
        return cls(recipe=str(value.get("recipe", "")), **built)
