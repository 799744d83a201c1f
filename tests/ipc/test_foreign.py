"""Processes that somebody else has started and will reap."""

from __future__ import annotations

import os
import subprocess

import pytest

from engine_client.ipc.foreign import ForeignHandle
from helpers.timing import took_at_most


def test_its_end_is_seen() -> None:
    """The sentinel fires, ``join`` returns; how it ended is not known, and nothing here ends it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        handle = ForeignHandle("engine core 0", process.pid)
        try:
            handle.terminate()
            handle.kill()
            with took_at_most(5):
                handle.join(0.01)
            assert handle.is_alive()
            assert process.poll() is None
            assert repr(handle) == f"<ForeignHandle engine core 0 pid={process.pid}>"
            process.kill()
            handle.join()
            assert not handle.is_alive()
            assert handle.exitcode is None
        finally:
            handle.close()
        handle.close()
        handle.join(5)
        assert not handle.is_alive()


def test_a_high_descriptor_will_do() -> None:
    """A host may have more than a thousand descriptors open, beyond which ``select`` knows none."""
    with subprocess.Popen(["sleep", "600"]) as process:
        handle = ForeignHandle("engine core 0", process.pid)
        low, handle.sentinel = handle.sentinel, os.dup2(handle.sentinel, 2000, inheritable=False)
        os.close(low)
        assert handle.is_alive()
        process.kill()
        handle.join()
        assert not handle.is_alive()
        handle.close()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_without_a_sentinel_it_counts_as_gone(monkeypatch: pytest.MonkeyPatch, has_pidfd: bool) -> None:
    """It had ended before it could be watched, or the system has no such thing: its pipe tells, then."""
    process = subprocess.Popen(["true"])
    process.wait()
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    handle = ForeignHandle("engine core 0", process.pid)
    assert handle.sentinel == -1
    assert not handle.is_alive()
    handle.join()
    handle.close()
