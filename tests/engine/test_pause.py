"""Futures of those who wait for an engine to drain."""

from __future__ import annotations

import pytest

from engine_client.engine.pause import DrainWaiters


def yes():
    return True


def test_answers_come_with_the_actions_result():
    """Each waiter gets what its own action returned, once."""
    waiters = DrainWaiters()
    futures = [waiters.add(yes, lambda: "first"), waiters.add(yes, lambda: "second")]
    assert len(waiters) == 2
    assert not any(future.done() for future in futures)
    waiters.answer()
    waiters.answer()
    assert [future.result(0) for future in futures] == ["first", "second"]
    assert len(waiters) == 0


def test_an_action_that_fails_fails_its_own_waiter():
    """An exception of one action is its waiter's; the others get their results."""

    def fail():
        raise LookupError("unique")

    waiters = DrainWaiters()
    failed, answered = waiters.add(yes, fail), waiters.add(yes, lambda: 5)
    waiters.answer()
    assert answered.result(0) == 5
    with pytest.raises(LookupError, match="unique"):
        failed.result(0)


def test_give_up_says_why_and_does_nothing_else():
    """Waiters that are given up get the reason, each an exception of its own; their actions do not run."""
    waiters = DrainWaiters()
    futures = [waiters.add(yes, pytest.fail), waiters.add(yes, pytest.fail)]
    waiters.give_up("resumed")
    errors = [future.exception(0) for future in futures]
    assert [str(error) for error in errors] == ["resumed", "resumed"]
    assert errors[0] is not errors[1]


def test_cannot_be_cancelled():
    """A waiter cannot cancel its future, so that the answer always finds it open."""
    waiters = DrainWaiters()
    future = waiters.add(yes, lambda: 1)
    assert not future.cancel()
    waiters.answer()
    assert future.result(0) == 1


def test_each_waits_for_its_own_condition():
    """A waiter whose pause is not complete goes on to wait; the others are answered."""
    complete: list[int] = []
    waiters = DrainWaiters()
    late, early = waiters.add(lambda: bool(complete), lambda: "late"), waiters.add(yes, lambda: "early")
    waiters.answer()
    assert early.result(0) == "early"
    assert not late.done()
    complete.append(1)
    waiters.answer()
    assert late.result(0) == "late"
