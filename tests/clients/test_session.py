"""What a session makes of whatever an engine sends, with an engine played by the test."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_client import (
    ClientOptions,
    ClosedError,
    EngineDeadError,
    FinishReason,
    ForeignProcessError,
    RemoteCallError,
)
from engine_client.clients import session as module
from engine_client.clients.session import Session
from engine_client.deadline import Deadline
from engine_client.errors import RemoteProtocolError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs
from engine_client.protocol.batch import encode_outputs
from engine_client.protocol.frames import Flag, Frame, Kind
from engine_client.protocol.wire import (
    decode_abort,
    encode_dead,
    encode_reply,
    encode_status,
    encode_text,
)
from helpers.calls import call
from helpers.clients import make_request
from helpers.peers import Peer, played_engine
from helpers.timing import DEADLOCK, eventually, took_at_most


@contextmanager
def session(**options: Any) -> Iterator[tuple[Session, Peer]]:
    """A session whose engine is played by the test."""
    with played_engine() as peer:
        made = Session(ClientOptions(**options))
        peer.be_ready()
        made.adopt(peer.link)
        made.serve()
        try:
            yield made, peer
        finally:
            made.close(0.0)
            made.close(0.0)


def received(peer: Peer, kind: Kind) -> Frame:
    found: list[Frame] = []

    def look() -> bool:
        found.extend(frame for frame in peer.channel.receive() if frame.kind == kind)
        return bool(found)

    eventually(look, DEADLOCK)
    return found[0]


def outputs(keys: dict[str, int], *rows: EngineCoreOutput) -> Frame:
    frame, _ = encode_outputs(EngineCoreOutputs(0, list(rows)), keys)
    assert frame is not None
    return frame


def waits(operation: Callable[[], Any]) -> tuple[threading.Thread, list[Exception]]:
    """Run a call that is to raise in a thread."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            operation()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_outputs_come_back_under_the_user_s_ids() -> None:
    """The key of the ADD leads back to the request id."""
    with session() as (s, peer):
        s.add(make_request("a", 1))
        key = received(peer, Kind.ADD).ref
        peer.channel.send(outputs({"a": key}, EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP)))
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("a", [5], finish_reason=FinishReason.STOP)]
        assert s.state == "running"
        assert "running" in repr(s)
        assert s.ending is None


def test_strange_outputs_are_logged_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Rows with an id of None, an unknown id, or an id of the wrong type disturb nobody."""
    with session() as (s, peer), caplog.at_level(logging.WARNING):
        s.add(make_request("a", 1))
        key = received(peer, Kind.ADD).ref
        strange = [EngineCoreOutput(name, [1]) for name in (None, "unknown", 7)]  # type: ignore[arg-type]
        for _ in range(3):
            peer.channel.send(outputs({}, *strange))
        peer.channel.send(outputs({"a": key, "x": 999}, EngineCoreOutput("x", [1]), EngineCoreOutput("a", [1])))
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("a", [1])]
        assert caplog.text.count("nobody has asked for") == 1
        assert "'unknown'" in caplog.text


def test_replies_that_nobody_waits_for_are_dropped() -> None:
    """An unknown call id, a doubled reply: nothing happens."""
    with session() as (s, peer):
        peer.channel.send(encode_reply(999, 1))
        pending = call(s, "echo", 1)
        for value in ("mine", "again"):
            peer.channel.send(encode_reply(pending.ids[0], value))
        assert pending.wait(Deadline(DEADLOCK)) == ["mine"]


def test_a_failure_of_a_call_that_was_given_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A late reply is dropped; a late failure leaves one line."""
    with session() as (s, peer), caplog.at_level(logging.WARNING):
        pending = call(s, "a")
        (call_id,) = pending.ids
        pending.discard()
        peer.channel.send(encode_reply(call_id, 1))
        peer.channel.send(encode_reply(call_id, error=KeyError("late")))
        eventually(lambda: "gave up" in caplog.text, DEADLOCK)
        assert len(caplog.records) == 1


