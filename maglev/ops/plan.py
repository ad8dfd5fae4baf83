"""What all layers of one window share."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AttentionPlan:
    """`queries` are the positions of the queries among `keys` keys; a query sees `window` keys, itself included."""

    kernel: str
    window: int
    keys: int
    queries: range
    block: int = 0
    # blockwise, sliding: (blocks, 1, C, span) or (B * blocks, 1, C, span); full: the starts (B, Q), if any; flex: its
    # BlockMask; packed: the plan over single entries
    mask: Any = None

    @property
    def is_full(self) -> bool:
        return self.window == self.keys
