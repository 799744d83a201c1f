"""Descriptors stay clear of the standard streams."""

from __future__ import annotations

import os

import pytest

from engine_client.ipc.descriptors import above_stdio, close_all
from helpers.procs import run_script


def test_a_high_descriptor_is_kept():
    """A descriptor of 3 or above is returned as it is."""
    read, write = os.pipe()
    assert above_stdio(read) == read
    os.close(read)
    os.close(write)


def test_a_low_descriptor_is_moved():
    """With 0 to 2 closed, what is opened moves up, is not inherited, works, and leaves the low number free."""
    run_script("""
        import os
        from engine_client.ipc.descriptors import above_stdio

        os.close(0)
        low, write = os.pipe()
        assert low == 0
        high = above_stdio(low)
        assert high >= 3 and not os.get_inheritable(high)
        os.write(write, b"x")
        assert os.read(high, 1) == b"x"
        try:
            os.fstat(0)
        except OSError:
            os._exit(0)
        os._exit(1)
    """).check()


def test_the_original_is_closed_when_none_is_left(monkeypatch):
    """Running out of descriptors raises OSError and leaks nothing."""
    closed = []

    def refuse(*args):
        raise OSError(24, "too many open files")

    monkeypatch.setattr("engine_client.ipc.descriptors.fcntl.fcntl", refuse)
    monkeypatch.setattr("engine_client.ipc.descriptors.os.close", closed.append)
    with pytest.raises(OSError, match="too many"):
        above_stdio(1)
    assert closed == [1]


def test_all_are_closed_once():
    """Every descriptor of a list is closed and taken from it; an empty list is none."""
    fds = [*os.pipe(), *os.pipe()]
    before = list(fds)
    close_all(fds)
    close_all(fds)
    assert fds == []
    for fd in before:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
