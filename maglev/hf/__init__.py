"""Maglev among transformers' models. `import maglev` tells its Auto classes; what is here is found on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maglev.hf.configuration_maglev import MaglevConfig
    from maglev.hf.modeling_maglev import MaglevForCausalLM

__all__ = ["MaglevConfig", "MaglevForCausalLM"]

_HOMES = {"MaglevConfig": "maglev.hf.configuration_maglev", "MaglevForCausalLM": "maglev.hf.modeling_maglev"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'maglev.hf' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
