"""Clients in an interactive session: what it keeps of them, and how it interrupts what they wait for.

With a stand-in for IPython (the real one: tests/notebooks).
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client import EngineConfig, InprocClient
from engine_client.clients.interactive import release_older
from engine_client.clients.mailbox import Mailboxes
from engine_client.testing.executors import EchoExecutor
from helpers.timing import DEADLOCK


class Thing:
    """Stands for a client: frames that hold one are told by the module of its class."""


Thing.__module__ = "engine_client.clients.thing"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    out: dict[int, Any] = {}
    found = SimpleNamespace(
        user_ns={"_oh": out, "Out": out},
        user_ns_hidden={},
        displayhook=SimpleNamespace(_=None, __=None, ___=None),
        last_execution_result=SimpleNamespace(result=None),
    )
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found))
    return found


def show(shell: SimpleNamespace, value: object) -> None:
    """Remember a value as IPython does what a cell ends with."""
    shell.user_ns["_oh"][3] = value
    for names in (shell.user_ns, shell.user_ns_hidden):
        names.update({"_": value, "_3": value})
    shell.displayhook._ = shell.last_execution_result.result = value


def test_what_has_a_name_is_remembered_no_longer(shell: SimpleNamespace) -> None:
    """A client in a variable leaves the caches of results; the new one and other values stay."""
    old, new = Thing(), Thing()
    gone = weakref.ref(old)
    show(shell, old)
    shell.user_ns.update(client=old, other=new, _5=new, _6="text")
    release_older(Thing, new)
    assert (shell.user_ns["_5"], shell.user_ns["_6"]) == (new, "text")
    shell.user_ns["client"] = new
    del old
    assert gone() is None


def test_what_has_no_name_stays(shell: SimpleNamespace) -> None:
    """A client that is a result and nothing else can still be taken from there."""
    old = Thing()
    show(shell, old)
    release_older(Thing, Thing())
    assert shell.user_ns["_"] is shell.user_ns["_oh"][3] is old


def test_the_last_traceback_lets_go(shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of the last error that hold a client lose their locals, those of its cause too; others keep them."""

    def inner(client: object) -> None:
        raise KeyError("inner")

    def middle(text: str) -> None:
        client = Thing()
        kept.append(weakref.ref(client))
        try:
            inner(client)
        except KeyError as error:
            del client
            raise ValueError(text) from error

    kept: list[Any] = []
    with pytest.raises(ValueError, match="text") as caught:
        middle("text")
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    gc.collect()
    assert kept[0]() is not None
    release_older(Thing, Thing())
    gc.collect()
    assert kept[0]() is None
    assert "text" in [frame.f_locals.get("text") for frame in _frames_of(caught.value)]


def _frames_of(error: BaseException) -> list[Any]:
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def test_frames_that_run_are_left_alone(shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is being handled, below which a new client is made, loses nothing."""
    client = Thing()
    try:
        raise KeyError
    except KeyError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        release_older(Thing, Thing())
    assert isinstance(client, Thing)


@pytest.mark.parametrize("found", [None, SimpleNamespace()], ids=["no shell", "another shell"])
def test_elsewhere_nothing_is_done(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython that is merely imported, or is not as expected, is no obstacle to a client."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: found))
    InprocClient(EngineConfig(), EchoExecutor, False).shutdown()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    InprocClient(EngineConfig(), EchoExecutor, False).shutdown()


def test_a_client_calls_it(shell: SimpleNamespace) -> None:
    """A client that is made takes older ones out of the caches."""
    old = InprocClient(EngineConfig(), EchoExecutor, False)
    show(shell, old)
    shell.user_ns["client"] = old
    with InprocClient(EngineConfig(), EchoExecutor, False):
        assert shell.user_ns["_oh"] == {}
    old.shutdown()


# -- the stop button ---------------------------------------------------------------------------------------------------


def interrupt_a_wait(monkeypatch: pytest.MonkeyPatch, timeout: float | None) -> tuple[float, list[asyncio.TimerHandle]]:
    """Interrupt what sleeps as ipykernel does; return the seconds until it noticed, and the timers that were set."""
    timers: list[asyncio.TimerHandle] = []

    async def main() -> float:
        loop, boxes = asyncio.get_running_loop(), Mailboxes()
        real = loop.call_later
        task = asyncio.ensure_future(boxes.sleep(boxes.future(), timeout))
        # Nothing wakes the loop for what is added by a handler, which runs in its own thread.
        before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(task.cancel))
        send = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
        began = loop.time()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(loop, "call_later", lambda *args: timers.append(real(*args)) or timers[-1])
                send.start()
                await asyncio.wait([task])
            assert task.cancelled() or timeout is not None
            assert [timer for timer in timers if not timer.cancelled() and timer.when() > loop.time()] == []
            return loop.time() - began
        finally:
            send.join()
            signal.signal(signal.SIGUSR1, before)

    return asyncio.run(asyncio.wait_for(main(), DEADLOCK)), timers


@pytest.mark.parametrize("timeout", [None, DEADLOCK])
def test_a_loop_that_sleeps_in_a_kernel_is_interrupted(
    shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    """In a kernel the loop of what waits wakes now and then, and so takes note of a signal; no timer is left."""
    shell.kernel = object()
    elapsed, timers = interrupt_a_wait(monkeypatch, timeout)
    assert elapsed < 2.0
    assert timers


def test_a_loop_elsewhere_is_left_to_sleep(shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel runs nothing but the timeout wakes a loop."""
    elapsed, timers = interrupt_a_wait(monkeypatch, 0.5)
    assert elapsed >= 0.5
    assert len(timers) == 1
