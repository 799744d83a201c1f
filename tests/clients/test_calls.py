"""The table of utility calls that wait for their reply."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from engine_client.clients.calls import PendingCalls, Reply
from engine_client.errors import EngineDeadError
from helpers.interrupts import interrupt_everywhere
from helpers.timing import DEADLOCK


def test_a_call_ends_with_its_result_or_its_error() -> None:
    """Whoever settles a call takes it out of the table."""
    calls = PendingCalls()
    first, good = calls.new()
    second, bad = calls.new()
    assert first != second
    assert len(calls) == 2
    assert "2" in repr(calls)
    calls.settle(first, result=5)
    calls.settle(second, error=KeyError("x"))
    assert good.result(0) == 5
    with pytest.raises(KeyError):
        bad.result(0)
    assert len(calls) == 0


def test_a_reply_to_a_call_that_was_given_up_is_dropped() -> None:
    """Nobody waits for it, and ``settle`` says so."""
    calls = PendingCalls()
    call_id, _ = calls.new()
    calls.discard(call_id)
    calls.discard(call_id)
    assert not calls.settle(call_id, result=1)
    waiting, _ = calls.new()
    assert calls.settle(waiting, error=ValueError())
    assert not calls.settle(waiting, result=1)


def test_a_reply_ends_once() -> None:
    """The first end counts, whatever comes later; who asks late gets the same."""
    reply = Reply()
    assert "pending" in repr(reply)
    with pytest.raises(TimeoutError):
        reply.result(0)
    reply.set_result(1)
    reply.set_exception(ValueError())
    reply.set_result(2)
    assert reply.result() == 1
    assert reply.exception() is None
    assert "done" in repr(reply)


def test_callbacks_are_called_once_each_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Those added before the end are called at it, those added later at once; one that raises stops none of them."""
    reply, seen = Reply(), []

    def fail(_: Reply) -> None:
        raise SystemExit("not for you")

    reply.add_done_callback(fail)
    reply.add_done_callback(seen.append)
    assert seen == []
    reply.set_exception(KeyError("x"))
    reply.add_done_callback(seen.append)
    assert seen == [reply, reply]
    assert "not for you" in caplog.text


def test_who_waits_is_told_before_callbacks_that_were_there_before() -> None:
    """A callback may take long; whoever waits for the same reply is not held up by it."""
    reply, seen = Reply(), []
    reply.add_done_callback(lambda _: seen.append("callback"))
    reply.add_waiter(lambda _: seen.append("waiter"))
    reply.set_result(1)
    reply.add_waiter(lambda _: seen.append("late"))
    assert seen == ["waiter", "callback", "late"]


def test_an_interrupt_of_whoever_waits_leaves_the_reply_to_be_set() -> None:
    """Wherever it comes: the thread that ends the call is not held up, and a second wait gets the result."""
    reply = Reply()

    def check(where: str) -> None:
        other = Reply()
        thread = threading.Thread(target=other.set_result, args=(where,))
        thread.start()
        assert other.result(DEADLOCK) == where

    def wait() -> None:
        with suppress(TimeoutError):
            reply.result(0.001)

    assert interrupt_everywhere(wait, check) > 5
    reply.set_result(3)
    assert interrupt_everywhere(lambda: reply.result(1), lambda _: None) > 2
    assert reply.result() == 3


def test_all_fail_each_with_an_error_of_its_own() -> None:
    """Every waiter gets an instance of its own."""
    calls = PendingCalls()
    futures = [calls.new()[1] for _ in range(3)]
    calls.fail_all(EngineDeadError)
    errors = [future.exception(0) for future in futures]
    assert all(isinstance(error, EngineDeadError) for error in errors)
    assert len({id(error) for error in errors}) == 3


def test_threads_that_fail_and_settle_at_once_end_each_future_once() -> None:
    """Under a race of settle and fail_all every future ends, and nothing raises."""
    for _ in range(50):
        calls = PendingCalls()
        made = [calls.new() for _ in range(50)]
        barrier = threading.Barrier(3)
        errors: list[BaseException] = []

        def run(work: object, barrier: threading.Barrier = barrier, errors: list[BaseException] = errors) -> None:
            barrier.wait()
            try:
                work()  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        def settle(calls: PendingCalls = calls, made: list = made) -> None:  # type: ignore[type-arg]
            for call_id, _ in made:
                calls.settle(call_id, result=1)

        jobs = [settle, lambda calls=calls: calls.fail_all(ValueError), lambda calls=calls: calls.fail_all(ValueError)]
        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert all(future.done() for _, future in made)


def test_an_interrupt_inside_of_a_callback_passes() -> None:
    """It is that of the thread which added the callback to a reply that has ended; other callbacks still come."""
    reply, seen = Reply(), []
    reply.set_result(1)

    def interrupt(_: Reply) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reply.add_done_callback(interrupt)
    reply.add_done_callback(seen.append)
    assert seen == [reply]


def test_a_call_can_be_discarded_by_the_id_that_it_will_have() -> None:
    """Before, while and after it is registered."""
    calls = PendingCalls()
    call_id = calls.new_id()
    calls.discard(call_id)
    assert calls.new(call_id)[0] == call_id
    calls.discard(call_id)
    assert len(calls) == 0
    assert not calls.settle(call_id, result=1)


def test_the_calls_to_one_engine_fail_alone() -> None:
    """Each with an error of its own; calls to other engines wait on."""
    calls = PendingCalls()
    mine = [calls.new(rank=1)[1] for _ in range(3)]
    call_id, other = calls.new(rank=0)
    assert calls.has_rank(1)
    calls.fail_rank(1, lambda: KeyError("gone"))
    errors = [reply.exception(0) for reply in mine]
    assert all(isinstance(error, KeyError) for error in errors)
    assert len(set(map(id, errors))) == 3
    assert not calls.has_rank(1)
    assert calls.has_rank(0)
    assert list(calls.replies) == [call_id]
    assert not other.done()


def test_the_calls_of_an_owner_who_is_gone_are_given_up() -> None:
    """Nobody hears of their replies; calls of others, and of threads, wait on."""
    calls = PendingCalls()
    loop, other = object(), object()
    theirs = [calls.new(owner=loop)[0] for _ in range(2)]
    kept = [calls.new(owner=other)[0], calls.new()[0]]
    calls.discard_of(loop)
    assert list(calls.replies) == kept
    assert not any(calls.settle(call_id, result=1) for call_id in theirs)
