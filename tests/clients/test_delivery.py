"""What each kind of frame means for whoever waits for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from engine_client import RemoteCallError
from engine_client.clients.delivery import deliver
from engine_client.clients.session import Session
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs
from engine_client.protocol.batch import encode_outputs
from engine_client.protocol.frames import Flag, Frame, Kind
from engine_client.protocol.wire import encode_dead, encode_reply, encode_text
from helpers.calls import call, played_session
from helpers.clients import make_request
from helpers.peers import Peer
from helpers.timing import DEADLOCK


@pytest.fixture
def played() -> Iterator[tuple[Session, Peer]]:
    """Yield a session and its only engine, whose frames the test delivers itself."""
    with played_session() as (session, (peer,)):
        yield session, peer


def give(session: Session, peer: Peer, frame: Frame, *, is_quiet: bool = False) -> float | None:
    """Deliver a frame; return for how many seconds its engine may live on."""
    limit = deliver(session, peer.link, frame, is_quiet=is_quiet, grace=3.0)
    return None if limit is None else limit.timeout


def test_outputs_go_to_whoever_asks_for_them(played: tuple[Session, Peer]) -> None:
    """Unless nobody is to be woken."""
    session, peer = played
    session.add(make_request("a"))
    (key,) = session.in_flight.of_rank(0)
    frame, _ = encode_outputs(EngineCoreOutputs(0, outputs=[EngineCoreOutput("a", [7])]), {"a": key})
    assert frame is not None
    assert give(session, peer, frame, is_quiet=True) is None
    with pytest.raises(TimeoutError):
        session.get(0)
    assert give(session, peer, frame) is None
    assert session.get(DEADLOCK).outputs[0].new_token_ids == [7]


def test_a_reply_ends_its_call(played: tuple[Session, Peer], caplog: pytest.LogCaptureFixture) -> None:
    """One that nobody waits for is dropped; that it has failed is logged, since nobody else will say so."""
    session, peer = played
    fan_out = call(session, "x")
    frame = encode_reply(fan_out.ids[0], 5)
    assert give(session, peer, frame, is_quiet=True) is None
    assert not fan_out.replies[0].done()
    give(session, peer, frame)
    assert fan_out.replies[0].result(0) == frame
    with caplog.at_level(logging.WARNING, "engine_client.session"):
        give(session, peer, frame)
        assert caplog.text == ""
        give(session, peer, Frame(Kind.REPLY, Flag.FAILED, 99, b""))
        assert "a utility call that its caller gave up has failed in engine core 0" in caplog.text


def test_last_words_are_kept(played: tuple[Session, Peer]) -> None:
    """Its engine has a second to end; words that cannot be decoded are a death all the same."""
    session, peer = played
    assert give(session, peer, encode_dead(KeyError("x"), "stepping")) == 1.0
    assert peer.link.last_words is not None
    error, phase = peer.link.last_words
    assert (type(error), phase) == (KeyError, "stepping")


def test_last_words_that_cannot_be_decoded(played: tuple[Session, Peer]) -> None:
    """They stand for themselves."""
    session, peer = played
    assert give(session, peer, Frame(Kind.DEAD, 0, 0, b"no pickle")) == 1.0
    assert peer.link.last_words is not None
    error, phase = peer.link.last_words
    assert isinstance(error, RemoteCallError)
    assert "cannot be decoded" in str(error)
    assert phase == "serving"


def test_a_farewell_gives_it_the_grace_time(played: tuple[Session, Peer]) -> None:
    """After it nothing but outputs and replies of what it finishes is taken."""
    session, peer = played
    assert give(session, peer, encode_text(Kind.GOODBYE, "asked by SIGTERM")) == 3.0
    assert peer.link.farewell == "asked by SIGTERM"
    assert give(session, peer, encode_text(Kind.READY, "late")) is None
