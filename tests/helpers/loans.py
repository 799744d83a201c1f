"""Readers that stand aside, whatever the machine is busy with: see ``engine_client.ipc.loan``."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from engine_client.clients.session import Session
from engine_client.ipc import polling, reader as reader_module
from helpers.clients import reader_of
from helpers.timing import DEADLOCK, eventually

if TYPE_CHECKING:
    import pytest

__all__ = ["be_patient", "call_until_lent", "have_lent", "is_lent", "take_back"]


def be_patient(patch: pytest.MonkeyPatch, short: float = DEADLOCK, tick: float = DEADLOCK) -> None:
    """Have slow answers count as quick ones, for so many seconds, and silence end a loan after so many."""
    patch.setattr(polling, "_SHORT", short)
    patch.setattr(polling, "_QUICK", DEADLOCK)
    patch.setattr(reader_module, "_TICK", tick)


def is_lent(client: Any) -> bool:
    """Tell whether a client's reader stands aside."""
    return reader_of(client)._loan is not None


def call_until_lent(client: Any) -> None:
    """Call in quick succession until the reader stands aside."""
    eventually(lambda: client.call_utility("echo", 0) == 0 and is_lent(client), DEADLOCK)


def have_lent(session: Session) -> bool:
    """Have the reader stand aside; return whether it does."""
    reader, tried = session._reader, threading.Event()

    def lend() -> None:
        loan = reader._lend(0)
        if loan is not None:
            loan.open()
        tried.set()

    reader.call(lend)
    assert tried.wait(DEADLOCK)
    time.sleep(0.001)  # for the wakeup of this very request, which ends a loan if it is seen after it
    return reader._loan is not None


def take_back(session: Session) -> None:
    """Have the reader read again, and wait until it does."""
    reader = session._reader
    reader.call(lambda: None)
    eventually(lambda: reader._loan is None, DEADLOCK)
