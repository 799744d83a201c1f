"""What a message takes on this machine before any client does anything: no latency of a client can be under it.

Two processes exchange one byte through pipes and do nothing else, in three ways: both sleep until it comes; a thread
reads and wakes the one that waits, as it has to where several callers share one connection; both poll and never sleep.

Threads: the main thread; a reader for the second way, which ends with the pipe.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["KINDS"]

_ECHO: Final = """
import os, sys
os.set_blocking(0, len(sys.argv) < 2)  # with an argument it polls
while True:
    try:
        data = os.read(0, 64)
    except BlockingIOError:
        continue
    if not data:
        break
    os.write(1, data)
"""
_WARM_UP: Final = 20
_PATIENCE: Final = 5.0
"""Seconds for one round trip."""


def floor(side: Any, times: int) -> dict[str, float]:
    """Time bare round trips: the median of each way, in microseconds."""
    del side
    return {"p50_us": _sleeping(times), "thread_us": _by_a_thread(times), "spin_us": _polling(times)}


def _sleeping(times: int) -> float:
    with _echo() as (_, there, back):
        return _median(times, there, lambda: os.read(back, 64))


def _by_a_thread(times: int) -> float:
    arrived = threading.Lock()
    arrived.acquire()
    with _echo() as (process, there, back):

        def read() -> None:
            while os.read(back, 64):
                arrived.release()

        def wait() -> None:
            if not arrived.acquire(timeout=_PATIENCE):
                raise RuntimeError("the process that sends every byte back has ended")

        reader = threading.Thread(target=read, name="FloorReader")
        reader.start()
        try:
            return _median(times, there, wait)
        finally:
            process.kill()  # the end of what the reader reads
            reader.join()


def _polling(times: int) -> float:
    with _echo("poll") as (_, there, back):
        os.set_blocking(back, False)

        def read() -> None:
            while True:
                try:
                    os.read(back, 64)
                except BlockingIOError:
                    continue
                return

        return _median(times, there, read)


def _median(times: int, there: int, wait: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times + _WARM_UP):
        begin = time.perf_counter()
        os.write(there, b"\1")
        wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[_WARM_UP:]) * 1e6


@contextmanager
def _echo(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Start the other process; give it, and the descriptors to write to and to read from."""
    command = [sys.executable, "-S", "-c", _ECHO, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:  # noqa: S603  # this interpreter
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdin.fileno(), process.stdout.fileno()
        finally:
            process.kill()


KINDS = {"floor": floor}
"""As ``loops.KINDS``."""
