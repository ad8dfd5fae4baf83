"""The two ways a verb can end badly, and the exit status each one gets."""


class RequestError(ValueError):
    """What the user asked for cannot be done: one line, with the value, the limit and the remedy. Exit 2."""


class WorkError(RuntimeError):
    """The request was fine and the work failed (a full disk, a diverged loss). Exit 1."""
