"""``dump_stacks`` of every client; with engines that hang, in tests/faults/test_hung.py."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from engine_client import ClosedError, EngineConfig, EngineDeadError, EngineStalledError, InprocClient
from engine_client.clients.stacks import dump_stacks
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.faults import frozen
from helpers.calls import async_client, played_session
from helpers.clients import pid_of, pids_of, scripted_client, session_of
from helpers.guests import guest_client, launched
from helpers.scenes import colours


@colours
def test_the_stacks_of_every_rank(colour: str) -> None:
    """By rank, and all threads of each; the engine goes on."""
    with scripted_client(colour=colour) as client:
        client.check_health()  # the loop runs
        found = client.dump_stacks()
        assert list(found) == list(range(len(pids_of(client))))
        for text in found.values():
            assert "busy_loop.py" in text
            assert "lifeline.py" in text
        assert client.call_utility("echo", 1) == 1
    with pytest.raises(ClosedError):
        client.dump_stacks()


def test_in_process_they_are_those_of_this_process() -> None:
    """From another thread, too."""
    with InprocClient(EngineConfig(), EchoExecutor, False) as client:
        found: list[dict[int, str]] = []
        thread = threading.Thread(target=lambda: found.append(client.dump_stacks()))
        thread.start()
        thread.join()
        assert list(found[0]) == [0]
        assert "in test_in_process_they_are_those_of_this_process" in found[0][0]
    with pytest.raises(ClosedError):
        client.dump_stacks()


def test_many_ask_at_once() -> None:
    """Each gets whole stacks, and no event loop waits for them."""

    async def main(client: object) -> list[dict[int, str]]:
        return await asyncio.gather(*(client.dump_stacks_async() for _ in range(20)))  # type: ignore[attr-defined]

    with async_client(2) as client:
        for found in asyncio.run(main(client)):
            assert sorted(found) == [0, 1]
            assert all(text.count("in run_engine") == 1 for text in found.values())


def test_an_engine_that_works_is_not_harmed() -> None:
    """Asked again and again while it makes steps and answers calls, it lives, and the stacks are whole."""
    with scripted_client() as client:
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                client.call_utility("echo", list(range(1000)))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                assert client.dump_stacks()[0].count("in run_engine") == 1
        finally:
            over.set()
            for thread in threads:
                thread.join()
        client.check_health()


def test_a_stopped_engine_writes_nothing() -> None:
    """The error says so, within the timeout, and has what the others wrote."""
    with async_client(2) as client:
        with frozen(pid_of(client)):
            began = time.monotonic()
            with pytest.raises(EngineStalledError, match=r"no stacks within 0\.3 s: .* is stopped") as caught:
                client.dump_stacks(0.3)
            assert time.monotonic() - began < 3
            assert "rank 0:" in str(caught.value)
            assert "in run_engine" in str(caught.value)
        assert sorted(client.dump_stacks()) == [0, 1]


def test_a_dead_engine_is_dead() -> None:
    """Also one that dies meanwhile."""
    client = scripted_client()
    os.kill(pid_of(client), signal.SIGSTOP)
    killer = threading.Timer(0.2, os.kill, (pid_of(client), signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.dump_stacks()
    killer.join()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        client.dump_stacks()
    client.shutdown()


def test_who_is_asked_by_somebody_else_is_not_waited_for_longer() -> None:
    """The timeout is that of the whole call."""
    with (
        played_session() as (session, (peer,)),
        peer.link.faults.turn,
        pytest.raises(EngineStalledError, match="somebody else"),
    ):
        dump_stacks(session, 0.05)


def test_a_rank_that_is_dead_has_none() -> None:
    """Those that others outlive are left out; when none is left, their death is told."""
    with async_client(2, on_engine_death="continue") as client:
        session = session_of(client)
        os.kill(pids_of(client)[1], signal.SIGKILL)
        assert session.links[1].over.wait(10)
        assert list(client.dump_stacks()) == [0]
        link = session.links.pop(0)  # as if it were being taken away
        with pytest.raises(EngineDeadError, match="engine core 1"):
            client.dump_stacks()
        session.links[0] = link


def test_front_ends_of_others_cannot_ask() -> None:
    """The client that launched the engines can."""
    with launched(1, 1) as engines:
        assert "in run_engine" in engines.dump_stacks()[0]
        with guest_client(engines.endpoints[0]) as client, pytest.raises(RuntimeError, match="launched by another"):
            client.dump_stacks()
