"""A process that forks itself when it has a client: run something in the copy, and check both."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

from engine_client import ForeignProcessError
from helpers.clients import collect, make_request, session_of
from helpers.timing import DEADLOCK, eventually

__all__ = ["LOCKS", "check_serves", "in_fork", "refuse_all"]

LOCKS: dict[str, Callable[[Any], Any]] = {
    "sending": lambda client: next(iter(client._session.links.values())).channel._lock,
    "session": lambda client: client._session._lock,
    "processes": lambda client: client._session.group._lock,
    "handle": lambda client: next(iter(client._session.links.values())).handle._lock,
    "in flight": lambda client: client._session.in_flight._lock,
    "request memory": lambda client: client._session.writer._lock,
    "result memory": lambda client: next(iter(client._session.links.values())).arena._lock,
}
"""Every lock of a client, by what it guards."""


def in_fork(function: Callable[[], object]) -> None:
    """Call a function in a forked copy of this process; fail if it fails or takes long."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # told by the exit status; the copy must not run the tests on
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        eventually(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), DEADLOCK / 4)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the forked copy hangs") from None
    finally:
        _, status = os.waitpid(pid, 0)
    assert status == 0, status


def calls_of(client: Any) -> dict[str, Callable[[], object]]:
    """Return every call that needs the engine."""
    return {
        "add_request": lambda: client.add_request(make_request("b")),
        "abort_requests": lambda: client.abort_requests(["a"]),
        "abort nothing": lambda: client.abort_requests([]),
        "get_output": client.get_output,
        "get_output with timeout": lambda: client.get_output(timeout=0),
        "call_utility": lambda: client.call_utility("echo", 1),
        "collective_rpc": lambda: client.collective_rpc("echo"),
        "is_sleeping": client.is_sleeping,
        "sleep": client.sleep,
        "check_health": client.check_health,
        "ensure_alive": client.ensure_alive,
        "allocate": lambda: client.allocate(10),
        "engine_status": client.engine_status,
    }


def refuse_all(client: Any, owner: int) -> None:
    """Check, in a copy, that every call names the owner at once and that ending the client does nothing."""
    began = time.monotonic()
    errors: dict[str, RuntimeError] = {}
    for name, call in calls_of(client).items():
        try:
            call()
        except RuntimeError as error:
            errors[name] = error
        else:
            raise AssertionError(f"{name} does not refuse")
    for name, error in errors.items():
        assert isinstance(error, ForeignProcessError), (name, error)
        assert str(owner) in str(error), (name, error)
    assert not client.is_alive
    assert "forked" in repr(client)
    with client:
        pass
    client.shutdown()
    client.shutdown(timeout=0)
    client.resources()
    assert time.monotonic() - began < 1.0


def check_serves(client: Any, pid: int, count: int = 100) -> None:
    """Check that the owner's engine is the same, and answers requests."""
    for index in range(count):
        client.add_request(make_request(f"r{index}", 3))
    outputs = collect(client, count)
    assert {name: sum(len(output.new_token_ids) for output in found) for name, found in outputs.items()} == {
        f"r{index}": 3 for index in range(count)
    }
    ranks = list(session_of(client).links)
    assert pid in [info["pid"] for info in client.call_utility("info", ranks=ranks)]
