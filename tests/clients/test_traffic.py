"""What goes to and fro between callers and an engine that the test plays: room, timeouts, interrupts, wrong threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine_client import ClientOptions, EngineDeadError
from engine_client.clients.session import Session
from engine_client.deadline import Deadline
from engine_client.errors import LocalProtocolError
from engine_client.protocol.framing import Kind
from engine_client.protocol.wire import Frame, decode_abort, encode_reply
from helpers.clients import make_request
from helpers.peers import Peer, played_engine
from helpers.timing import DEADLOCK, eventually, took_at_most

BIG = bytes(4 << 20)
"""More than the pipe takes and than the high-water mark of these tests."""


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


def read_all(peer: Peer, kind: Kind, count: int) -> list[Frame]:
    """Read until so many frames of a kind have come."""
    found: list[Frame] = []

    def look() -> bool:
        found.extend(frame for frame in peer.channel.receive() if frame.kind == kind)
        return len(found) >= count

    eventually(look, DEADLOCK)
    return found


def test_waiting_for_room_keeps_the_caller_s_deadline() -> None:
    """A call whose engine reads nothing ends at its deadline, and leaves nothing behind."""
    with session(high_water=1 << 20) as (s, _):
        s.call("big", (BIG,))
        with took_at_most(5.0), pytest.raises(TimeoutError, match=r"reads nothing.* 0\.1 s"):
            s.call("next", (), Deadline(0.1))
        assert len(s.calls) == 1


def test_all_who_wait_for_room_go_on_when_there_is_some() -> None:
    """Twenty senders at once: the news of room is lost to none of them."""
    with session(high_water=1 << 20) as (s, peer):
        s.call("big", (BIG,))
        threads = [threading.Thread(target=s.add, args=(make_request(f"r{i}"),)) for i in range(20)]
        for thread in threads:
            thread.start()
        read_all(peer, Kind.ADD, 20)
        for thread in threads:
            thread.join(DEADLOCK)
            assert not thread.is_alive()


def test_what_would_wait_for_itself_is_refused() -> None:
    """On the reader's thread, in a done-callback, calls and ``get`` raise at once; a request may be added there."""
    with session() as (s, peer):
        seen: list[Any] = []

        def on_done(_: Any) -> None:
            for call in (lambda: s.call("x", ()), lambda: s.get(None)):
                try:
                    call()
                except LocalProtocolError as error:
                    seen.append(str(error))
            s.add(make_request("from the callback"))
            seen.append("added")

        call_id, future = s.call("first", ())
        future.add_done_callback(on_done)
        peer.channel.send(encode_reply(call_id, 1))
        eventually(lambda: "added" in seen, DEADLOCK)
        assert [text[:26] for text in seen[:2]] == ["this would wait for ever: "[:26]] * 2
        assert len(read_all(peer, Kind.ADD, 1)) == 1


def test_an_interrupted_call_is_known_under_the_id_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt inside of the send takes the call out of the table."""
    with session() as (s, _):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(s.links[0].channel, "send", _interrupt)
            s.call("x", (), None, s.calls.new_id())
        assert len(s.calls) == 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_a_second_interrupt_left_is_done_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that should have been aborted are aborted then, and their ids are free."""
    with session() as (s, peer):
        s.add(make_request("a"))
        (add,) = read_all(peer, Kind.ADD, 1)
        with monkeypatch.context() as patch:
            patch.setattr(s.in_flight, "mine", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                s.interrupted()
        assert len(s.in_flight) == 1
        s.add(make_request("a"))
        assert len(s.in_flight) == 1
        frames: list[Frame] = []
        eventually(lambda: frames.extend(peer.channel.receive()) or len(frames) == 2, DEADLOCK)
        assert [frame.kind for frame in frames] == [Kind.ABORT, Kind.ADD]
        assert decode_abort(frames[0]) == [add.ref]


def test_aborting_after_the_end_is_quiet_and_leaves_no_work() -> None:
    """Whatever was to be aborted is forgotten when there is no engine."""
    with session() as (s, peer):
        s.add(make_request("a"))
        peer.channel.close()
        with pytest.raises(EngineDeadError):
            s.get(DEADLOCK)
        s.abort(["a"])
        s.interrupted()
        assert len(s.in_flight) == 0
