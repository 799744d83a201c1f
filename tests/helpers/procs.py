"""Run a script as a user would, in a process of its own, under a watchdog; find and wait for processes.

``run_script`` gives every scenario its conditions: a hard limit, warnings as errors, captured output, and the check
that nothing of it is left, grandchildren and orphans included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import engine_client
from engine_client.testing.inventory import ProcessKey, describe_process, is_running, key_of, marked_processes
from helpers.timing import DEADLOCK, eventually

__all__ = [
    "ScriptResult",
    "holders_of",
    "is_gone",
    "key_of",
    "memory_of",
    "run_script",
    "script_environment",
    "start_orphan",
    "stop_multiprocessing_daemons",
    "wait_gone",
]

_NOISE = ("Traceback", "leaked", "Exception ignored", "ResourceWarning", "never awaited", "Fatal Python error")


@dataclass
class ScriptResult:
    """How a script ended.

    Args:
        left: what was still running when the script had ended and its patience was over; killed since.
        elapsed: seconds from start to end.
    """

    returncode: int
    stdout: str
    stderr: str
    elapsed: float
    left: list[str] = field(default_factory=list)

    def check(self, returncode: int = 0, stderr: str | None = "") -> ScriptResult:
        """Fail unless it ended like this; ``stderr=None`` allows any text without signs of trouble."""
        told = f"\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        assert self.returncode == returncode, f"exit status {self.returncode}, not {returncode}{told}"
        assert not self.left, f"left behind: {self.left}{told}"
        if stderr is not None:
            assert self.stderr == stderr, f"unexpected stderr{told}"
        else:
            noise = [word for word in _NOISE if word in self.stderr]
            assert not noise, f"{noise} on stderr{told}"
        return self


def script_environment(**changes: str | None) -> dict[str, str]:
    """Return an environment in which scripts, in any directory, find this package and the tests' helpers."""
    package = str(Path(engine_client.__file__).parent.parent)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), package])
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def run_script(
    source: str | Path | None,
    *args: str,
    cwd: Path | None = None,
    timeout: float = DEADLOCK,
    stdin: str | None = None,
    env: Mapping[str, str | None] = {},
    flags: Sequence[str] = ("-W", "error"),
    patience: float = 5.0,
    started: Callable[[subprocess.Popen[bytes]], Any] | None = None,
    **popen: Any,
) -> ScriptResult:
    """Run Python and wait for its end.

    Args:
        source: a ``Path`` is run as a file, a text with ``-c``, None reads the script from ``stdin``.
        args: ``sys.argv[1:]``.
        cwd: the tests' own if None.
        timeout: reaching it is a failure; all is killed.
        env: changes to the environment; None removes.
        patience: seconds that the script's descendants may live on after it (a kill -9 needs a moment).
        started: called with the process once it runs, to send signals from the outside.
        popen: passed to ``subprocess.Popen``.
    """
    mark = f"run-{os.getpid()}-{time.monotonic_ns()}"
    began = time.monotonic()
    # Files, not pipes: whatever the script leaves behind would keep a pipe open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, _input(stdin) as source_file:
        process = subprocess.Popen(
            _command(source, args, flags),
            cwd=cwd,
            env=script_environment(**{"PYTHONFAULTHANDLER": "1", "ENGINE_CLIENT_TEST_RUN": mark, **env}),
            **{"start_new_session": True, "stdin": source_file, "stdout": out, "stderr": err, **popen},
        )
        try:
            if started is not None:
                started(process)
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            _kill(marked_processes(mark))
            raise AssertionError(f"hung for {timeout} s\n--- stdout\n{_read(out)}\n--- stderr\n{_read(err)}") from None
        finally:
            if process.poll() is None:  # this test failed, or was interrupted
                _kill(marked_processes(mark))
                process.wait()
        elapsed = time.monotonic() - began
        left = _wait_left(mark, patience)
        return ScriptResult(process.returncode, _read(out), _read(err), elapsed, left)


def _command(source: str | Path | None, args: Sequence[str], flags: Sequence[str]) -> list[str]:
    if isinstance(source, Path):
        what = [str(source)]
    elif source is not None:
        what = ["-c", textwrap.dedent(source)]
    else:
        what = ["-"]
    return [sys.executable, *flags, *what, *args]


@contextmanager
def _input(text: str | None) -> Iterator[Any]:
    if text is None:
        yield subprocess.DEVNULL
        return
    with tempfile.TemporaryFile("w+") as file:
        file.write(text)
        file.flush()
        file.seek(0)
        yield file


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _wait_left(mark: str, patience: float) -> list[str]:
    try:
        eventually(lambda: not marked_processes(mark), patience)
    except AssertionError:
        left = [describe_process(key) for key in marked_processes(mark)]
        _kill(marked_processes(mark))
        return left
    return []


def _kill(keys: set[ProcessKey]) -> None:
    for key in keys:
        with suppress(OSError):  # it ended by itself
            os.kill(key.pid, signal.SIGKILL)


def memory_of(pid: int) -> set[str]:
    """Return device, inode and name of the nameless memory of ours that a process has mapped."""
    rows = [row.split(maxsplit=5) for row in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {" ".join(row[3:]) for row in rows if len(row) == 6 and "engine-client-" in row[5]}


def holders_of(memory: set[str]) -> set[int]:
    """Return the processes that have some of this mapped; those of others cannot be looked into."""
    found = set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with suppress(OSError):
            if memory_of(pid) & memory:
                found.add(pid)
    return found


def is_gone(process: ProcessKey | int) -> bool:
    """Tell whether a process is gone; a zombie is not gone."""
    return key_of(process) is None if isinstance(process, int) else not is_running(process)


def wait_gone(process: ProcessKey | int, timeout: float = 5.0) -> None:
    """Wait until a process is gone; a zombie is not gone."""
    key = key_of(process) if isinstance(process, int) else process
    if key is None:
        return
    try:
        eventually(lambda: not is_running(key), timeout)
    except AssertionError:
        raise AssertionError(f"still there after {timeout} s: {describe_process(key)}") from None


def start_orphan() -> int:
    """Start a process in a session of its own whose parent ends at once; return its number."""
    script = (
        "import os, subprocess\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True, **quiet).pid, flush=True)\n"
        "os._exit(0)"
    )
    return int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)


def stop_multiprocessing_daemons() -> None:
    """End the fork server and the resource tracker, where a test started them, so that the next test is on its own."""
    for module, name, pid in (
        ("forkserver", "_forkserver", "_forkserver_pid"),
        ("resource_tracker", "_resource_tracker", "_pid"),
    ):
        daemon = getattr(sys.modules.get(f"multiprocessing.{module}"), name, None)
        if daemon is not None and getattr(daemon, pid) is not None:
            with suppress(ProcessLookupError):
                os.kill(getattr(daemon, pid), signal.SIGKILL)  # it may be stuck in what a test had it load
            daemon._stop()
