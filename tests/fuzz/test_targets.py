"""Hostile bytes: garbage, and streams of the protocol that are cut, changed, repeated, or lie about their lengths."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from engine_client import EngineDeadError
from engine_client.errors import RemoteProtocolError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse
from engine_client.protocol import wire
from engine_client.protocol.batch import encode_outputs
from engine_client.protocol.codec import dumps
from engine_client.protocol.frames import Frame, Kind, RawFrame, Segment
from engine_client.protocol.framing import MAX_FRAME, FrameReader, pack_prefix
from fuzz.targets import DECODERS, LIMIT, TARGETS, framing, handshake
from helpers.calls import played_session
from helpers.clients import make_request
from helpers.hostile import damaged, packed
from helpers.rig import rig
from helpers.timing import DEADLOCK, eventually


def life() -> list[bytes]:
    """Return what an engine sends in its life, message by message."""
    outputs = EngineCoreOutputs(0, [EngineCoreOutput("a", [1, 2])])
    outputs.outputs[0].kv_transfer_params = {"x": [1.5]}
    batch, _ = encode_outputs(outputs, {"a": 1})
    assert batch is not None
    error = ValueError("what")
    frames = [
        wire.encode_hello(1),
        wire.encode_status("loading", 1, 2),
        wire.encode_ready("token", EngineCoreReadyResponse(1, 2, 3, None, "auto", "m", 1, 1)),
        batch,
        wire.encode_reply(1, {"a": b"x" * 70_000}),
        wire.encode_reply(2, error=error),
        wire.encode_dead(error, "serving"),
        wire.encode_text(Kind.GOODBYE, "bye"),
    ]
    return [packed(frame) for frame in frames]


LIFE = life()


def requests() -> list[bytes]:
    """Return what a client sends in the life of an engine."""
    request = make_request("a", 3)
    frames = [
        wire.encode_init(wire.Init("token", 0, "module:function", [], [], {}, {}, dumps((1, 2, False)))),
        wire.encode_add(1, request, array("I", request.prompt_token_ids or ())),
        wire.encode_add(2, make_request("b", 3, cache_salt="x", trace_headers={"a": "b"}), array("I", [1, 2])),
        wire.encode_abort([1, 2, 1 << 40]),
        wire.encode_utility(1, "echo", (1, "x")),
        wire.encode_utility(2, "echo", (b"x" * 70_000, [1.5])),
        wire.encode_text(Kind.ATTACH, str(os.getpid())),
        wire.encode_text(Kind.SHUTDOWN, "enough"),
    ]
    return [packed(frame) for frame in frames]


REQUESTS = requests()


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.one_of(st.binary(max_size=500), damaged(LIFE), damaged(REQUESTS)))
@example(data=b"\xff" + b"".join(LIFE))
@example(data=b"\x00" + b"".join(LIFE[:3]) * 2)
@example(data=b"\xff" + LIFE[-1] + LIFE[0])
@example(data=b"")
def test_any_bytes(target: str, data: bytes) -> None:
    """They are taken apart or refused, after which nothing more is taken; memory and stack are not exhausted."""
    TARGETS[target](data)


def test_the_whole_life_is_understood() -> None:
    """What is fuzzed is the real thing: undamaged, all of it comes through."""
    assert len(framing(b"\xff" + b"".join(LIFE))) == len(LIFE)
    handshake(b"\xff" + b"".join(LIFE))
    assert len(framing(b"\xff" + b"".join(REQUESTS))) == len(REQUESTS)
    for stream in LIFE + REQUESTS:
        [frame] = framing(b"\xff" + stream)
        if isinstance(frame, RawFrame):
            frame = Frame(frame.kind, frame.flags, frame.ref, frame.header, frame.inline)
        DECODERS[frame.kind](frame)


@given(length=st.integers(0, (1 << 64) - 1), count=st.integers(0, 65535), have=st.integers(0, 1000))
@settings(max_examples=50)
def test_memory_follows_the_bytes_and_not_the_lengths(length: int, count: int, have: int) -> None:
    """Whatever a prefix promises, within the limit or beyond it, a little more than what has come is allocated."""
    for limit in (LIMIT, MAX_FRAME):
        reader = FrameReader(limit)
        prefix = pack_prefix(Kind.REPLY, 0, 0, length, [Segment(length)] * count)[:24]
        tracemalloc.start()
        try:
            for piece in (prefix, bytes(have)):
                room = reader.buffer()
                room[: len(piece)] = piece
                reader.advance(len(piece))
        except RemoteProtocolError:
            assert length + count * 24 > limit or have
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 18 << 20


HOSTILE: dict[str, bytes] = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 3,
    "oversized": pack_prefix(Kind.REPLY, 0, 1, 1 << 62),
    "oversized segment": pack_prefix(Kind.REPLY, 0, 1, 4, [Segment(1 << 62)]),
    "replayed hello": LIFE[0],
    "replayed ready": LIFE[2],
    "a client's": packed(Frame(Kind.ADD, 0, 1, b"x")),
    "an unknown kind": b"ECF1" + bytes([99]) + bytes(19),
    "outputs that are none": packed(Frame(Kind.OUTPUTS, 0, 1, pickle.dumps(7))),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_client_ends_the_channel(how: str) -> None:
    """Every call gets EngineDeadError, with RemoteProtocolError as its cause, and the engine is killed."""
    with played_session() as (session, (peer,)):
        _write(peer, packed(wire.encode_reply(77, 1)) + HOSTILE[how])
        eventually(lambda: session.state == "dead", DEADLOCK)
        with pytest.raises(EngineDeadError) as caught:
            session.ensure_alive()
        assert isinstance(caught.value.__cause__, RemoteProtocolError), caught.value.__cause__
        assert not peer.link.handle.is_alive()


def _write(peer: Any, data: bytes) -> None:
    assert os.write(peer.channel.fileno(), data) == len(data)


@given(data=damaged(LIFE))
@settings(max_examples=8)
def test_a_client_survives_any_bytes_or_is_cleanly_dead(data: bytes) -> None:
    """Its reader never ends by them: the session runs on, or has an ending that says why."""
    with played_session(codec="restricted") as (session, (peer,)):
        peer.link.channel.is_restricted = True
        _write(peer, data[1:])
        peer.channel.close()
        eventually(lambda: session.state != "running", DEADLOCK)
        with pytest.raises(EngineDeadError) as caught:
            session.ensure_alive()
        assert "failed to read it" not in str(caught.value)


def messages() -> list[bytes]:
    """Return what a client sends and an engine lives on by: all but what starts it, and ends it."""
    return REQUESTS[1:-1]


@given(data=damaged(messages()))
@settings(max_examples=8)
def test_an_engine_serves_others_whatever_one_sends(data: bytes) -> None:
    """Its loop never ends by any bytes of one front-end: it drops that, or ignores a message, and serves the other."""
    with rig(count=2) as r:
        r.front_ends[0].channel.is_restricted = True  # damaged pickles are not run here
        assert os.write(r.clients[0].fileno(), data[1:]) == len(data) - 1
        assert r.call("echo", 1, client=1) == 1
        r.clients[0].close()
        eventually(lambda: r.front_ends[0].gone, DEADLOCK)
        assert r.call("echo", 2, client=1) == 2
        assert r.error is None
