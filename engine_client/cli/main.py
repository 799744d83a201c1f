"""The ``engine-client`` command: its arguments, and what becomes of errors.

An error is one readable line on stderr and a non-zero exit status; ``-v`` adds the traceback and the library's log.
Ctrl-C ends with 130, a reader that closed the pipe (``| head``) with 141, both quietly.

Threads: the main thread.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

from engine_client import __version__
from engine_client.cli import bench, chat, doctor, generate, top

__all__ = ["main"]

_PROGRAM: Final = "engine-client"
_FAILED: Final = 1
_INTERRUPTED: Final = 130  # 128 + SIGINT, as a shell reports it
_PIPE_CLOSED: Final = 141  # 128 + SIGPIPE


class _Parser(argparse.ArgumentParser):
    """Keeps errors of usage to one line, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_PROGRAM}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_PROGRAM,
        description="Run an engine core behind its client: a built-in language model, or your own executor.",
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="show tracebacks, and what the library logs")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (generate, chat, top, doctor, bench):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.DESCRIPTION)
        # Without a default of its own, so that it does not undo the one before the command.
        command.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    Args:
        argv: the arguments; None: those of the process.

    Raises:
        SystemExit: from the argument parser, for ``--help``, ``--version`` and wrong usage (status 2).
    """
    verbose = False
    try:
        _provide_streams()
        arguments = _parser().parse_args(argv)
        verbose = arguments.verbose
        _configure_logging(verbose=verbose)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        status = _PIPE_CLOSED
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except Exception as error:  # noqa: BLE001  # this is where errors become the user's
        _report(error, verbose=verbose)
        status = _FAILED
    _settle_output()
    return status


def _provide_streams() -> None:
    """Give a process that was started without standard streams some that go nowhere."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            # Without closefd nobody is warned that it is open until the end.
            stream = open(null, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # as said
            setattr(sys, name, stream)


def _configure_logging(*, verbose: bool) -> None:
    """Show the library's log with ``-v``; without it, what matters is in the error."""
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    elif not logging.getLogger("engine_client").handlers:
        logging.getLogger("engine_client").addHandler(logging.NullHandler())


def _report(error: Exception, *, verbose: bool) -> None:
    if verbose:
        import traceback  # noqa: PLC0415  # for -v alone

        traceback.print_exception(error)
    with suppress(BrokenPipeError):  # nobody reads errors either
        print(f"{_PROGRAM}: error: {_one_line(error)}", file=sys.stderr, flush=True)


def _one_line(error: Exception) -> str:
    """Return the first line of an error's message; tracebacks that follow are for ``-v``."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _settle_output() -> None:
    """Flush stdout; if that is not possible, let the interpreter's own last flush go nowhere, in silence."""
    try:
        sys.stdout.flush()
    except OSError:
        # Suppressed where stdout has no descriptor, or none that works: then there is no last flush.
        with suppress(OSError, ValueError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
