"""Exceptions that pickle cannot carry reach whoever has to know, and hurt nobody else (BC-07)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_client import EngineDeadError, FinishReason, InprocClient, RemoteCallError
from engine_client.config import EngineConfig
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.leaks import LeakGuard
from helpers import raising
from helpers.clients import collect, make_request, reader_of, scripted_client, session_of
from helpers.procs import run_script
from helpers.raising import ATTRIBUTES, FAULTS, LARGE, STAND_INS, TARGET, make_error
from helpers.scenes import METHODS, Waiter, check_dead, methods
from helpers.timing import eventually, took_at_most

BOUND = 2.0

SCENE = """
import logging, sys
logging.getLogger("engine_client").setLevel(logging.CRITICAL)  # a death is logged with its traceback
from faults import test_exceptions
getattr(test_exceptions, sys.argv[1])(*sys.argv[2:])
print("done")
"""


def kind_of(name: str) -> str:
    return name.rsplit(maxsplit=1)[-1]


def check_error(error: Any, name: str, place: str) -> None:
    """Check that this is the named one of ``FAULTS``, whole or as a stand-in, raised in ``place``."""
    kind = kind_of(name)
    text = FAULTS[name][1]
    if name in STAND_INS:
        assert type(error) is RemoteCallError
        assert kind in error.type_name
        assert kind in str(error)
        assert text in str(error)
    else:
        assert type(error) is getattr(raising, kind, ValueError)
        assert text in (repr(error) if kind == "NoText" else str(error)) or kind == "NoText"
        if kind == "NoText":
            assert error.args == ("hidden",)
    for attribute, value in ATTRIBUTES.get(name, {}).items():
        assert getattr(error, attribute) == value
    assert place in error.remote_traceback
    assert kind in error.remote_traceback
    if kind == "HoldsLock":
        assert "lock" in error.lock
    if kind == "LockAsArgument":
        assert "lock" in error.args[1]
    if name.startswith("chained"):
        assert type(error.__cause__) is raising.KeywordOnly
        assert type(error.__context__) is RemoteCallError
    if name.startswith("large"):
        assert len(str(error)) == LARGE + 2


def utilities(method: str, colour: str) -> None:
    """Have a utility of one client fail in every way, now and later."""
    with LeakGuard(), scripted_client(engine_target=TARGET, start_method=method, colour=colour) as client:
        reader = reader_of(client)
        waiting = Waiter(lambda: client.call_utility("deferred", "unharmed", 1.5), again=False)
        eventually(lambda: client.utility_results)
        for name in FAULTS:
            for utility, place in (("raise", "in _raise"), ("raise_later", "in finish")):
                with took_at_most(BOUND):
                    try:
                        client.call_utility(utility, name)
                    except Exception as error:  # noqa: BLE001  # any kind may come
                        check_error(error, name, place)
                    else:
                        raise AssertionError(f"{name} was not raised")
                assert client.call_utility("echo", name) == name
        waiting.end(time.monotonic(), 20.0)
        assert waiting.result == "unharmed"
        assert reader.is_alive()
        assert client.utility_results == {}


def steps(method: str, colour: str, *names: str) -> None:
    """Have steps of engines raise; a call, a request and a second call wait for each."""
    for name in names:
        with LeakGuard():
            client = scripted_client(engine_target=TARGET, start_method=method, colour=colour)
            ranks = list(session_of(client).links)[-1:]
            waiters = [Waiter(lambda c=client: c.call_utility("deferred")), Waiter(client.get_output)]  # type: ignore[misc]
            eventually(lambda c=client: c.utility_results)  # type: ignore[misc]
            began = time.monotonic()
            client.call_utility("raise_in_step", name, ranks=ranks)
            for waiter in waiters:
                error = waiter.end(began, BOUND)
                assert type(error) is EngineDeadError
                assert kind_of(name) in str(error), (name, str(error))
                check_error(error.__cause__, name, "in step")
                assert "in step" in error.remote_traceback
            check_dead(client, kind_of(name), cause=RemoteCallError if name in STAND_INS else Exception)
            del client, waiter, waiters, error


CLIENTS = [
    ("exec", "sync"),
    ("exec", "dp"),
    *(pytest.param(method, "sync", marks=pytest.mark.full) for method in METHODS[1:]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "colour"), CLIENTS)
def test_bc07_a_utility_that_fails_in_every_way(method: str, colour: str) -> None:
    """Each call ends in the original or a documented stand-in with the engine's traceback; the client serves on."""
    assert run_script(SCENE, "utilities", method, colour).check().stdout == "done\n"


@pytest.mark.crash
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "colour"), [("exec", "sync"), *(pytest.param(m, "dp", marks=pytest.mark.full) for m in METHODS)]
)
@pytest.mark.parametrize("part", [0, 1])
def test_bc07_a_step_that_fails_in_every_way(part: int, method: str, colour: str) -> None:
    """The original or its stand-in is the cause of every waiter's EngineDeadError, within 2 s."""
    result = run_script(SCENE, "steps", method, colour, *list(FAULTS)[part::2]).check()
    assert result.stdout == "done\n"


@methods("fork")
def test_bc07_a_request_whose_adding_fails_in_every_way(method: str) -> None:
    """That request alone ends, with reason ERROR and the original type and text; the engine serves on."""
    with scripted_client(engine_target=TARGET, start_method=method) as client:
        client.add_request(make_request("unharmed", 50_000))
        client.get_output(timeout=20)
        for index, name in enumerate(FAULTS):
            with took_at_most(BOUND):
                client.add_request(make_request(name, 5, [index]))
                output = None
                while output is None or output.request_id != name:
                    output = client.get_output(timeout=20).outputs[-1]
            assert output.finish_reason is FinishReason.ERROR
            assert output.stop_reason.startswith(f"{kind_of(name)}: ")
            assert FAULTS[name][1] in output.stop_reason
            assert client.call_utility("echo", name) == name
        client.abort_requests(["unharmed"])
        client.add_request(make_request("KeywordOnly", 2))
        assert len(collect(client, 1)["KeywordOnly"]) == 2


class _Failing(EchoExecutor):
    """Raises what it was told, in its next step and in calls."""

    error: Exception | None = None

    def execute_model(self, batch: Any) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().execute_model(batch)

    def fail(self, name: str) -> None:
        raise make_error(name)


def _arm(worker: _Failing, name: str) -> None:
    worker.error = make_error(name)


@pytest.mark.parametrize("name", list(FAULTS))
def test_bc07_in_process_the_exception_itself_comes_out(name: str) -> None:
    """Of a call as of a step; the next call is answered."""
    kind = kind_of(name)
    with InprocClient(EngineConfig(), _Failing, False) as client:
        check_kind(lambda: client.collective_rpc("fail", args=(name,)), kind)
        assert client.is_sleeping() is False
        client.add_request(make_request("a", 1))
        client.collective_rpc(_arm, args=(name,))
        check_kind(client.get_output, kind)
        assert client.is_sleeping() is False


def check_kind(call: Callable[[], Any], kind: str) -> None:
    caught: Exception | None = None
    try:
        call()
    except Exception as error:  # noqa: BLE001  # any kind may come
        caught = error
    assert type(caught).__name__ == kind
