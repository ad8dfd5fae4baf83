"""Maglev: language models with a bounded state whose memory is learned in parallel.

`maglev.build` and `maglev.load` are found on first use, so that `import maglev` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from maglev.auto_classes import announce

if TYPE_CHECKING:
    from maglev.inference import load
    from maglev.objectives import build

__version__ = "0.1.0"
__all__ = ["__version__", "build", "load"]

_HOMES = {"build": "maglev.objectives", "load": "maglev.inference"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maglev' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


announce()
