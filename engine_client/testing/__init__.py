"""For your tests and ours: a guard against leaks, a scripted engine, small executors, and faults to inject.

The names load when they are first used.  ``docs/testing.md`` shows them at work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_client.testing.clients import (
        collect as collect,
        make_client as make_client,
        make_request as make_request,
    )
    from engine_client.testing.executors import EchoExecutor as EchoExecutor
    from engine_client.testing.faults import FaultyLink as FaultyLink, frozen as frozen
    from engine_client.testing.leaks import (
        LeakError as LeakError,
        LeakGuard as LeakGuard,
        eventually as eventually,
    )
    from engine_client.testing.scripted import TARGET as TARGET, Script as Script

_HOMES = {
    "EchoExecutor": "executors",
    "FaultyLink": "faults",
    "LeakError": "leaks",
    "LeakGuard": "leaks",
    "Script": "scripted",
    "TARGET": "scripted",
    "collect": "clients",
    "eventually": "leaks",
    "frozen": "faults",
    "make_client": "clients",
    "make_request": "clients",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
