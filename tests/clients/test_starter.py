"""What engines are built from is encoded once, and each belongs to the session as soon as it exists."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from typing import Any

import pytest

from engine_client import ClientOptions, EngineConfig, SerializationError, StartupError
from engine_client.clients.session import Session
from engine_client.clients.starter import Starter
from engine_client.deadline import Deadline
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import TARGET, Script
from helpers.calls import call
from helpers.timing import DEADLOCK


def starter(config: Any = None, executor: Any = None, **options: Any) -> Starter:
    """Return a starter of scripted engines."""
    made = ClientOptions(**{"engine_target": TARGET, "ready_timeout": DEADLOCK, **options})
    return Starter(made, config or EngineConfig(), executor, log_stats=False)


@pytest.mark.parametrize("lock_step", [False, True])
def test_ranks_are_started_and_led_to_ready(lock_step: bool) -> None:
    """All at once, and one more later; each says its capacities, and serves."""
    made = starter()
    session = Session(made.options)
    try:
        session.acquire([0, 1], lock_step=lock_step)
        links = made.undisturbed(lambda: made.launch(session, [0, 1]))
        assert [link.rank for link in links] == [0, 1]
        assert session.links == dict(enumerate(links))
        responses = made.make_ready(links, Deadline(DEADLOCK))
        assert sorted(responses) == [0, 1]
        assert responses[0].max_model_len == 4096
        session.serve()
        if not lock_step:
            later = made.launch(session, [2])
            made.make_ready(later, Deadline(DEADLOCK))
            session.watch(later[0])
        assert len(call(session, "info").wait(Deadline(DEADLOCK))) == (2 if lock_step else 3)
    finally:
        session.close(5.0)


def test_those_before_a_failed_launch_are_the_session_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot be started raises, and closing the session ends the ones that could."""
    made = starter()
    session = Session(made.options)
    try:
        session.acquire([0, 1], lock_step=False)
        from engine_client.clients import starter as module

        real = module.launch_engine

        def launch(rank: int, *args: Any) -> Any:
            if rank == 1:
                raise OSError("no more processes")
            return real(rank, *args)

        monkeypatch.setattr(module, "launch_engine", launch)
        with pytest.raises(OSError, match="no more processes"):
            made.launch(session, [0, 1])
        assert list(session.links) == [0]
    finally:
        session.abandon()


def test_a_rank_that_does_not_come_up_says_why() -> None:
    """The engine's own error is the cause."""
    made = starter(EngineConfig(additional_config={"script": Script(start_error=KeyError("marker"))}))
    session = Session(made.options)
    try:
        session.acquire([0], lock_step=False)
        links = made.launch(session, [0])
        with pytest.raises(StartupError, match="marker"):
            made.make_ready(links, Deadline(DEADLOCK))
    finally:
        session.abandon()


def test_what_cannot_be_sent_is_named_before_anything_starts() -> None:
    """The configuration or the executor class, whichever it is; what names itself is passed on."""
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"the configuration EngineConfig cannot be sent.*lock"):
        starter(EngineConfig(additional_config={"lock": lock}))
    with pytest.raises(SerializationError, match=r"the executor class EchoExecutor cannot be sent.*lock"):
        starter(executor=partial(EchoExecutor, lock))

    class Exits:
        def __reduce__(self) -> Any:
            raise SystemExit(3)

    with pytest.raises(SerializationError, match="pickling it raised SystemExit"):
        starter(executor=Exits())


@pytest.mark.parametrize("method", ["exec", "fork"])
def test_no_interrupt_comes_while_something_is_acquired(method: Any) -> None:
    """A Ctrl-C in the middle comes when what was acquired has an owner."""
    made = starter(start_method=method)
    acquired: list[str] = []

    def acquire() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        acquired.append("all")
        return "result"

    with pytest.raises(KeyboardInterrupt):
        made.undisturbed(acquire)
    assert acquired == ["all"]
    assert made.undisturbed(lambda: "result") == "result"
