"""One front-end as its engine sees it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_client.deadline import Deadline
from engine_client.engine.front_end import FrontEnd, drain_all
from engine_client.errors import SerializationError
from engine_client.ipc.channel import Channel
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import (
    decode_dead,
    decode_reply,
    decode_text,
    encode_abort,
    encode_text,
)
from helpers.transport import columns_of


@contextmanager
def connected(**options: Any) -> Iterator[tuple[FrontEnd, Channel]]:
    left, right = socket.socketpair()
    front_end = FrontEnd(0, Channel(left.detach(), name="client"), rank=3, **options)
    client = Channel(right.detach(), name="engine")
    try:
        yield front_end, client
    finally:
        front_end.leave()
        client.close()


def rows(frames: list[Frame]) -> list[tuple[int, Any, Any]]:
    """Return key, finish reason and stop reason of every row."""
    found = []
    for frame in frames:
        columns, _ = columns_of(frame)
        assert columns.engine_index == 3
        finishes = {row: (FinishReason(reason), stop) for row, reason, stop in columns.finishes}
        found += [(key, *finishes.get(row, (None, None))) for row, key in enumerate(columns.keys)]
    return found


def test_outputs_go_out_under_the_front_end_s_keys() -> None:
    """Request ids become keys; a finished request is forgotten."""
    with connected() as (front_end, client):
        front_end.register(11, "a")
        front_end.register(12, "b")
        with pytest.raises(ValueError, match="already running"):
            front_end.register(13, "a")
        ended = EngineCoreOutput("a", [1], finish_reason=FinishReason.STOP, stop_reason=9)
        outputs = [ended, EngineCoreOutput("b", [2])]
        assert front_end.send_outputs(EngineCoreOutputs(outputs=outputs)) == []
        assert rows(client.receive()) == [(11, FinishReason.STOP, 9), (12, None, None)]
        front_end.register(13, "a")
        assert "in_flight=2" in repr(front_end)


def test_outputs_of_aborted_requests_stay_here() -> None:
    """After an abort the request's rows of the same step are dropped without a word; later ones would be strange."""
    with connected() as (front_end, client):
        front_end.register(11, "a")
        client.send(encode_abort([11, 99]))
        frames = front_end.receive()
        assert front_end.abort(frames[0]) == ["a"]
        assert front_end.send_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])])) == []
        assert client.receive() == []
        assert front_end.take_received() == frames
        assert front_end.take_received() == []
        front_end.send_outputs(EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])]))
        columns, _ = columns_of(client.receive()[0])
        assert columns.strays == ["'a'"]


def test_an_abort_that_cannot_be_understood_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """It leaves a line in the log and changes nothing."""
    with connected() as (front_end, _):
        front_end.register(11, "a")
        assert front_end.abort(Frame(Kind.ABORT, 0, 0, b"no pickle")) == []
        assert "ABORT" in caplog.text
        assert "in_flight=1" in repr(front_end)


def test_an_output_that_cannot_be_sent_ends_its_request_alone() -> None:
    """The request ends with ERROR and the reason, and is named for the engine to drop; the others get theirs."""
    with connected() as (front_end, client):
        for key, name in enumerate("abc"):
            front_end.register(key, name)
        outputs = [
            EngineCoreOutput("a", [1]),
            EngineCoreOutput("b", [1], pooling_output=threading.Lock()),
            EngineCoreOutput("c", [1], finish_reason=FinishReason.STOP),
        ]
        assert front_end.send_outputs(EngineCoreOutputs(outputs=outputs)) == ["b"]
        found = rows(client.receive())
        ends = [(key, reason) for key, reason, _ in found]
        assert ends == [(0, None), (1, FinishReason.ERROR), (2, FinishReason.STOP)]
        assert "lock" in found[1][2]


def test_statistics_that_cannot_be_sent_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """The outputs go out, and the log says what is missing."""
    with connected() as (front_end, client), caplog.at_level(logging.WARNING):
        front_end.register(0, "a")
        stats = SchedulerStats(waiting_lora_adapters=threading.Lock())  # type: ignore[arg-type]
        outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1])], scheduler_stats=stats)
        assert front_end.send_outputs(outputs) == []
        assert rows(client.receive()) == [(0, None, None)]
        assert "statistics" in caplog.text


