"""Small data and runs, made once, and processes of their own."""

from tests.processes import fork_server, processes
from tests.small_runs import data, other_data, trained, without_speed

__all__ = ["data", "fork_server", "other_data", "processes", "trained", "without_speed"]
