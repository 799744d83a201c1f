"""The handshake, with an engine played by the test; real starts are in test_sync and tests/faults."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_client import ClientOptions, HandshakeTimeout, StartupError
from engine_client.clients.start import Handshake, launch_engine
from engine_client.deadline import Deadline
from engine_client.errors import RemoteProtocolError
from engine_client.ipc.arena import ArenaWriter, create_memory
from engine_client.messages import EngineCoreReadyResponse
from engine_client.protocol.codec import dumps
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import (
    Init,
    decode_init,
    encode_failed,
    encode_hello,
    encode_ready,
    encode_status,
    encode_text,
)
from helpers.peers import Peer, played_engine
from helpers.timing import DEADLOCK, eventually, took_at_most

RESPONSE = EngineCoreReadyResponse(10, 20, 16, None, "auto", "0", 1, 1)


def make_init(rank: int, payload: Any = None) -> Init:
    return Init("token", rank, "m:f", ["p"] * 1000, [], {}, {}, dumps(payload))


def shake(
    peers: list[Peer],
    play: Callable[[], Any] = lambda: None,
    timeout: float = DEADLOCK,
    payload: Any = None,
    **options: Any,
) -> dict[int, EngineCoreReadyResponse]:
    """Run the handshake while ``play`` plays the engines in a thread."""
    thread = threading.Thread(target=play)
    thread.start()
    try:
        links = [peer.link for peer in peers]
        handshake = Handshake(
            links, lambda rank: make_init(rank, payload), "token", ClientOptions(**options), Deadline(timeout)
        )
        return handshake.run()
    finally:
        thread.join(DEADLOCK)


def wait_for_init(peer: Peer) -> Init:
    frames: list[Frame] = []
    eventually(lambda: frames.extend(peer.channel.receive()) or bool(frames), DEADLOCK)
    assert frames[0].kind == Kind.INIT
    return decode_init(frames[0])


def test_each_rank_is_led_to_ready() -> None:
    """HELLO is answered with INIT, READY ends the wait for a rank; what is reported of several is added up."""
    seen: list[Any] = []
    with played_engine(0) as first, played_engine(1) as second:

        def play() -> None:
            for peer in (second, first):
                peer.channel.send(encode_hello(1))
                init = wait_for_init(peer)
                assert (init.token, init.rank) == ("token", peer.link.rank)
                peer.channel.send(encode_status("loading", peer.link.rank, 2))
                peer.channel.send(encode_ready(init.token, RESPONSE))

        answers = shake([first, second], play, on_progress=lambda *event: seen.append(event))
        assert answers == {0: RESPONSE, 1: RESPONSE}
        phase = "importing and building the engine"
        assert seen == [
            *((phase, 0, 0), ("loading", 1, 2), ("ready", 1, 2)),
            *((phase, 0, 0), ("loading", 1, 4), ("ready", 2, 2)),
        ]
        assert first.link.phase == "ready"


def test_an_init_bigger_than_the_pipe_arrives() -> None:
    """A configuration of many megabytes is written as the engine reads it."""
    with played_engine() as peer:

        def play() -> None:
            peer.channel.send(encode_hello(1))
            init = wait_for_init(peer)
            assert sum(len(b) for b in init.payload.buffers) + len(init.payload.header) > 8 << 20
            peer.channel.send(encode_status("loading", 0, 0))
            peer.channel.send(encode_ready(init.token, RESPONSE))

        assert shake([peer], play, payload=[bytes([i]) * (1 << 20) for i in range(9)]) == {0: RESPONSE}


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (encode_hello(1, version=99), "version 99"),
        (encode_ready("token", RESPONSE), "sent READY although it is LAUNCHED"),
        (encode_status("loading", 1, 2), "sent STATUS although it is LAUNCHED"),
        (encode_text(Kind.GOODBYE, "SIGTERM"), "was shut down.*SIGTERM"),
        (Frame(Kind.HELLO, 0, 0, b"no pickle"), "cannot be used"),
    ],
)
def test_a_message_that_does_not_fit_ends_the_start(frame: Frame, text: str) -> None:
    """The error names the engine and what was wrong."""
    with played_engine() as peer:
        peer.channel.send(frame)
        with pytest.raises(StartupError, match=text) as caught:
            shake([peer])
        assert f"engine core 0 (pid {peer.process.pid})" in str(caught.value)


def test_an_engine_of_another_client_is_refused() -> None:
    """READY must repeat this client's token."""
    with played_engine() as peer:

        def play() -> None:
            peer.channel.send(encode_hello(1))
            wait_for_init(peer)
            peer.channel.send(encode_ready("other", RESPONSE))

        with pytest.raises(StartupError, match="another client"):
            shake([peer], play)


