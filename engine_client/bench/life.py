"""Start, rest, end and death of an engine, the same for every side; goes on where ``loops`` ends.

This file runs in the interpreter of the peer, too: only the standard library is imported, nothing of the package.

Threads: the main thread; ``death`` has one more that waits.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from typing import Any

__all__ = ["KINDS"]

Figures = dict[str, Any]


def start_stop(side: Any, times: int) -> Figures:
    """Time the start, to the first answer, and the end."""
    starts, stops = [], []
    for _ in range(times):
        begin = time.perf_counter()
        client = side.make_client()
        try:
            client.call_utility("echo", 1)
            starts.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        finally:
            client.shutdown()
        stops.append(time.perf_counter() - begin)
    return {"start_ms": statistics.median(starts) * 1e3, "stop_ms": statistics.median(stops) * 1e3}


def idle_cpu(side: Any, seconds: float) -> Figures:
    """Take the CPU time that both processes use while there is nothing to do.

    It is read from outside: the call that would ask for it is work, and more so where the system has taken from a
    sleeping process the pages that it needs for that.
    """
    client = side.make_client()
    try:
        pids = os.getpid(), client.call_utility("usage")[0]
        before = sum(map(cpu_of, pids))
        time.sleep(seconds)
        used = sum(map(cpu_of, pids)) - before
    finally:
        client.shutdown()
    return {"cpu_s_in_5_s": used * 5 / seconds}


def cpu_of(pid: int) -> float:
    """Return the CPU time of a process in seconds: of its living threads to the nanosecond, if the system tells."""
    try:
        threads = [f"/proc/{pid}/task/{thread}/schedstat" for thread in os.listdir(f"/proc/{pid}/task")]
        return sum(_first_number(thread) for thread in threads) / 1e9
    except OSError:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _first_number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read().split()[0])


def death(side: Any, patience: float) -> Figures:
    """Kill the engine while a thread waits for output; time until that thread has an error."""
    client = side.make_client()
    pid = client.call_utility("usage")[0]
    seen: list[tuple[float, str]] = []

    def wait() -> None:
        try:
            client.get_output()
        except Exception as error:  # noqa: BLE001  # whichever it is, it is the answer
            seen.append((time.perf_counter(), type(error).__name__))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    time.sleep(0.5)
    killed = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    thread.join(patience)
    if not seen:
        return {"ms": None, "note": f"get_output() had not returned {patience:g} s after SIGKILL of the engine"}
    client.shutdown()
    return {"ms": (seen[0][0] - killed) * 1e3, "note": seen[0][1]}


KINDS = {function.__name__: function for function in (start_stop, idle_cpu, death)}
"""As ``loops.KINDS``."""
