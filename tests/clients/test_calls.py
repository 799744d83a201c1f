"""The table of utility calls that wait for their reply."""

from __future__ import annotations

import threading

import pytest

from engine_client.clients.calls import PendingCalls
from engine_client.errors import EngineDeadError


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


def test_a_cancelled_future_does_not_disturb() -> None:
    """Settling a call whose future was cancelled in this moment raises nothing."""
    calls = PendingCalls()
    for settle in (lambda i: calls.settle(i, result=1), lambda i: calls.fail_all(ValueError)):
        call_id, future = calls.new()
        assert future.cancel()
        settle(call_id)
        assert len(calls) == 0


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
