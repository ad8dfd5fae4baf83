"""Run the deployed decoder. Nothing here knows a prefiller: Q is gone."""

from maglev.inference.engine import LanguageModel, load
from maglev.inference.state import State

__all__ = ["LanguageModel", "State", "load"]
