"""The utilities as methods."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from engine_client.clients.base import EngineCoreClient
from engine_client.clients.utilities import SyncUtilities

NAMES = [n for n, f in vars(SyncUtilities).items() if inspect.isfunction(f) and n != "call_utility"]


class Recorder(SyncUtilities):
    """Notes what is called."""

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Return the call."""
        del timeout
        return method, args


@pytest.mark.parametrize("name", NAMES)
def test_each_method_calls_the_utility_of_its_name(name: str) -> None:
    """All parameters are passed on in order, defaults included; procedures return None."""
    seen: list[Any] = []

    class Spy(Recorder):
        def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
            seen.append((method, args))
            return super().call_utility(method, *args, timeout=timeout)

    method = getattr(Spy(), name)
    parameters = list(inspect.signature(method).parameters.values())
    values = [p.default if p.default is not p.empty else f"<{p.name}>" for p in parameters]
    result = method(*[v for p, v in zip(parameters, values, strict=True) if p.default is p.empty])
    assert seen == [(name, tuple(values))]
    returns_nothing = inspect.signature(getattr(SyncUtilities, name)).return_annotation == "None"
    assert result is None if returns_nothing else result == (name, tuple(values))


def test_signatures_are_those_of_the_interface() -> None:
    """The mixin and the interface agree on every utility that both name."""
    for name in NAMES:
        if hasattr(EngineCoreClient, name):
            assert inspect.signature(getattr(SyncUtilities, name)) == inspect.signature(getattr(EngineCoreClient, name))


def test_the_mixin_alone_cannot_call() -> None:
    """A class that forgets ``call_utility`` is told so."""
    with pytest.raises(NotImplementedError, match="list_loras"):
        SyncUtilities().list_loras()
