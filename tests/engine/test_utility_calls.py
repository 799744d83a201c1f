"""Utility calls, without a loop; with one they are in test_busy_loop."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import Future
from typing import Any

import pytest

from engine_client.engine.utility_calls import UtilityCalls
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import PING, decode_utility, encode_utility


class FrontEndStub:
    """Notes the answers."""

    def __init__(self) -> None:
        self.index = 0
        self.gone = False
        self.answers: list[tuple[int, Any]] = []

    def send_result(self, call_id: int, result: Any) -> None:
        """Note a result."""
        self.answers.append((call_id, result))

    def send_failure(self, call_id: int, error: BaseException) -> None:
        """Note an error."""
        self.answers.append((call_id, repr(error)))


@pytest.fixture
def stub() -> FrontEndStub:
    """Return a front-end."""
    return FrontEndStub()


def make(steps: list[str], **utilities: Any) -> UtilityCalls:
    return UtilityCalls(
        utilities,
        decode=decode_utility,
        before_reply=lambda: steps.append("before"),
        wakeup=lambda: steps.append("wakeup"),
    )


def test_values_and_errors_are_answered_at_once(stub: Any) -> None:
    """A value, an error, an unknown name, an undecodable call, and the ping."""
    steps: list[str] = []
    calls = make(steps, double=lambda value: 2 * value)
    calls.run(stub, encode_utility(1, "double", (4,)))
    calls.run(stub, encode_utility(2, "double", ()))
    calls.run(stub, encode_utility(3, "no_such", ()))
    calls.run(stub, Frame(Kind.UTILITY, 0, 4, b"no pickle"))
    calls.run(stub, encode_utility(5, PING, ()))
    (one, two, three, four, five) = stub.answers
    assert one == (1, 8)
    assert "TypeError" in two[1]
    assert "no_such" in three[1]
    assert four[0] == 4
    assert five == (5, None)
    assert steps == ["before", "before"]


def test_a_failed_call_keeps_nothing_of_its_arguments(stub: Any) -> None:
    """Not even where the error is a variable of the frames that it went through, so that only a collection finds it."""
    kept: list[Any] = []

    class Value:
        pass

    def fail(error: Exception) -> None:
        value = Value()
        kept.append(weakref.ref(value))
        raise error

    gc.disable()
    try:
        make([], fail=fail).run(stub, encode_utility(1, "fail", (KeyError("as asked"),)))
        assert stub.answers == [(1, "KeyError('as asked')")]
        assert kept[0]() is None
    finally:
        gc.enable()


def test_system_exit_passes_through(stub: Any) -> None:
    """A utility cannot swallow the end of its process."""
    with pytest.raises(SystemExit):
        make([], leave=lambda: sys.exit(3)).run(stub, encode_utility(1, "leave", ()))
    assert stub.answers == []


def test_futures_are_answered_when_done(stub: Any) -> None:
    """Each once, in the order in which they were done; what is never done fails at the end."""
    steps: list[str] = []
    futures: list[Future[Any]] = [Future() for _ in range(4)]
    waiting = iter(futures)
    calls = make(steps, later=lambda: next(waiting))
    for call_id in range(4):
        calls.run(stub, encode_utility(call_id, "later", ()))
    assert "deferred=4" in repr(calls)
    calls.answer_ready()
    assert stub.answers == []
    futures[2].set_result("two")
    futures[0].set_exception(KeyError("zero"))
    futures[1].cancel()
    calls.answer_ready()
    assert stub.answers[0] == (2, "two")
    assert stub.answers[1] == (0, "KeyError('zero')")
    assert "cancelled" in stub.answers[2][1]
    calls.fail_all(lambda front_end: ValueError("over"))
    assert stub.answers[3] == (3, "ValueError('over')")
    futures[3].set_result("too late")
    calls.answer_ready()
    assert len(stub.answers) == 4
    assert steps.count("wakeup") == 4


def test_a_front_end_that_left_gets_no_answer(stub: Any) -> None:
    """The result of its call is dropped."""
    future: Future[Any] = Future()
    calls = make([], later=lambda: future)
    calls.run(stub, encode_utility(1, "later", ()))
    stub.gone = True
    future.set_result(1)
    calls.answer_ready()
    assert stub.answers == []
