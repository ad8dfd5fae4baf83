"""Small data and runs, made once, and their exports."""

from tests.small_runs import data, exported, lively, trained

__all__ = ["data", "exported", "lively", "trained"]
