"""Run shares of the tests at the same time, each in a pytest of its own.

    python tests/run_shares.py 1/2 2/2 -- -m "not stress"      all tests, in two processes
    python tests/run_shares.py 1/6 2/6 -- -m "not stress"      a third of them

A share is fixed by the names of the tests.  Most tests wait for other processes most of the time, so two processes at
once take little more than half of the time of one.  Output comes share by share; the exit status is the first that is
not 0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import IO


def main(arguments: list[str]) -> int:
    """Run the shares named before ``--`` with the pytest options behind it."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    shares, options = arguments[:split], arguments[split + 1 :]
    running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []
    try:
        for share in shares:
            output = tempfile.TemporaryFile()  # noqa: SIM115  # closed below, when its process has ended
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--share", share, *options]
            running.append((share, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), output))
        status = 0
        for share, process, output in running:
            status = process.wait() or status
            output.seek(0)
            print(f"share {share}:", flush=True)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
        return status
    finally:
        for _, process, output in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
            output.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
