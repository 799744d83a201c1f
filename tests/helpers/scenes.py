"""What tests of faults share: every client, the start methods, engines that die on a sign, and threads that wait."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_client import ClientOptions, EngineConfig, EngineDeadError, InprocClient
from engine_client.config import StartMethod
from engine_client.testing.executors import EchoExecutor
from helpers.colours import COLOURS, make_coloured
from helpers.timing import DEADLOCK, eventually

__all__ = [
    "EACH_COLOUR",
    "METHODS",
    "Waiter",
    "check_dead",
    "client_of",
    "colours",
    "colours_with",
    "describe",
    "interrupt_after",
    "methods",
    "record_logs",
    "told",
]

METHODS: tuple[StartMethod, ...] = ("exec", "spawn", "forkserver", "fork")


def methods(*always: StartMethod) -> pytest.MarkDecorator:
    """Parametrise over all start methods; those not named are for the full matrix."""
    return pytest.mark.parametrize(
        "method", [m if m in ("exec", *always) else pytest.param(m, marks=pytest.mark.full) for m in METHODS]
    )


EACH_COLOUR = [
    pytest.param(colour, marks=pytest.mark.full) if colour in ("async", "external") else colour for colour in COLOURS
]
"""As ``COLOURS``; asyncio with a single engine is for the full matrix, since it is of the same class with two."""

colours = pytest.mark.parametrize("colour", EACH_COLOUR)
"""Parametrise over the clients of processes."""


def colours_with(*always: str) -> pytest.MarkDecorator:
    """Parametrise over the clients of processes; those not named are for the full matrix."""
    return pytest.mark.parametrize(
        "colour", [c if c in always else pytest.param(c, marks=pytest.mark.full) for c in COLOURS]
    )


def client_of(
    kind: str, executor: Any = EchoExecutor, settings: Any = None, colour: str = "sync", **options: Any
) -> Any:
    """Return a client of a kind (``inproc``, a start method, or a colour) with an executor and its settings."""
    if kind in COLOURS:
        kind, colour = "exec", kind
    config = EngineConfig(additional_config=dict(settings or {}))
    if kind == "inproc":
        return InprocClient(config, executor, False)
    return make_coloured(colour, config, executor, False, ClientOptions(start_method=kind, **options))  # type: ignore[arg-type]


class Waiter(threading.Thread):
    """A thread that calls something until it raises, and keeps the error and when it came."""

    def __init__(self, call: Callable[[], Any], *, again: bool = True) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.again = again
        self.result: Any = None
        self.error: BaseException | None = None
        self.at = float("inf")
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
            while self.again:
                self.result = self.call()
        except BaseException as error:  # noqa: BLE001  # it is what the test is about
            self.error = error
        self.at = time.monotonic()

    def end(self, since: float, bound: float) -> BaseException | None:
        """Wait for its end, which must come within ``bound`` seconds of ``since``; return its error."""
        self.join(DEADLOCK)
        late = self.at - since
        assert late <= bound, f"{self.call} ended {late:.2f} s later, bound {bound} s: {self.error!r}"
        return self.error


def check_dead(client: Any, *texts: str, cause: type[BaseException] | None = None) -> None:
    """Check that every further call fails at once, says why, and that the client can be shut down quickly."""
    from helpers.clients import make_request

    calls: list[Callable[[], Any]] = [
        client.get_output,
        lambda: client.call_utility("is_sleeping"),
        lambda: client.add_request(make_request("late")),
        client.is_sleeping,
        client.check_health,
        client.ensure_alive,
    ]
    began = time.monotonic()
    errors = []
    for call in calls:
        with pytest.raises(EngineDeadError) as caught:
            call()
        errors.append(caught.value)
        for text in texts:
            assert text in str(caught.value)
        assert cause is None or isinstance(caught.value.__cause__, cause)
    assert len(set(map(id, errors))) == len(errors)
    client.abort_requests(["late"])
    assert not client.is_alive
    assert client.resources.engine_dead
    assert client.utility_results == {}
    client.shutdown()
    assert time.monotonic() - began < 1.0


def record_logs(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that returns what this library has logged at WARNING and above."""
    caplog.set_level(logging.DEBUG, "engine_client")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("engine_client") and record.levelno >= logging.WARNING
    ]


@contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Send SIGINT to this process after a while, unless the block has ended; not from a thread, since forks mind."""
    script = f"read go; sleep {seconds}; kill -INT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as killer:
        assert killer.stdin is not None
        killer.stdin.write(b"\n")
        killer.stdin.flush()
        try:
            yield
        finally:
            killer.kill()


def describe(path: str | Path, **facts: Any) -> None:
    """Tell, in a script, the test that runs it these facts."""
    temporary = Path(f"{path}.part")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


def told(path: Path, timeout: float = DEADLOCK, process: Any = None) -> Any:
    """Return, in a test, what its script told by ``describe``; fail at once if the script's process ends before."""
    eventually(lambda: path.exists() or (process is not None and process.poll() is not None), timeout)
    return json.loads(path.read_text())
