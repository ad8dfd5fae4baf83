"""`maglev VERB` and `python -m maglev VERB`: runs a verb and turns how it ended into an exit status."""

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TextIO

from maglev.errors import RequestError, WorkError

DONE, FAILED, WRONG_REQUEST, INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """0 done, 1 the work failed, 2 the request was wrong, 130 interrupted. Errors are one line on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    # Torch's threads spin while they wait; on a machine that does other things too, that costs several times the work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A text may hold what the terminal's encoding has no sign for.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = guarded(lambda: run_verb(arguments))
    # What was printed may meet its full disk or closed pipe only now.
    flushed = guarded(sys.stdout.flush)
    if flushed != DONE:
        discard_further_output(sys.stdout)
    return status or flushed


def run_verb(arguments: list[str]) -> Any:
    from typer.main import get_command

    from maglev.cli.app import app

    # Not command.main(): it handles interrupts, exits and closed pipes in ways that differ between versions.
    command = get_command(app)
    with command.make_context("maglev", list(arguments)) as context:
        return command.invoke(context)


def guarded(work: Callable[[], Any]) -> int:
    try:
        work()
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except RequestError as error:
        complain(str(error))
        return WRONG_REQUEST
    except WorkError as error:
        complain(str(error))
        return FAILED
    except OSError as error:
        if not (isinstance(error, BrokenPipeError) and reader_is_gone(sys.stdout)):
            complain(describe_os_error(error))
        return FAILED
    except Exception as error:
        return end_of(error)
    return DONE


def end_of(error: Exception) -> int:
    """Typer's exceptions are told by their shape: some versions depend on click, others vendor it."""
    code = getattr(error, "exit_code", None)
    if hasattr(error, "format_message"):
        complain(parse_complaint(error))
        return WRONG_REQUEST if code is None else int(code)
    if code is not None:
        return int(code)
    if type(error).__name__ == "Abort":
        complain("aborted")
        return FAILED
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
        complain(f"out of memory: {error}" if str(error) else "out of memory")
        return FAILED
    traceback.print_exception(error)
    complain(f"unexpected {type(error).__name__}: {error}")
    return FAILED


def parse_complaint(error: Any) -> str:
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "maglev"
    return f"{message[:1].lower()}{message[1:]}; see '{path} --help'"


def describe_os_error(error: OSError) -> str:
    if error.strerror is None:
        return str(error) or type(error).__name__
    return f"{error.strerror}: {error.filename}" if error.filename else error.strerror


def complain(message: str) -> None:
    """Exactly one line, whatever the message holds."""
    line = " ".join(message.split())
    print("maglev: " + "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line), file=sys.stderr)


def reader_is_gone(stream: TextIO) -> bool:
    """Whether `stream` is a pipe that nobody reads any more; other broken pipes are errors to be told."""
    import select

    if not hasattr(select, "poll"):
        return True
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return True


def discard_further_output(stream: TextIO) -> None:
    """Keep the interpreter from trying the same flush again at exit and complaining about it."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    sys.exit(main())
