"""One measured process: started by path, told workloads by lines of JSON, ended for good.

Threads: the main thread.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import engine_client
from engine_client.bench.workloads import Workload

__all__ = ["Side", "SideError", "ours", "peer"]

_HERE: Final = Path(__file__).parent
_ROOT: Final = str(Path(engine_client.__file__).parent.parent)
_LOAD_SECONDS: Final = 180.0  # vLLM takes ten, on a cold disk much more
_LAST_LINES: Final = 600  # characters of what a process said last


class SideError(RuntimeError):
    """A measured process did not do what it was told; the text says which and why."""


class Side:
    """A process that measures; a context manager, which ends it.

    Args:
        label: for people.
        command: what starts ``driver`` with a side.

    Raises:
        SideError: it did not start.
    """

    def __init__(self, label: str, command: list[str]) -> None:
        self.label = label
        self._command = command
        self._closed = False
        self._begin()

    def __repr__(self) -> str:
        return f"<Side {self.label!r} pid={self._process.pid}>"

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._buffer, self._closed = b"", False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        # What it makes there is removed with it, also when it is killed: ZeroMQ's sockets have names.
        self._folder = tempfile.TemporaryDirectory(prefix="engine-client-bench-")
        try:
            # A session of its own, so that nothing of it is left when it is killed.
            self._process = subprocess.Popen(  # noqa: S603  # an interpreter that the user named
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                bufsize=0,
                env={**os.environ, "TMPDIR": self._folder.name},
                start_new_session=True,
            )
        except OSError as error:
            self._discard()
            raise SideError(f"{self.label}: {self._command[0]}: {error.strerror}") from error
        try:
            self.about: dict[str, str] = self._answer(_LOAD_SECONDS)["about"]
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Run one workload and return its figures.

        Raises:
            SideError: it failed, or took longer than it may; then the next has a process of its own.
        """
        if self._closed:
            self._begin()
        command = json.dumps({"kind": workload.kind, "parameters": parameters}) + "\n"
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # then there is no answer either, and that error tells more
                self._process.stdin.write(command.encode())
            figures: dict[str, Any] = self._answer(workload.seconds)["figures"]
        except SideError:
            self.close()
            raise
        return figures

    def _answer(self, seconds: float) -> dict[str, Any]:
        answer = json.loads(self._line(seconds))
        if "error" in answer:
            raise SideError(f"{self.label}: {answer['error']}")
        return dict(answer)

    def _line(self, seconds: float) -> bytes:
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise SideError(f"{self.label}: no answer within {seconds:g} s{self._last_words()}")
            piece = self._process.stdout.read(1 << 16)
            if not piece:
                raise SideError(f"{self.label}: its process ended{self._last_words()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return f"; it said last: {text[-_LAST_LINES:]}" if text else ""

    def close(self) -> None:
        """End the process and all that it has started; idempotent.  The next ``run`` begins with a fresh one."""
        if self._closed:
            return
        self._closed = True
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()  # the end of its commands is what it ends for
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._discard()

    def _discard(self) -> None:
        self._log.close()
        self._folder.cleanup()


def ours() -> Side:
    """Return the side of this library, in this interpreter.

    Raises:
        SideError: it did not start.
    """
    return Side("engine_client", [sys.executable, *_driver("ours"), _ROOT])


def peer(which: str) -> Side:
    """Return the other side.

    Args:
        which: ``"zmq"``, or an interpreter that has vLLM.

    Raises:
        SideError: it did not start.
    """
    if which == "zmq":
        return Side("zmq", [sys.executable, *_driver("peer_zmq"), _ROOT])
    return Side("vllm", [os.path.expanduser(which), *_driver("peer_vllm")])


def _driver(side: str) -> list[str]:
    return [str(_HERE / "driver.py"), str(_HERE / f"{side}.py")]