def test_a_reply_that_cannot_be_decoded_fails_its_call_alone() -> None:
    """The caller gets RemoteCallError with the reason; the reader goes on."""
    with session() as (s, peer):
        bad, good = call(s, "a"), call(s, "b")
        first, second = bad.ids[0], good.ids[0]
        peer.channel.send(Frame(Kind.REPLY, 0, first, b"no pickle"))
        peer.channel.send(Frame(Kind.REPLY, Flag.FAILED, first, b"no pickle"))
        peer.channel.send(encode_reply(second, 2))
        with pytest.raises(RemoteCallError, match="cannot be decoded"):
            bad.wait(Deadline(DEADLOCK))
        assert good.wait(Deadline(DEADLOCK)) == [2]


class Bomb:
    """Raises SystemExit when it is unpickled."""

    def __reduce__(self) -> Any:
        return exit, ()


def test_a_value_whose_decoding_raises_system_exit_cannot_end_the_reader() -> None:
    """What arrives never ends a thread that serves others."""
    with session() as (s, peer):
        pending = call(s, "a")
        peer.channel.send(encode_reply(pending.ids[0], Bomb()))
        with pytest.raises(RemoteCallError, match="SystemExit"):
            pending.wait(Deadline(DEADLOCK))
        assert s.state == "running"


def test_an_output_whose_value_cannot_be_decoded_ends_its_request_on_both_sides() -> None:
    """The user gets ERROR with the reason; the engine is told to drop the request."""
    with session() as (s, peer):
        s.add(make_request("a", 5))
        key = received(peer, Kind.ADD).ref
        frame = outputs({"a": key}, EngineCoreOutput("a", [1], pooling_output=[1.0]))
        broken = frame._replace(header=frame.header.replace(b"pooling_output", b"pooling_outpuz"[:0] + b"\xff" * 14))
        peer.channel.send(broken)
        (output,) = s.get(DEADLOCK).outputs
        assert output.finish_reason is FinishReason.ERROR
        assert "cannot be decoded" in str(output.stop_reason)
        assert decode_abort(received(peer, Kind.ABORT)) == [key]
        assert len(s.in_flight) == 0


@pytest.mark.parametrize(
    "frame",
    [encode_status("loading", 0, 0), Frame(Kind.OUTPUTS, 0, 0, b"no pickle"), Frame(Kind.GOODBYE, 0, 0, b"no pickle")],
    ids=["status", "outputs", "goodbye"],
)
def test_a_frame_that_makes_no_sense_is_the_engine_s_death(frame: Frame) -> None:
    """Nobody knows whose it was: everybody gets EngineDeadError from RemoteProtocolError, and the engine is ended."""
    with session() as (s, peer):
        pending = call(s, "a")
        peer.channel.send(frame)
        for operation in (lambda: s.get(DEADLOCK), lambda: pending.wait(Deadline(DEADLOCK)), lambda: call(s, "b")):
            with pytest.raises(EngineDeadError) as caught:
                operation()
            assert isinstance(caught.value.__cause__, RemoteProtocolError)
        eventually(lambda: not peer.link.handle.is_alive(), DEADLOCK)
        assert len(s.calls) == 0
        assert s.state == "dead"


def test_garbage_is_the_engine_s_death() -> None:
    """Bytes that are no frame end the channel, with their fault as the cause."""
    with session() as (s, peer):
        os.write(peer.channel.fileno(), b"garbage" * 20)
        with pytest.raises(EngineDeadError) as caught:
            s.get(DEADLOCK)
        assert isinstance(caught.value.__cause__, RemoteProtocolError)


def test_outputs_sent_before_the_death_are_delivered_before_it() -> None:
    """The pipe is read to its end first; then every call gets an error of its own, again and again."""
    with session() as (s, peer):
        s.add(make_request("a", 100))
        key = received(peer, Kind.ADD).ref
        for token in range(50):
            assert peer.channel.send(outputs({"a": key}, EngineCoreOutput("a", [token])))
        peer.link.handle.kill()
        for token in range(50):
            assert s.get(DEADLOCK).outputs[0].new_token_ids == [token]
        errors = []
        for _ in range(3):
            with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
                s.get(DEADLOCK)
            errors.append(caught.value)
        assert len({id(error) for error in errors}) == 3


def test_an_engine_that_says_it_is_dead_and_stays_is_killed() -> None:
    """After its last words it has a second; the cause is what it said."""
    with session() as (s, peer), took_at_most(4.0):
        peer.channel.send(encode_dead(ZeroDivisionError("marker"), "serving"))
        with pytest.raises(EngineDeadError, match="marker") as caught:
            s.get(DEADLOCK)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert not peer.link.handle.is_alive()