def test_an_exception_of_on_progress_ends_the_start_as_its_cause() -> None:
    """The user's callback is named, and its exception is the cause."""
    with played_engine() as peer:

        def play() -> None:
            peer.channel.send(encode_hello(1))
            wait_for_init(peer)
            peer.channel.send(encode_status("loading", 1, 2))

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("mine")

        with pytest.raises(StartupError, match="on_progress raised ZeroDivisionError: mine") as caught:
            shake([peer], play, on_progress=fail)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_bytes_that_are_no_frame_end_the_start() -> None:
    """The cause is a RemoteProtocolError."""
    with played_engine() as peer:
        os.write(peer.channel.fileno(), b"garbage" * 20)
        with pytest.raises(StartupError, match="unintelligible") as caught:
            shake([peer])
        assert isinstance(caught.value.__cause__, RemoteProtocolError)


def test_the_engine_s_exception_is_the_cause_and_only_failed_ranks_are_named() -> None:
    """FAILED carries the exception; a rank that was only slow is not blamed."""
    with played_engine(0) as good, played_engine(1) as bad:
        bad.channel.send(encode_hello(1))
        bad.channel.send(encode_failed(ValueError("marker"), "loading weights"))
        with pytest.raises(StartupError, match="ValueError: marker") as caught:
            shake([good, bad])
        assert isinstance(caught.value.__cause__, ValueError)
        assert "loading weights" in str(caught.value)
        assert "engine core 1" in str(caught.value)
        assert "engine core 0" not in str(caught.value)


@pytest.mark.parametrize("method", ["exec", "spawn"])
def test_an_exit_before_ready_is_named_with_all_that_is_known(method: Any) -> None:
    """Signal, memory hint, stacks, log lines, and for spawn the main guard."""
    with played_engine() as peer:
        peer.status.log("WARNING x: low on luck")
        os.write(peer.faults, b"Thread 0x2\n")
        peer.link.handle.kill()
        with pytest.raises(StartupError, match=r"SIGKILL\(-9\)") as caught:
            shake([peer], start_method=method)
        for text in ("memory", "low on luck", "Thread 0x2", "starting the process"):
            assert text in str(caught.value)
        assert ("__main__" in str(caught.value)) is (method == "spawn")


def test_what_was_sent_before_the_exit_counts() -> None:
    """A FAILED that was written before the process ended is the reason, not the exit."""
    with played_engine() as peer:
        peer.channel.send(encode_failed(KeyError("first"), "loading"))
        peer.channel.close()
        peer.link.handle.kill()
        peer.link.handle.join(10)
        with pytest.raises(StartupError, match="KeyError"):
            shake([peer])


def test_the_deadline_names_phase_limit_and_remedy() -> None:
    """A start that is stuck ends at its deadline, wherever it is stuck."""
    with played_engine() as peer:

        def play() -> None:
            peer.channel.send(encode_hello(1))
            wait_for_init(peer)
            peer.channel.send(encode_status("loading weights", 1, 2))

        with took_at_most(2.0), pytest.raises(HandshakeTimeout, match="loading weights") as caught:
            shake([peer], play, timeout=0.5)
        for text in ("0.5 s", "VLLM_ENGINE_READY_TIMEOUT_S", "slow weight loading"):
            assert text in str(caught.value)
        assert isinstance(caught.value, TimeoutError)


def test_an_engine_that_reports_without_end_does_not_outlive_the_deadline() -> None:
    """Progress is no excuse: the limit is for the whole start."""
    with played_engine() as peer:
        ended = threading.Event()

        def play() -> None:
            peer.channel.send(encode_hello(1))
            wait_for_init(peer)
            while not ended.wait(0.001):
                peer.channel.send(encode_status("loading weights", 1, 2))

        thread = threading.Thread(target=play)
        thread.start()
        try:
            with took_at_most(3.0), pytest.raises(HandshakeTimeout):
                shake([peer], timeout=0.3)
        finally:
            ended.set()
            thread.join()


def test_a_stream_that_ended_waits_for_the_exit() -> None:
    """An engine that closed its channel and lives is given up after a second or at the deadline, without spinning."""
    for timeout, error, text in ((0.5, HandshakeTimeout, "waited"), (DEADLOCK, StartupError, "closed its channel")):
        with played_engine() as peer:
            peer.channel.close()
            began = time.process_time()
            with took_at_most(2.0), pytest.raises(error, match=text):
                shake([peer], timeout=timeout)
            assert time.process_time() - began < 0.3


def test_a_launch_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors and memory made for an engine that could not be started are given back."""
    fd = create_memory("test")
    writer = ArenaWriter(fd, limit=0)
    monkeypatch.setattr("engine_client.ipc.launcher._executable", lambda: "/nonexistent/python")
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match="nonexistent"):
        launch_engine(0, ClientOptions(), writer)
    assert sorted(os.listdir("/proc/self/fd")) == before
    writer.close()
