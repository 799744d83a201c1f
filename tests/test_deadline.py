"""Deadlines: one absolute point for several waits, and timeouts that are checked where they enter."""

from __future__ import annotations

import time

import pytest

from engine_client.deadline import Deadline, check_timeout


@pytest.mark.parametrize(("value", "expected"), [(None, None), (0, 0.0), (1.5, 1.5), (float("inf"), float("inf"))])
def test_usable_timeouts(value, expected):
    """Seconds from zero up are usable, and None waits without limit."""
    assert check_timeout(value) == expected


@pytest.mark.parametrize("value", [-1, -0.001, float("nan"), float("-inf")])
def test_timeouts_out_of_range(value):
    """A negative timeout, or one that is no number, is a ValueError that names the parameter."""
    with pytest.raises(ValueError, match="grace must be zero or more"):
        check_timeout(value, "grace")


@pytest.mark.parametrize("value", ["1", True, [1], 1j])
def test_timeouts_of_the_wrong_type(value):
    """Anything but a number is a TypeError that names the parameter."""
    with pytest.raises(TypeError, match="grace must be a number"):
        check_timeout(value, "grace")


def test_deadline_comes():
    """What remains goes down to zero and stays there."""
    deadline = Deadline(0.02)
    assert 0 < deadline.remaining() <= 0.02
    assert not deadline.expired()
    assert deadline.capped(60) <= 0.02
    assert deadline.capped(0.0001) == 0.0001
    time.sleep(0.03)
    assert deadline.expired()
    assert deadline.remaining() == deadline.capped(1) == 0.0
    assert repr(deadline) == "Deadline(remaining=0.0)"


def test_no_deadline():
    """Without a timeout the point never comes."""
    deadline = Deadline(None)
    assert deadline.remaining() is None
    assert not deadline.expired()
    assert deadline.capped(5) == 5


def test_infinite_timeout():
    """An infinite timeout is the same as none."""
    assert Deadline(float("inf")).remaining() is None


def test_deadline_at_once():
    """A timeout of zero has expired when it is made."""
    assert Deadline(0).expired()
