"""What a run is, as frozen dataclasses. Every value is checked where it enters; nothing here imports torch."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from maglev.errors import RequestError
from maglev.model_config import MODEL_LIMITS, ModelConfig, head_count, tile_windows
from maglev.values import parse_value, read_section, require

LARGEST_COUNT = 10**12


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
                getattr(self, name) == getattr(type(self), name),
                f"objective.{name} does not go with objective.prefiller_from, which is taken as it is; leave one away",
            )
        for name in ("prefiller_depth", "prefiller_width"):
            value = getattr(self, name)
            require(value >= 0, f"objective.{name} is {value}; it must be at least 1, or 0 for the decoder's")


@dataclass(frozen=True)
class ClosedMaglevConfig(SeparateMaglevConfig):
    """Maglev for the loop that it will run in: Q predicts tokens too, with a loss of this weight, and P reads `rollout`
    tokens in a row on memories of its own, once `rollout_start` of training is done; the whole row where nothing takes
    a memory younger than `model.delay`, if that is at least a quarter of a window. `steady` weighs how far the memories
    that it writes there are from those that it wrote on Q's: the nearer, the fewer passes reading takes. `noise` is the
    standard deviation of what is added to every memory that P reads in training; its own size is 1. Q borrows the
    decoder's blocks unless `sharing` says otherwise."""

    kind: Literal["maglev_closed"] = "maglev_closed"  # type: ignore[assignment]
    consistency_weight: float = 0.1
    sharing: str = "embedding,attention,mlp"
    prefiller_weight: float = 0.5
    rollout: int = 4
    rollout_start: float = 0.6
    steady: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rollout = self.rollout
        for name in ("prefiller_weight", "steady", "noise"):
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
            require(
                int(first) <= int(last or first),
                f"objective.sharing is {objective.sharing!r}, where {word} ends before it begins; turn it round",
            )
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
        f"prefiller and decoder both have layers 0 to {shallower - 1}; name fewer, or none of them (embedding)",
    )
    require(
        not borrowed or own.width == model.width,
        f"objective.sharing is {objective.sharing!r} and objective.prefiller_width is {own.width}; "
        f"layers are shared at the decoder's width alone, {model.width}; set objective.sharing to embedding",
    )
    return Sharing("embedding" in words, frozenset(layers["attention"]), frozenset(layers["mlp"]))


def check_consistency_weight(weight: float) -> None:
    require(weight >= 0, f"objective.consistency_weight is {weight}; it must not be negative")


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
        delay=1,
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
