"""The utilities as methods."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from engine_client.clients.base import EngineCoreClient
from engine_client.clients.utilities import AsyncUtilities, SyncUtilities

NAMES = [n for n, f in vars(SyncUtilities).items() if inspect.isfunction(f) and n != "call_utility"]
ASYNC_NAMES = [n for n, f in vars(AsyncUtilities).items() if inspect.isfunction(f) and n != "call_utility_async"]


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


@pytest.mark.parametrize("name", ASYNC_NAMES)
def test_each_coroutine_calls_the_utility_of_its_name(name: str) -> None:
    """All parameters are passed on in order, defaults included; procedures return None."""
    seen: list[Any] = []

    class Spy(AsyncUtilities):
        async def call_utility_async(self, method: str, *args: Any, timeout: float | None = None) -> Any:
            del timeout
            seen.append((method, args))
            return method, args

    method = getattr(Spy(), name)
    parameters = list(inspect.signature(method).parameters.values())
    values = [p.default if p.default is not p.empty else f"<{p.name}>" for p in parameters]
    result = asyncio.run(method(*[v for p, v in zip(parameters, values, strict=True) if p.default is p.empty]))
    assert seen == [(name.removesuffix("_async"), tuple(values))]
    returns_nothing = inspect.signature(getattr(AsyncUtilities, name)).return_annotation == "None"
    assert result is None if returns_nothing else result == seen[0]


def test_both_colours_have_the_same_utilities() -> None:
    """Each coroutine has the parameters and the result of its blocking twin."""
    assert [f"{name}_async" for name in NAMES] == ASYNC_NAMES
    for name in NAMES:
        coroutine = getattr(AsyncUtilities, f"{name}_async")
        assert inspect.iscoroutinefunction(coroutine)
        assert inspect.signature(coroutine) == inspect.signature(getattr(SyncUtilities, name))


def test_signatures_are_those_of_the_interface() -> None:
    """The mixins and the interface agree on every utility that both name."""
    for mixin, names in ((SyncUtilities, NAMES), (AsyncUtilities, ASYNC_NAMES)):
        for name in names:
            if hasattr(EngineCoreClient, name):
                assert inspect.signature(getattr(mixin, name)) == inspect.signature(getattr(EngineCoreClient, name))


def test_the_mixins_alone_cannot_call() -> None:
    """A class that forgets ``call_utility``, or its twin, is told so before there is an instance."""
    for mixin, missing in ((SyncUtilities, "call_utility"), (AsyncUtilities, "call_utility_async")):
        with pytest.raises(TypeError, match=rf"abstract.*{missing}"):
            type("Forgetful", (mixin,), {})()
