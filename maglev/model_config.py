"""The deployed network's numbers and names, as a frozen dataclass. Every value is checked where it enters; nothing here
imports torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from maglev.values import require

FULL, SLIDING = "L", "S"
Memory = Literal["none", "kv"]
# where memory enters: with the keys and values of tokens, beside them, or in the residual stream
WithTokens = Literal["shared_kv", "layer_kv", "tokens"]
IntoStream = Literal["residual", "layer_residual", "cross_attention"]
InjectionKind = Literal[WithTokens, "slots", IntoStream]
INJECTIONS: tuple[InjectionKind, ...] = get_args(InjectionKind)
# those that `delay` gives an older memory
DELAYED = (*get_args(WithTokens), "residual", "layer_residual")
# keys and values that `slots` and `cross_attention` make of a memory
MEMORY_SLOTS = 4
# of a window, one part in so many
SHORTEST_PASS = 4


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


@dataclass(frozen=True)
class ModelConfig:
    """The deployed network. `memory` says whether a decoder takes its own last state, `injection` where it enters: in
    the paper's way or in one of those that the paper leaves open (`model/memory.py`), or in several, as in
    "shared_kv+residual".

    delay: keys and values take the memory of so many tokens ago, m_{t - delay}, and the residual stream takes it beside
    m_{t-1}. 1 is the paper's: all take m_{t-1}. The farthest is W, the oldest memory of the paper's window. What is
    copied on over a delay is written anew once in so many tokens, and not at every one.
    """

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
    delay: int = 1

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
        require(
            1 <= self.delay <= self.window,
            f"model.delay is {self.delay}; it must be at least 1 and at most model.window = {self.window}",
        )
        require(
            self.delay == 1 or self.memory != "none",
            f"model.delay is {self.delay} and this decoder has no memory; leave it away, or take a recipe with memory",
        )
        require(
            self.delay == 1 or bool({*DELAYED} & {*self.injections}),
            f"model.delay is {self.delay} and nothing of model.injection = {self.injection!r} takes older memories; "
            f"leave it away, or add one of {', '.join(DELAYED)}",
        )
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
        if self.delay > 1:
            return False
        return self.memory == "none" or not {"tokens", "slots", "cross_attention"} & {*self.injections}

    @property
    def takes_last(self) -> bool:
        """Whether anything takes m_{t-1}. Where nothing does, a pass over as many positions as `delay` is exact."""
        return self.delay == 1 or not {*self.injections} <= {*get_args(WithTokens)}

    @property
    def goes_at_once(self) -> bool:
        """Whether such passes are what rows and prompts are gone over with: short ones would be hardly better than
        single steps."""
        return not self.takes_last and SHORTEST_PASS * self.delay >= self.window

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


def head_count(width: int) -> int:
    """Heads of 128 where that divides the width, else of 64."""
    return max(1, width // (128 if width % 128 == 0 else 64))