def test_requests_that_never_started_are_answered() -> None:
    """A refusal carries the reason; a request that came during shutdown ends with ABORT."""
    with connected() as (front_end, client):
        front_end.send_error(5, ValueError("bad"))
        front_end.send_rejected(6)
        assert rows(client.receive()) == [(5, FinishReason.ERROR, "ValueError: bad"), (6, FinishReason.ABORT, None)]


def test_calls_are_answered_once_with_what_can_be_sent() -> None:
    """A result, an error, and the reason why a result cannot be sent."""
    with connected() as (front_end, client):
        front_end.send_result(1, {"x"})
        front_end.send_failure(2, KeyError("k"))
        front_end.send_result(3, threading.Lock())
        answers = [(frame.ref, *decode_reply(frame)) for frame in client.receive()]
        assert answers[0] == (1, False, {"x"})
        assert [(ref, failed, type(value)) for ref, failed, value in answers[1:]] == [
            (2, True, KeyError),
            (3, True, SerializationError),
        ]
        assert isinstance(answers[2][2].__cause__, TypeError)


def test_last_words_leave_before_the_end() -> None:
    """The cause of a death and a goodbye are written, within a deadline."""
    with connected() as (front_end, client):
        front_end.send_dead(ValueError("cause"), "serving")
        front_end.say_goodbye("SIGTERM")
        front_end.drain(Deadline(5))
        dead, bye = client.receive()
        error, phase = decode_dead(dead)
        assert (str(error), phase) == ("cause", "serving")
        assert (bye.kind, decode_text(bye)) == (Kind.GOODBYE, "SIGTERM")


def test_last_words_to_somebody_who_does_not_read_are_bounded() -> None:
    """A front-end that does not read cannot hold the engine up."""
    with connected() as (front_end, _):
        front_end.send_result(1, bytes(5 << 20))
        front_end.say_goodbye("SIGTERM")
        front_end.drain(Deadline(0.2))


def test_nothing_is_sent_to_a_front_end_that_left() -> None:
    """After ``leave`` everything is dropped; a peer that is gone raises nothing here."""
    with connected() as (front_end, client):
        front_end.register(1, "a")
        client.close()
        front_end.send_result(1, 1)
        front_end.flush()
        front_end.send_dead(ValueError(), "serving")
        front_end.drain(Deadline(1))
        assert front_end.leave() == ["a"]
        assert front_end.gone
        assert "gone" in repr(front_end)
        front_end.send_result(1, 1)
        front_end.send_rejected(5)
        front_end.say_goodbye("x")
        front_end.drain(Deadline(1))


def test_one_that_does_not_read_is_not_waited_for_by_the_others() -> None:
    """The last words of a front-end leave, though another one takes nothing."""
    with connected() as (stuck, _), connected() as (front_end, client):
        stuck.send_result(1, bytes(5 << 20))
        front_end.send_result(1, bytes(5 << 20))
        received: list[Frame] = []
        reader = threading.Thread(target=lambda: [received.extend(client.receive()) for _ in iter(received.__len__, 1)])
        reader.start()
        drain_all([stuck, front_end], Deadline(0.5))
        reader.join(10)
        assert len(received) == 1


def test_a_guest_that_never_came_gets_no_statistics() -> None:
    """Nothing piles up for an endpoint that is not used; whoever has said something gets them."""
    with connected(is_guest=True, prefix="0/") as (front_end, client):
        front_end.send_outputs(EngineCoreOutputs(wave_complete=1))
        assert client.receive() == []
        client.send(encode_text(Kind.ATTACH, "1"))
        front_end.receive()
        front_end.send_outputs(EngineCoreOutputs(wave_complete=1))
        assert len(client.receive()) == 1


def test_a_guest_reads_its_own_request_ids() -> None:
    """The prefix that keeps ids of several front-ends apart stands in nothing that they get."""
    with connected(is_guest=True, prefix="0/") as (front_end, client):
        client.send(encode_text(Kind.ATTACH, "1"))
        front_end.receive()
        front_end.register(11, "0/a")
        front_end.send_error(11, ValueError("request '0/a' has no prompt"))
        assert rows(client.receive())[0][2] == "ValueError: request 'a' has no prompt"
        ended = EngineCoreOutput("0/a", [1], finish_reason=FinishReason.STOP)
        front_end.send_outputs(EngineCoreOutputs(outputs=[ended], finished_requests={"0/a"}))
        (frame,) = client.receive()
        assert columns_of(frame)[0].meta["finished_requests"] == {"a"}
