"""Run shares of the tests at the same time, each in a pytest of its own.

    python tests/run_shares.py 1/2 2/2 -- -m "not stress"      all tests, in two processes
    python tests/run_shares.py 1/6 2/6 -- -m "not stress"      a third of them

A share is fixed by the names of the tests.  Most tests wait for other processes most of the time, so two processes at
once take little more than half of the time of one.  The first share's output comes as it is made, that of the others
afterwards; the exit status is the worst.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO

NO_TESTS = 5
"""Pytest's exit status when there was nothing to run."""


def start(share: str, options: list[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start pytest on a share, with its output into a file or to where ours goes."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--share", share, *options]
    return subprocess.Popen(command, stdout=output, stderr=None if output is None else subprocess.STDOUT)


def main(arguments: list[str]) -> int:
    """Run the shares named before ``--`` with the pytest options behind it."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    first, *others = arguments[:split]
    options = arguments[split + 1 :]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in others]
        processes = [start(first, options, None)]
        processes += [start(share, options, file) for share, file in zip(others, files, strict=True)]
        for process in processes:
            stack.callback(process.terminate)  # does nothing when it has ended
        statuses = {processes[0].wait()}
        for share, process, file in zip(others, processes[1:], files, strict=True):
            statuses.add(process.wait())
            print(f"share {share}:", flush=True)
            file.seek(0)
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
    if statuses - {NO_TESTS}:
        statuses.discard(NO_TESTS)  # few tests were asked for, and they were all in the other share
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
