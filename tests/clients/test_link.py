"""What a client holds of one engine."""

from __future__ import annotations

import os

import pytest

from helpers.peers import played_engine


def test_what_outlives_the_engine_can_be_read() -> None:
    """Stacks and log lines are read from memory that the client holds; after ``close`` they are gone."""
    with played_engine(3) as peer:
        link = peer.link
        assert link.read_stacks() == ""
        os.write(peer.faults, b"Thread 0x1\n")
        peer.status.log("WARNING a: line")
        assert link.read_stacks() == "Thread 0x1\n"
        assert link.log_lines() == ["WARNING a: line"]
        assert link.title == f"engine core 3 (pid {peer.process.pid})"
        assert f"rank=3 pid={link.pid}" in repr(link)
        link.close()
        link.close()
        assert link.read_stacks() == ""


def test_only_the_end_of_very_long_stacks_is_read() -> None:
    """What a crash wrote is bounded where it is read."""
    with played_engine() as peer:
        os.write(peer.faults, b"x" * (1 << 20) + b"end")
        assert len(peer.link.read_stacks()) == 256 * 1024
        assert peer.link.read_stacks().endswith("end")


def test_a_forked_copy_lets_go_of_lifeline_and_channel() -> None:
    """After ``close_after_fork`` this process no longer keeps the engine alive."""
    with played_engine() as peer:
        lifeline, channel = peer.link.lifeline, peer.link.channel.fileno()
        peer.link.close_after_fork()
        peer.link.close_after_fork()
        for fd in (lifeline, channel):
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)