def test_last_words_that_cannot_be_decoded_are_a_death_all_the_same() -> None:
    """The error says that the cause is lost."""
    with session() as (s, peer):
        peer.channel.send(Frame(Kind.DEAD, 0, 0, b"no pickle"))
        peer.link.handle.kill()
        with pytest.raises(EngineDeadError, match="cannot be decoded"):
            s.get(DEADLOCK)


def test_an_engine_that_closes_its_stream_and_stays_is_killed() -> None:
    """A stream that ended without a process's end is a death within its bound."""
    with session() as (s, peer), took_at_most(4.0):
        peer.channel.close()
        with pytest.raises(EngineDeadError):
            s.get(DEADLOCK)
        assert not peer.link.handle.is_alive()


def test_an_engine_that_leaves_in_order_is_not_reported_as_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    """GOODBYE and an exit are told as a shutdown by somebody else, below WARNING."""
    with session() as (s, peer), caplog.at_level(logging.INFO, "engine_client.session"):
        peer.channel.send(encode_text(Kind.GOODBYE, "SIGTERM"))
        peer.link.handle.kill()
        with pytest.raises(EngineDeadError, match=r"shut down.*SIGTERM"):
            s.get(DEADLOCK)
        eventually(lambda: bool(caplog.records), DEADLOCK)
        assert [r.levelno for r in caplog.records] == [logging.INFO]


def test_a_death_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many wait, the log has one line."""
    with session() as (s, peer), caplog.at_level(logging.WARNING, "engine_client.session"):
        waiters = [waits(lambda: s.get(DEADLOCK)) for _ in range(5)]
        futures = [call(s, "x").replies[0] for _ in range(5)]
        peer.link.handle.kill()
        for thread, errors in waiters:
            thread.join(DEADLOCK)
            assert isinstance(errors[0], EngineDeadError)
        for future in futures:
            assert isinstance(future.exception(DEADLOCK), EngineDeadError)
        eventually(lambda: bool(caplog.records), DEADLOCK)  # who waits is told first
    assert len([r for r in caplog.records if "died" in r.getMessage()]) == 1


def test_a_failure_of_the_reader_itself_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in the reader is told to everybody instead of hanging them."""
    with session() as (s, peer):
        monkeypatch.setattr(module, "deliver", lambda *_, **__: (_ for _ in ()).throw(SystemExit(1)))
        peer.channel.send(encode_reply(1, 1))
        with pytest.raises(EngineDeadError) as caught:
            s.get(DEADLOCK)
        assert isinstance(caught.value.__cause__, SystemExit)


def test_senders_wait_at_the_high_water_mark_until_there_is_room() -> None:
    """More than the mark waits in the backlog only until the engine reads; abort does not wait."""
    with session(high_water=1 << 20, arena_limit=0) as (s, peer):
        call(s, "big", bytes(4 << 20))
        thread, errors = waits(lambda: call(s, "next"))
        thread.join(0.2)
        assert thread.is_alive()
        with took_at_most(2.0):
            s.abort(["unknown"])
        while thread.is_alive():
            peer.channel.receive()
        assert errors == []


@pytest.mark.parametrize("end", ["death", "close"])
def test_waiting_for_room_ends_with_the_engine(end: str) -> None:
    """Death and close end the wait."""
    with session(high_water=1 << 20) as (s, peer):
        call(s, "big", bytes(40 << 20))
        thread, errors = waits(lambda: call(s, "next"))
        time.sleep(0.1)
        if end == "death":
            peer.link.handle.kill()
        else:
            s.close(0.1)
        thread.join(DEADLOCK)
        assert isinstance(errors[0], EngineDeadError if end == "death" else ClosedError)


def test_sending_to_an_engine_that_has_just_died_says_how_it_died() -> None:
    """The caller that meets the broken pipe gets the same report as everybody."""
    with session() as (s, peer):
        peer.link.handle.kill()
        peer.channel.close()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            while True:
                call(s, "x")


def test_closing_asks_first_and_kills_at_the_deadline() -> None:
    """An engine that does not react is killed when the grace is over; those who wait get ClosedError."""
    with session() as (s, peer):
        thread, errors = waits(lambda: s.get(DEADLOCK))
        (future,) = call(s, "x").replies
        peer.process.poll()
        os.kill(peer.process.pid, 19)  # SIGSTOP: it reacts to nothing
        with took_at_most(2.0):
            s.close(0.5)
        thread.join(DEADLOCK)
        assert isinstance(errors[0], ClosedError)
        assert isinstance(future.exception(DEADLOCK), ClosedError)
        assert received_kinds(peer)[-1] == Kind.SHUTDOWN
        assert s.state == "closed"
        with pytest.raises(ClosedError):
            s.ensure_alive()


