"""The busy loop, over real channels, with a scripted engine in a thread of this process."""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from engine_client import FinishReason
from engine_client.engine.busy_loop import LoopState
from engine_client.errors import RemoteProtocolError
from engine_client.protocol.frames import Flag, Frame, Kind
from engine_client.protocol.wire import (
    PING,
    decode_reply,
    decode_text,
    encode_abort,
    encode_add,
    encode_hello,
    encode_text,
    encode_utility,
)
from engine_client.testing.scripted import Script
from helpers.clients import make_request
from helpers.rig import rig
from helpers.timing import DEADLOCK, eventually
from helpers.transport import columns_of


def test_requests_run_to_their_end() -> None:
    """Each request is answered under its key; the status page counts steps and requests."""
    with rig() as r:
        r.add(5, "a", 3)
        r.add(6, "b", 1)
        assert r.finishes(2) == {5: (FinishReason.LENGTH, None), 6: (FinishReason.LENGTH, None)}
        eventually(lambda: r.status.counts() == (0, 0), DEADLOCK)
        assert r.status.snapshot().steps in (3, 4)  # the second may have come during a step of the first
        assert "running" in repr(r.loop)


def test_a_request_that_is_refused_ends_alone() -> None:
    """An undecodable request, a refused one, and a doubled id end with ERROR; the others run."""
    with rig(Script(step_seconds=0.01)) as r:
        r.add(1, "a", 20)
        r.add(2, "a", 1)
        r.add(3, "", 1, prompt=())
        r.clients[0].send(Frame(Kind.ADD, 0, 4, b"no pickle"))
        ended = r.finishes(4)
        assert {key: reason for key, (reason, _) in ended.items()} == {
            1: FinishReason.LENGTH,
            2: FinishReason.ERROR,
            3: FinishReason.ERROR,
            4: FinishReason.ERROR,
        }
        assert "already running" in ended[2][1]
        assert "prompt" in ended[3][1]
        r.add(5, "", 1)
        assert r.finishes(1)[5][0] is FinishReason.LENGTH


def test_an_abort_during_a_step_counts_before_its_outputs_go_out() -> None:
    """Nothing of an aborted request leaves after the abort was read, and its id is free for the next request."""
    with rig(Script(step_seconds=0.1)) as r:
        r.add(1, "a", 100)
        eventually(lambda: r.status.snapshot().is_in_step, DEADLOCK)
        r.clients[0].send(encode_abort([1, 99]))
        r.add(2, "a", 1)
        assert r.finishes(1) == {2: (FinishReason.LENGTH, None)}
        keys = [key for f in r.frames if f.kind == Kind.OUTPUTS for key in columns_of(f)[0].keys]
        assert 1 not in keys


def test_utilities_answer_or_fail_alone() -> None:
    """Results, errors, an unknown name, an undecodable call, and the loop's own ping."""
    with rig() as r:
        assert r.call("echo", 5) == 5
        assert r.call(PING) is None
        with pytest.raises(KeyError, match="marker"):
            r.call("fail", KeyError("marker"))
        with pytest.raises(AttributeError, match=r"no_such.*echo"):
            r.call("no_such")
        r.clients[0].send(Frame(Kind.UTILITY, 0, 9, b"no pickle"))
        reply = r.receive(Kind.REPLY)
        assert (reply.ref, reply.flags & Flag.FAILED) == (9, Flag.FAILED)


def test_payloads_that_need_the_main_module_get_it_first() -> None:
    """The loop runs the client's main module before it decodes such a payload; its failure fails that payload."""
    ran: list[int] = []

    def ensure_main() -> None:
        ran.append(1)
        if len(ran) > 2:
            raise ImportError("no main")

    with rig(ensure_main=ensure_main) as r:
        request = make_request("a", 1)
        add = encode_add(1, request, array("I", [1]))
        r.clients[0].send(add._replace(flags=Flag.NEEDS_MAIN))
        assert r.finishes(1)[1][0] is FinishReason.LENGTH
        call = encode_utility(1, "echo", (1,))._replace(flags=Flag.NEEDS_MAIN)
        r.clients[0].send(call)
        assert decode_reply(r.receive(Kind.REPLY)) == (False, 1)
        r.clients[0].send(call)
        failed, error = decode_reply(r.receive(Kind.REPLY))
        assert failed
        assert isinstance(error, ImportError)
        assert len(ran) == 3


