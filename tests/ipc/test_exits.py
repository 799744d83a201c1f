"""Exit codes in words."""

from __future__ import annotations

import pytest

from engine_client.ipc.exits import exit_name


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "SIGKILL(-9)"),
        (-11, "SIGSEGV(-11)"),
        (-15, "SIGTERM(-15)"),
        (-40, "signal 40(-40)"),
        (None, "unknown"),
    ],
)
def test_exit_names(code, name):
    """A code is named as such, a signal by its name, and what is not known is not guessed."""
    assert exit_name(code) == name