def received_kinds(peer: Peer) -> list[int]:
    return [frame.kind for frame in peer.channel.receive()]


def test_two_threads_may_close_at_once() -> None:
    """Both return within the bound, and everything is released."""
    with session() as (s, _):
        threads = [waits(lambda: s.close(0.3))[0] for _ in range(4)]
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()
        assert s.state == "closed"


def test_an_interrupt_aborts_what_its_thread_had_in_flight() -> None:
    """The keys go out at once; outputs already queued are dropped; the ids are free."""
    with session() as (s, peer):
        s.add(make_request("a", 5))
        key = received(peer, Kind.ADD).ref
        peer.channel.send(outputs({"a": key}, EngineCoreOutput("a", [1])))
        s.interrupted()
        assert decode_abort(received(peer, Kind.ABORT)) == [key]
        with pytest.raises(TimeoutError):
            s.get(0.1)
        s.add(make_request("a", 5))
        new = received(peer, Kind.ADD).ref
        peer.channel.send(outputs({"a": key}, EngineCoreOutput("a", [1])))
        peer.channel.send(outputs({"a": new}, EngineCoreOutput("a", [2])))
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("a", [2])]


def test_an_interrupt_leaves_alone_what_another_thread_is_waiting_for() -> None:
    """Where another thread takes the outputs, its requests go on."""
    with session() as (s, peer):
        s.add(make_request("a", 5))
        key = received(peer, Kind.ADD).ref
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(s.get(DEADLOCK)))
        thread.start()
        eventually(lambda: s._consumer == thread.ident, DEADLOCK)  # noqa: SLF001  # nothing else shows it
        s.interrupted()
        peer.channel.send(outputs({"a": key}, EngineCoreOutput("a", [1])))
        thread.join(DEADLOCK)
        assert got[0].outputs == [EngineCoreOutput("a", [1])]


def test_an_interrupted_add_takes_its_request_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was sent is not known, so it is aborted and its id is free."""
    with session() as (s, peer):
        real = s._write  # noqa: SLF001  # to interrupt it

        def write(link: Any, frame: Frame) -> None:
            real(link, frame)
            if frame.kind == Kind.ADD:
                monkeypatch.setattr(s, "_write", real)
                raise KeyboardInterrupt

        monkeypatch.setattr(s, "_write", write)
        with pytest.raises(KeyboardInterrupt):
            s.add(make_request("a", 5))
        assert decode_abort(received(peer, Kind.ABORT)) == [1]
        assert len(s.in_flight) == 0


def test_aborts_that_an_interrupt_kept_back_go_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second interrupt in the middle of the clean-up loses nothing: the next frame is preceded by the abort."""
    with session() as (s, peer):
        s.add(make_request("a", 5))
        key = received(peer, Kind.ADD).ref
        with monkeypatch.context() as patch:
            patch.setattr(s, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                s.interrupted()
        s.add(make_request("a", 5))
        frames: list[Frame] = []
        eventually(lambda: frames.extend(peer.channel.receive()) or len(frames) == 2, DEADLOCK)
        assert [f.kind for f in frames] == [Kind.ABORT, Kind.ADD]
        assert decode_abort(frames[0]) == [key]


def test_a_forked_copy_refuses_and_harms_nothing() -> None:
    """In a forked child every call names the owner; close does nothing; the parent's engine lives."""
    with session() as (s, peer):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                request = make_request("a")
                for operation in (s.ensure_alive, lambda: s.get(0), lambda: call(s, "x"), lambda: s.add(request)):
                    try:
                        operation()
                    except ForeignProcessError as error:
                        assert str(s.owner_pid) in str(error)  # noqa: PT017
                    else:
                        os._exit(2)
                s.close(1.0)
                code = 0 if s.state == "forked" else 3
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert peer.link.handle.is_alive()
        pending = call(s, "x")
        peer.channel.send(encode_reply(pending.ids[0], "alive"))
        assert pending.wait(Deadline(DEADLOCK)) == ["alive"]
