"""What becomes of engines is told once each, in order, to every stream, until the client ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from engine_client.clients.events import EngineEvent, Events, EventStream
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import make_request, pids_of, scripted_client
from helpers.timing import DEADLOCK, eventually, took_at_most

State = tuple[int, str, str]


def stream_of(*states: State) -> tuple[Events, list[State], EventStream]:
    """Return events, what a look will find, and a stream of both."""
    events, found = Events(), list(states)
    return events, found, EventStream(events, lambda: list(found))


def rest(stream: EventStream) -> list[tuple[int, str, str]]:
    """Return the events that are there."""
    found = []
    while (event := stream.poll()) is not None:
        found.append((event.rank, event.state, event.detail))
    return found


def until(stream: Any, rank: int, state: str) -> list[str]:
    """Read up to this event; return the states of the rank until then."""
    states = []
    while not states or states[-1] != state:
        event = stream.next(DEADLOCK)
        if event.rank == rank:
            states.append(event.state)
    return states


def test_the_first_events_tell_the_state_of_each_engine() -> None:
    """Then nothing comes until something changes; what a look finds anew is an event, a new detail alone is not."""
    _, found, stream = stream_of((0, "ready", ""), (1, "dead", "why"))
    assert rest(stream) == [(0, "ready", ""), (1, "dead", "why")]
    assert rest(stream) == []
    found[0] = (0, "stalled", "in step 3")
    assert rest(stream) == [(0, "stalled", "in step 3")]
    found[0] = (0, "stalled", "in step 4")
    assert rest(stream) == []
    with pytest.raises(TimeoutError, match=r"no event within 0\.01 s"):
        stream.next(0.01)
    with pytest.raises(TypeError):
        stream.next("1")  # type: ignore[arg-type]  # on purpose


def test_what_was_told_comes_first_and_once() -> None:
    """A look at the same moment finds the same, or more: neither a second event, nor one that is out of date."""
    events, found, stream = stream_of((0, "ready", ""))
    assert rest(stream) == [(0, "ready", "")]
    found.append((1, "starting", "loading weights"))
    assert rest(stream) == [(1, "starting", "loading weights")]
    events.tell(EngineEvent(1, "starting", "starting the process"))  # late
    found[1] = (1, "starting", "warming up")
    assert rest(stream) == [(1, "starting", "warming up")]
    events.tell(EngineEvent(1, "ready"))
    events.tell(EngineEvent(1, "dead", "why"))
    found[1] = (1, "dead", "why")
    assert rest(stream) == [(1, "ready", ""), (1, "dead", "why")]
    events.tell(EngineEvent(1, "dead", "why"))
    assert rest(stream) == []


def test_streams_end_with_the_client_and_tell_how() -> None:
    """What was told before is read first; a stream that begins afterwards tells the last states and ends."""
    events, found, stream = stream_of((0, "ready", ""))
    events.tell(EngineEvent(0, "leaving"))
    found[0] = (0, "dead", "closed")
    events.end()
    assert [event.state for event in stream] == ["leaving", "dead"]
    with pytest.raises(StopIteration):
        stream.next()
    assert [event.state for event in EventStream(events, lambda: list(found))] == ["dead"]


def test_each_stream_gets_all_until_it_is_closed() -> None:
    """Two at once do not take from one another; one that is closed or dropped is told nothing any more."""
    events, found, first = stream_of()
    second = EventStream(events, lambda: list(found))
    events.tell(EngineEvent(0, "ready"))
    assert rest(first) == rest(second) == [(0, "ready", "")]
    assert repr(events) == "<Events streams=2>"
    with first:
        assert iter(first) is first
    assert list(first) == []
    first.close()
    assert repr(events) == "<Events streams=1>"
    del second
    assert repr(events) == "<Events streams=0>"
    assert "known" in repr(first)
    EventStream.__new__(EventStream).__del__()  # its construction was interrupted


def test_whoever_waits_is_woken() -> None:
    """By an event, and by the end."""
    events, _, stream = stream_of()
    told = threading.Timer(0.05, events.tell, [EngineEvent(3, "ready")])
    told.start()
    with took_at_most(5.0):
        assert stream.next().rank == 3
    told.join()
    ended = threading.Timer(0.05, events.end)
    ended.start()
    with took_at_most(5.0), pytest.raises(StopIteration):
        stream.next()
    ended.join()


@pytest.mark.crash
def test_a_client_tells_what_becomes_of_its_engines() -> None:
    """Paused, resumed, stalled, dead, started again, closed: two streams see the same."""
    options = {"on_engine_death": "restart", "restart_delay": 0.0, "stall_timeout": 0.05}
    with scripted_client(Script(progress=(("loading weights", 1, 2),), start_seconds=0.3), **options) as client:
        first, second = client.engine_events(), client.engine_events()
        for stream in (first, second):
            assert until(stream, 0, "ready") == ["ready"]
        client.pause_scheduler()
        assert until(first, 0, "paused") == ["paused"]
        client.resume_scheduler()
        assert until(first, 0, "ready") == ["ready"]
        client.call_utility("set_script", {"step_seconds": 0.5})
        client.add_request(make_request("a", 1))
        stalled = first.next(DEADLOCK)
        assert stalled.state == "stalled"
        assert stalled.detail
        assert until(first, 0, "ready")[-1] == "ready"
        os.kill(pids_of(client)[0], signal.SIGKILL)
        phases = []
        while (event := first.next(DEADLOCK)).state != "ready":
            phases.append((event.state, event.detail.split(" (")[0]))
        assert phases[0] == ("dead", "engine core 0")
        assert {state for state, _ in phases[1:]} == {"starting"}
        assert ("starting", "loading weights") in phases
        assert until(second, 0, "dead")[-1] == "dead"
        assert until(second, 0, "ready")[-1] == "ready"
        client.shutdown()
        assert [(e.state, e.detail) for e in first] == [("dead", "the engine client is closed")]
        assert [e.state for e in second][-1] == "dead"


def test_engines_that_sleep_are_told_to_do_so() -> None:
    """The built-in engine's sleep is a state of its own."""
    from engine_client import EngineConfig, SyncMPClient
    from engine_client.executors.ngram import NGramExecutor

    with SyncMPClient(EngineConfig(), NGramExecutor, False) as client, client.engine_events() as events:
        assert until(events, 0, "ready") == ["ready"]
        client.sleep(level=1)
        assert until(events, 0, "sleeping")[-1] == "sleeping"
        client.wake_up()
        assert until(events, 0, "ready") == ["ready"]


def test_coroutines_iterate_over_events() -> None:
    """The loop goes on meanwhile; the iteration ends with the client, and one that is given up leaves nothing."""

    async def watch(seen: list[tuple[int, str]]) -> None:
        async for event in client.engine_events_async():
            seen.append((event.rank, event.state))  # noqa: PERF401  # one by one, as they come

    async def main() -> None:
        seen: list[tuple[int, str]] = []
        given_up: list[tuple[int, str]] = []
        tasks = [asyncio.create_task(watch(seen)), asyncio.create_task(watch(given_up))]
        while len(seen) < 2 or len(given_up) < 2:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
        tasks[1].cancel()
        await asyncio.wait(tasks[1:])
        await client.scale_elastic_ep(1)
        await asyncio.to_thread(client.shutdown)
        await asyncio.wait_for(tasks[0], DEADLOCK)
        assert seen == [(0, "ready"), (1, "ready"), (1, "leaving"), (0, "dead")]

    with async_client(2) as client:
        asyncio.run(main())
        eventually(lambda: repr(client._session.events) == "<Events streams=0>", DEADLOCK)  # noqa: SLF001  # the leak
