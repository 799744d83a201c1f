"""Calls to engines that the test plays: who gets them, and what becomes of them when one dies or does not read."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine_client import ClosedError, EngineDeadError
from engine_client.clients.caller import Caller
from engine_client.deadline import Deadline
from engine_client.protocol.frames import Kind
from engine_client.protocol.wire import decode_utility, encode_reply
from helpers.calls import call, played_session, received
from helpers.timing import DEADLOCK, eventually, took_at_most


def test_a_call_goes_to_all_engines_and_each_answers() -> None:
    """Each gets the method and the arguments under an id of its own; other calls may be answered in between."""
    with played_session(3) as (session, peers):
        caller = Caller(session)
        fan_out = caller.begin("echo")
        caller.send(fan_out, "echo", (1, "x"), Deadline(DEADLOCK))
        other = call(session, "other")
        for rank, peer in reversed(list(enumerate(peers))):
            frames = received(peer, Kind.UTILITY, 2)
            assert [decode_utility(frame)[:2] for frame in frames] == [("echo", (1, "x")), ("other", ())]
            for frame in reversed(frames):
                peer.channel.send(encode_reply(frame.ref, (rank, frame.ref)))
        assert fan_out.wait(Deadline(DEADLOCK)) == list(enumerate(fan_out.ids))
        assert other.wait(Deadline(DEADLOCK)) == list(enumerate(other.ids))
        assert len(session.calls) == 0


def test_a_call_goes_to_the_engines_that_are_named() -> None:
    """In their order, and to no other, or to none; a rank that there is not is a ValueError, and nothing is sent."""
    with played_session(3) as (session, peers):
        caller = Caller(session)
        with pytest.raises(ValueError, match=r"5 is not one of the ranks \[0, 1, 2\]"):
            caller.begin("x", [0, 5])
        fan_out = caller.begin("x", iter([2, 0]))
        assert [link.rank for link in fan_out.links] == [2, 0]
        assert caller.place(fan_out, caller.encode("x", ())) == []
        for rank in (0, 2):
            (frame,) = received(peers[rank], Kind.UTILITY)
            peers[rank].channel.send(encode_reply(frame.ref, rank))
        assert fan_out.wait(Deadline(DEADLOCK)) == [2, 0]
        nobody = caller.begin("x", [])
        caller.send(nobody, "x", (), Deadline(DEADLOCK))
        assert nobody.wait(Deadline(DEADLOCK)) == []
        assert not list(peers[1].channel.receive())


def test_an_argument_that_cannot_be_sent_leaves_no_call() -> None:
    """The error is the caller's, no engine hears of it, and once given up nothing is in the table."""
    with played_session(2) as (session, peers):
        with pytest.raises(TypeError, match="lock"):
            call(session, "x", threading.Lock())
        assert len(session.calls) == 0
        assert not [frame for peer in peers for frame in peer.channel.receive()]


def test_an_engine_that_reads_nothing_times_the_call_out() -> None:
    """Before anything is sent to the others."""
    with played_session(2, high_water=1 << 20) as (session, peers):
        session.links[1].channel.send(call_frame(bytes(8 << 20)))
        with pytest.raises(TimeoutError, match=r"engine core 1 .* reads nothing"):
            call(session, "x", timeout=0.05)
        assert len(session.calls) == 0
        assert not list(peers[0].channel.receive())


def call_frame(payload: bytes) -> Any:
    from engine_client.protocol.wire import encode_utility

    return encode_utility(9999, "big", (payload,), main_importable=True)


def test_the_death_of_one_engine_fails_the_call_to_it() -> None:
    """Where the others go on, the dead one's part of the call is an error that names it, and the rest is answered."""
    with played_session(2, on_engine_death="continue") as (session, peers):
        fan_out = call(session, "x")
        (frame,) = received(peers[0], Kind.UTILITY)
        peers[0].channel.send(encode_reply(frame.ref, 0))
        peers[1].link.handle.kill()
        with pytest.raises(EngineDeadError, match="engine core 1") as caught:
            fan_out.wait(Deadline(DEADLOCK))
        assert caught.value.rank == 1
        assert "of 2 engines" in caught.value.__notes__[0]
        assert fan_out.replies[0].exception(0) is None
        eventually(lambda: 1 in session.deaths, DEADLOCK)
        caller = Caller(session)
        with pytest.raises(EngineDeadError, match="engine core 1"):
            caller.begin("x", [1])
        assert [link.rank for link in caller.begin("x").links] == [0]


def test_an_engine_that_dies_under_the_call_fails_it() -> None:
    """Its pipe is broken already; one whose death was dealt with before the send is not asked any more."""
    with played_session(2, on_engine_death="continue") as (session, peers):
        caller = Caller(session)
        broken = caller.begin("x")
        peers[1].channel.close()  # its process lives, and has a second to end: it is not dead yet
        with took_at_most(5.0):
            caller.send(broken, "x", (), Deadline(DEADLOCK))
            assert isinstance(broken.replies[1].exception(DEADLOCK), EngineDeadError)
        broken.discard()
        assert len(session.calls) == 0
    with played_session(2, on_engine_death="continue") as (session, peers):
        caller = Caller(session)
        late = caller.begin("x")
        peers[1].link.handle.kill()
        eventually(peers[1].link.over.done, DEADLOCK)
        caller.send(late, "x", (), Deadline(DEADLOCK))
        assert [link.rank for link in late.links] == [0]  # as of a call that begins now
        assert not late.replies[0].done()
        late.discard()


def test_without_engines_there_is_no_call() -> None:
    """When the last has died, or the client is closed, the call says so at once."""
    with played_session(2, on_engine_death="continue") as (session, peers):
        caller = Caller(session)
        begun = caller.begin("x")
        for peer in peers:
            peer.link.handle.kill()
        eventually(lambda: session.ending is not None, DEADLOCK)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            caller.begin("x")
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            caller.begin("x", [0])
        caller.send(begun, "x", (), Deadline(DEADLOCK))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            begun.wait(Deadline(DEADLOCK))
        assert len(session.calls) == 0
    with played_session() as (session, _):
        session.close(0.0)
        with pytest.raises(ClosedError):
            Caller(session).begin("x")


def test_a_call_while_every_engine_is_closed_tells_the_last_death() -> None:
    """An engine that is about to come back takes no call, and whoever calls hears why."""
    with played_session(2, on_engine_death="restart") as (session, peers):
        for peer in peers:
            peer.link.handle.kill()
        eventually(lambda: len(session.deaths) == 2, DEADLOCK)
        assert session.state == "running"
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            Caller(session).begin("x")