def test_deferred_calls_are_answered_when_done() -> None:
    """A result and an error that come later, from another thread, wake the loop."""
    with rig() as r:
        r.clients[0].send(encode_utility(1, "deferred", ("late", 0.05)))
        r.clients[0].send(encode_utility(2, "deferred", (OSError("late"), 0.1)))
        assert decode_reply(r.receive(Kind.REPLY)) == (False, "late")
        failed, error = decode_reply(r.receive(Kind.REPLY))
        assert failed
        assert isinstance(error, OSError)


def test_deferred_calls_that_are_cancelled_or_never_done_fail() -> None:
    """The engine's own cancellation is an error; the end of the loop answers what is left."""
    futures: list[Future[Any]] = []
    with rig() as r:

        def later() -> Future[Any]:
            futures.append(Future())
            return futures[-1]

        r.loop._calls.utilities = {"later": later}  # noqa: SLF001  # a utility of this test
        for call_id in (1, 2, 3):
            r.clients[0].send(encode_utility(call_id, "later", ()))
        eventually(lambda: len(futures) == 3, DEADLOCK)
        futures[0].cancel()
        assert "cancelled" in str(decode_reply(r.receive(Kind.REPLY))[1])
        r.clients[0].send(encode_text(Kind.SHUTDOWN, "asked"))
        for _ in range(2):
            assert "shutting down" in str(decode_reply(r.receive(Kind.REPLY))[1])
        assert "client asked" in decode_text(r.receive(Kind.GOODBYE))
        r.thread.join(DEADLOCK)
        assert r.reason == "its client asked"
        assert r.loop.state is LoopState.ENDED


def test_shutdown_aborts_what_is_in_flight() -> None:
    """With no timeout everything ends with ABORT before the goodbye."""
    with rig(Script(step_seconds=0.01)) as r:
        r.add(1, "a", 100_000)
        r.receive(Kind.OUTPUTS)
        r.clients[0].send(encode_text(Kind.SHUTDOWN, "asked"))
        assert r.finishes(1) == {1: (FinishReason.ABORT, None)}
        r.receive(Kind.GOODBYE)


def test_shutdown_with_a_timeout_lets_requests_finish_and_refuses_new_ones() -> None:
    """While it drains, a new request ends with ABORT and a call with 'Server shutting down'."""
    with rig(Script(step_seconds=0.02), shutdown_timeout=DEADLOCK) as r:
        r.add(1, "a", 20)
        r.receive(Kind.OUTPUTS)
        r.clients[0].send(encode_text(Kind.SHUTDOWN, "asked"))
        r.add(2, "b", 1)
        r.clients[0].send(encode_utility(7, "echo", (1,)))
        assert "Server shutting down" in str(decode_reply(r.receive(Kind.REPLY))[1])
        assert r.finishes(2) == {1: (FinishReason.LENGTH, None), 2: (FinishReason.ABORT, None)}
        r.receive(Kind.GOODBYE)


def test_draining_ends_at_its_deadline() -> None:
    """What has not finished by then is aborted."""
    with rig(Script(step_seconds=0.01), shutdown_timeout=0.1) as r:
        r.add(1, "a", 100_000)
        r.receive(Kind.OUTPUTS)
        r.loop.request_shutdown("asked")
        r.loop.request_shutdown("asked again")
        assert r.finishes(1) == {1: (FinishReason.ABORT, None)}
        assert decode_text(r.receive(Kind.GOODBYE)) == "asked"


def test_a_front_end_that_leaves_has_its_requests_aborted_and_the_last_one_ends_the_loop() -> None:
    """One of two leaves: the other is served on; the second leaves: the loop ends."""
    with rig(Script(step_seconds=0.005), count=2) as r:
        r.add(1, "a", 100_000, client=0)
        r.add(1, "b", 100_000, client=1)
        eventually(lambda: len(r.call("info", client=1)["requests"]) == 2, DEADLOCK)
        r.clients[0].close()
        eventually(lambda: r.call("info", client=1)["requests"] == ["b"], DEADLOCK)
        r.clients[1].close()
        r.thread.join(DEADLOCK)
        assert r.reason == "its client has gone"


def test_outputs_go_only_to_the_front_end_that_asked() -> None:
    """Two front-ends may use the same keys."""
    with rig(count=2) as r:
        r.add(1, "a", 1, client=0)
        r.add(1, "b", 1, client=1)
        assert list(r.finishes(1, client=0)) == [1]
        assert list(r.finishes(1, client=1)) == [1]


