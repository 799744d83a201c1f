"""Streams of single requests: in order to the end, and aborted wherever they are left before it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine_client import EngineDeadError, FinishReason
from engine_client.clients.in_flight import InFlight
from engine_client.clients.outputs import OutputQueue
from engine_client.clients.streams import OutputStream, StreamTable
from engine_client.deadline import Deadline
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs
from engine_client.protocol.batch import Columns, decode_columns, encode_outputs
from engine_client.testing.scripted import Script
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.interrupts import interrupt_everywhere
from helpers.timing import DEADLOCK, eventually

LONG = 1_000_000
"""Tokens that no test waits for."""

SLOW = Script(step_seconds=0.001)


def running(client: Any) -> list[str]:
    """Return the requests that the engine has."""
    requests: list[str] = client.call_utility("info")["requests"]
    return requests


def is_forgotten(client: Any) -> bool:
    """Tell whether the client has no request in flight, and no stream."""
    session = session_of(client)
    return (len(session.in_flight), len(session.streams), len(session.aborts.noted)) == (0, 0, 0)


def test_streams_end_with_their_finish_reason_and_keep_apart() -> None:
    """Each gets its own outputs in order, whoever reads when, and ``get_output`` those of the other requests."""
    with scripted_client() as client:
        client.add_request(make_request("other", 7))
        streams = [client.stream(make_request(f"s{number}", number + 1)) for number in range(10)]
        assert "open" in repr(streams[0])
        for number, stream in reversed(list(enumerate(streams))):
            outputs = list(stream)
            assert [output.request_id for output in outputs] == [f"s{number}"] * (number + 1)
            assert [output.finished for output in outputs] == [False] * number + [True]
            assert stream.finish_reason is FinishReason.LENGTH
            assert "LENGTH" in repr(stream)
            with pytest.raises(StopIteration):
                stream.next()
            stream.close()
        assert {name: len(found) for name, found in collect(client, 1).items()} == {"other": 7}
        assert is_forgotten(client)


def close(stream: Any) -> None:
    stream.close()
    stream.close()
    assert "closed" in repr(stream)
    with pytest.raises(StopIteration):
        stream.next()


def leave(stream: Any) -> None:
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError


def interrupt(stream: Any) -> None:
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    timer.join()
    with pytest.raises(StopIteration):
        stream.next()


@pytest.mark.parametrize("end", [close, leave, interrupt])
def test_a_stream_that_is_left_early_aborts_its_request_alone(end: Callable[[Any], None]) -> None:
    """Closed, left by an exception or by Ctrl-C: the engine stops, other streams and requests go on, the id is free."""
    with scripted_client(script=SLOW) as client:
        client.add_request(make_request("other", LONG))
        kept = client.stream(make_request("kept", LONG))
        stream = client.stream(make_request("a", LONG))
        for _ in range(3):
            assert stream.next().new_token_ids == [1]
        end(stream)
        assert sorted(running(client)) == ["kept", "other"]
        assert [o.request_id for o in client.get_output(timeout=20).outputs] == ["other"]
        assert kept.next().request_id == "kept"
        assert len(list(client.stream(make_request("a", 2)))) == 2
        kept.close()
        client.abort_requests(["other"])
        assert is_forgotten(client)


def test_a_dropped_stream_aborts_its_request() -> None:
    """Whoever forgets a stream, or leaves its loop by ``break``, need not close it."""
    with scripted_client(script=SLOW) as client:
        for output in client.stream(make_request("a", LONG)):
            assert output.request_id == "a"
            break
        gc.collect()
        assert running(client) == []
        assert is_forgotten(client)


def test_a_stream_keeps_its_client() -> None:
    """A client that only its stream knows goes on until the stream is over."""

    def only_the_stream() -> Any:
        return scripted_client().stream(make_request("a", 5))

    stream = only_the_stream()
    gc.collect()
    assert len(list(stream)) == 5
    handle = session_of(stream._client).links[0].handle  # noqa: SLF001  # nothing else leads there
    del stream
    gc.collect()
    eventually(lambda: not handle.is_alive(), DEADLOCK)


def test_a_request_that_cannot_be_sent_makes_no_stream() -> None:
    """A wrong request, and an id that is in use, raise in the call and leave nothing."""
    with scripted_client() as client:
        with pytest.raises(ValueError, match="empty"):
            client.stream(make_request("a", prompt=()))
        stream = client.stream(make_request("a", 5))
        with pytest.raises(ValueError, match="already running"):
            client.stream(make_request("a", 5))
        assert len(list(stream)) == 5
        assert is_forgotten(client)


def test_a_step_that_times_out_can_be_repeated() -> None:
    """``next`` with a timeout raises TimeoutError, and loses nothing."""
    with scripted_client(script=Script(step_seconds=0.05)) as client:
        stream = client.stream(make_request("a", 3))
        found, late = 0, 0
        while stream.finish_reason is None:
            try:
                stream.next(timeout=0.01)
                found += 1
            except TimeoutError:
                late += 1
        assert found == 3
        assert late > 0


def test_a_stream_ends_with_its_engine() -> None:
    """All that was sent comes first, then EngineDeadError, and then the stream is over."""
    with scripted_client(script=SLOW) as client:
        stream = client.stream(make_request("a", LONG))
        stream.next()
        with pytest.raises(EngineDeadError):
            client.call_utility("die", "sigkill")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            for output in stream:
                assert output.new_token_ids == [1]
        with pytest.raises(StopIteration):
            stream.next()
        with pytest.raises(EngineDeadError):
            client.stream(make_request("b"))
        assert len(session_of(client).streams) == 0


@pytest.mark.parametrize("end", ["close", "abort", "read to the end"])
def test_those_who_wait_in_a_stream_that_is_over_are_let_go(end: str) -> None:
    """Closed, aborted or read to its end by another thread, a stream ends for all who iterate over it."""
    counts: list[int] = []
    with scripted_client(script=Script(step_seconds=0.02)) as client:
        stream = client.stream(make_request("a", 20 if end == "read to the end" else LONG))
        threads = [threading.Thread(target=lambda: counts.append(len(list(stream)))) for _ in range(3)]
        for thread in threads:
            thread.start()
        if end == "close":
            threading.Event().wait(0.05)
            stream.close()
        elif end == "abort":
            threading.Event().wait(0.05)
            client.abort_requests(["a"])
        for thread in threads:
            thread.join(DEADLOCK)
            assert not thread.is_alive()
        assert len(counts) == 3
        assert end != "read to the end" or sum(counts) == 20
        assert running(client) == []


def test_an_interrupt_in_another_call_leaves_streams_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in ``get_output`` aborts what that has in flight; a stream of the same thread is a call of its own."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with scripted_client(script=SLOW) as client:
        stream = client.stream(make_request("stream", 30))
        client.add_request(make_request("a", LONG))
        with monkeypatch.context() as patch:
            patch.setattr(session_of(client), "get", fail)
            with pytest.raises(KeyboardInterrupt):
                client.get_output()
        assert len(list(stream)) == 30
        assert running(client) == []


@pytest.mark.slow
def test_wherever_an_interrupt_comes_the_request_is_aborted() -> None:
    """At every point of making a stream and of a step of it, Ctrl-C leaves no request, and its id is free."""
    kept: list[Any] = []  # not to be dropped inside of the operation: what interrupts ``__del__`` is ignored
    with scripted_client(script=SLOW) as client:

        def check(where: str) -> None:
            kept.clear()
            gc.collect()
            assert running(client) == [], where
            assert is_forgotten(client), where

        def begin() -> None:
            kept.append(client.stream(make_request("a", LONG)))
            with kept[0]:
                kept[0].next()

        assert interrupt_everywhere(begin, check, kept.clear) > 20


# -- the table, with batches of its own --------------------------------------------------------------------------------


def batch(*rows: str, **fields: Any) -> Columns:
    """Return a batch of one output for each of these ids, whose keys are 1, 2, … in the order of ``abc``."""
    outputs = EngineCoreOutputs(0, [EngineCoreOutput(name, [ord(name)]) for name in rows], **fields)
    frame, _ = encode_outputs(outputs, {"a": 1, "b": 2, "c": 3})
    assert frame is not None
    return decode_columns(frame)


def in_flight() -> InFlight:
    """Return a table that has the requests of ``batch``."""
    table = InFlight()
    for key, name in enumerate("abc", 1):
        table.add(name, key)
    return table


def test_a_batch_is_sorted_by_request() -> None:
    """Rows of streams go to their queues, the rest is left; without streams nothing is touched."""
    table, flight = StreamTable(), in_flight()
    columns = batch("a", "b", "c")
    assert table.sort(columns) is columns
    queues = {key: OutputQueue(flight) for key in (1, 3)}
    for key, queue in queues.items():
        table.add(key, queue)
    assert len(table) == 2
    assert 1 in table
    assert 2 not in table
    assert "2 streams" in repr(table)
    assert table.sort(columns).keys == [2]
    for queue, token in zip(queues.values(), b"ac", strict=True):
        (output,) = queue.get(Deadline(0), []).outputs
        assert output.new_token_ids == [token]
    untouched = batch("b")
    assert table.sort(untouched) is untouched
    table.discard(1)
    table.discard(1)
    assert table.sort(columns).keys == [1, 2]


def test_a_stream_that_closes_meanwhile_loses_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is forgotten while its batch is taken apart disturbs no other row."""
    table, flight = StreamTable(), in_flight()
    queues = {key: OutputQueue(flight) for key in (1, 2)}
    for key, queue in queues.items():
        table.add(key, queue)

    def split_and_close(columns: Columns, rows: list[int]) -> Any:
        table.discard(1)
        return split(columns, rows)

    from engine_client.clients import streams as module

    split = module.split
    monkeypatch.setattr(module, "split", split_and_close)
    assert table.sort(batch("a", "b", "c")).keys == [3]
    assert len(queues[2].get(Deadline(0), []).outputs) == 1
    with pytest.raises(TimeoutError):
        queues[1].get(Deadline(0), [])


