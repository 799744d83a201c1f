"""Run shares of the tests at the same time, each in a pytest of its own.

    python tests/run_shares.py 1/2 2/2 -- -m "not stress"      all tests, in two processes
    python tests/run_shares.py 1/6 2/6 -- -m "not stress"      a third of them

A share is fixed by the names of the tests.  Most tests wait for other processes most of the time, so two processes at
once take little more than half of the time of one.  The first share's output comes as it is made, that of the others
afterwards.  What has failed beside the others is run once more, alone: bounds in seconds are for the library, not for
how busy the machine was.  The exit status is the worst of the shares'.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

FAILED = 1
NO_TESTS = 5
"""Pytest's exit statuses: some tests failed, and there was nothing to run."""


def start(share: str, options: list[str], cache: str, output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start pytest on a share, with its output into a file or to where ours goes."""
    # Not ``-m pytest``: that would put the source tree before the installed package.
    pytest = str(Path(sys.executable).with_name("pytest"))
    command = [sys.executable, pytest, "-o", f"cache_dir={cache}", "--share", share, *options]
    return subprocess.Popen(command, stdout=output, stderr=None if output is None else subprocess.STDOUT)


def run(shares: list[str], options: list[str], stack: ExitStack) -> set[int]:
    """Run the shares at once, then what failed of them; return their exit statuses."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    caches = [str(folder / str(number)) for number in range(len(shares))]
    files = [None, *(stack.enter_context(tempfile.TemporaryFile()) for _ in shares[1:])]  # noqa: SIM115  # it is one
    processes = [start(*each[:1], options, *each[1:]) for each in zip(shares, caches, files, strict=True)]
    for process in processes:
        stack.callback(process.terminate)  # does nothing when it has ended
    statuses = []
    for share, process, file in zip(shares, processes, files, strict=True):
        statuses.append(process.wait())
        if file is not None:
            print(f"share {share}:", flush=True)
            file.seek(0)
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
    for number, status in enumerate(statuses):
        if status == FAILED:
            print(f"share {shares[number]}: once more, alone, what failed:", flush=True)
            statuses[number] = start(shares[number], [*options, "--last-failed"], caches[number], None).wait()
    return set(statuses)


def main(arguments: list[str]) -> int:
    """Run the shares named before ``--`` with the pytest options behind it."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    with ExitStack() as stack:
        statuses = run(arguments[:split], arguments[split + 1 :], stack)
    if statuses - {NO_TESTS}:
        statuses.discard(NO_TESTS)  # few tests were asked for, and they were all in the other share
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