def test_a_front_end_that_does_not_read_is_cut_off() -> None:
    """Past the limit of its backlog it is dropped, and the other front-end is served on."""
    with rig(count=2, backlog_limit=1 << 20) as r:
        r.clients[0].send(encode_utility(1, "echo", (bytes(5 << 20),)))
        while not r.clients[0].flush():
            time.sleep(0.001)
        eventually(lambda: r.front_ends[0].gone, DEADLOCK)
        assert r.call("echo", 1, client=1) == 1


def test_garbage_ends_that_channel_and_a_wrong_message_is_ignored() -> None:
    """A message that is not for an engine is ignored; bytes that are no frame end the channel."""
    with rig(count=2) as r:
        r.clients[0].send(encode_hello(1))
        r.clients[0].send(Frame(Kind.ABORT, 0, 0, b"no pickle"))
        assert r.call("echo", 1) == 1
        os.write(r.clients[0].fileno(), b"garbage" * 10)
        eventually(lambda: r.front_ends[0].gone, DEADLOCK)
        assert r.call("echo", 2, client=1) == 2


def test_garbage_of_the_only_client_is_an_error_and_its_end_is_none() -> None:
    """``run`` raises what was wrong with the stream; a client that dies inside a message has merely gone."""
    with rig() as r:
        os.write(r.clients[0].fileno(), b"garbage" * 10)
        r.thread.join(DEADLOCK)
        assert isinstance(r.error, RemoteProtocolError)
    with rig() as r:
        os.write(r.clients[0].fileno(), b"ECF1")
        r.clients[0].close()
        r.thread.join(DEADLOCK)
        assert r.error is None
        assert r.loop.reason == "its client has gone"


def test_an_exception_of_a_step_ends_the_loop() -> None:
    """``run`` raises what the step raised."""
    with rig() as r:
        r.call("fail_step", ZeroDivisionError("marker"))
        r.thread.join(DEADLOCK)
        assert isinstance(r.error, ZeroDivisionError)


def test_a_failure_from_another_thread_ends_the_loop() -> None:
    """An executor whose workers have died can end an idle engine."""
    with rig() as r:
        r.loop.fail(RuntimeError("Executor failed."))
        r.thread.join(DEADLOCK)
        assert str(r.error) == "Executor failed."


def test_system_exit_of_a_utility_ends_the_loop() -> None:
    """A utility cannot swallow the end of its process."""
    with rig() as r:
        r.clients[0].send(encode_utility(1, "die", ("system_exit",)))
        r.thread.join(DEADLOCK)
        assert isinstance(r.error, SystemExit)


def test_an_engine_that_waits_does_not_spin() -> None:
    """A step that had work and ran nothing yields the processor."""
    calls: list[float] = []

    def step() -> tuple[None, bool]:
        calls.append(time.monotonic())
        return None, False

    with rig() as r:
        r.engine.step_fn = step  # type: ignore[method-assign, assignment]
        r.engine.has_work = lambda: True  # type: ignore[method-assign]
        r.loop._wakeup.wakeup()  # noqa: SLF001  # as an answer would
        time.sleep(0.2)
        r.engine.has_work = lambda: False  # type: ignore[method-assign]
        assert len(calls) < 400


def test_a_signal_handler_may_ask_for_the_end() -> None:
    """``request_shutdown`` from a signal handler wakes the blocked loop."""
    with rig() as r:
        old: Callable[..., Any] | int | None = signal.signal(
            signal.SIGUSR1, lambda *_: r.loop.request_shutdown("SIGUSR1")
        )
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, old)
        r.thread.join(DEADLOCK)
        assert r.reason == "SIGUSR1"


def test_an_idle_engine_polls_for_a_while_and_then_sleeps() -> None:
    """With ``spin_us`` it looks again and again before it blocks; what comes meanwhile is served."""
    with rig(spin_us=20_000) as r:
        selector = r.loop._selector  # noqa: SLF001
        timeouts: list[float | None] = []
        select = selector.select
        selector.select = lambda timeout=None: (timeouts.append(timeout), select(timeout))[1]  # type: ignore[method-assign]
        r.call(PING)
        r.call(PING)
        eventually(lambda: bool(timeouts) and timeouts[-1] is None, DEADLOCK)
        assert timeouts.count(0) > 10
        r.call(PING)