def test_streams_fail_one_by_one_or_all_together() -> None:
    """Some requests fail with an error each, and those that are no streams are told; the end reaches late ones too."""
    table, flight = StreamTable(), in_flight()
    queues = [OutputQueue(flight) for _ in range(3)]
    for key in (1, 2):
        table.add(key, queues[key - 1])
    assert table.fail([1, 3], lambda: KeyError("one")) == [3]
    with pytest.raises(KeyError, match="one"):
        queues[0].get(Deadline(None), [])
    with pytest.raises(TimeoutError):
        queues[1].get(Deadline(0), [])
    table.end(lambda: KeyError("all"))
    table.add(3, queues[2])
    for queue in queues[1:]:
        with pytest.raises(KeyError, match="all"):
            queue.get(Deadline(None), [])


def test_a_stream_that_was_never_made_whole_can_be_dropped() -> None:
    """What an interrupt leaves of a constructor has no request to abort."""
    stream = OutputStream.__new__(OutputStream)
    del stream
    gc.collect()


def test_whoever_waits_for_an_output_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may poll meanwhile; an output that is there is taken without a word."""
    with scripted_client() as client:
        session = session_of(client)
        words: list[bool] = []
        monkeypatch.setattr(session, "expect", lambda: words.append(True))
        client.pause_scheduler("keep")
        with client.stream(make_request("s", 2)) as stream:
            words.clear()
            with pytest.raises(TimeoutError):
                stream.next(timeout=0)
            assert words == [True]
            client.resume_scheduler()
            stream.next(timeout=DEADLOCK)
            eventually(lambda: stream._queue.has_news, DEADLOCK)  # noqa: SLF001
            words.clear()
            stream.next(timeout=DEADLOCK)
            assert words == []
