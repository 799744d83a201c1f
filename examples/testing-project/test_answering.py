"""The project's tests: no model, real engine processes, and nothing may be left of them (see pyproject.toml)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from answering import Answerer

from engine_client import EngineDeadError
from engine_client.testing import Script, eventually, frozen


def test_an_answer(scripted_engine: Callable[..., Any]) -> None:
    """All tokens come, and no more."""
    with Answerer(partial(scripted_engine, Script(token=7))) as answerer:
        assert answerer.answer([1, 2, 3], max_tokens=4) == [7, 7, 7, 7]


def test_an_engine_that_dies_is_replaced(scripted_engine: Callable[..., Any]) -> None:
    """The caller notices nothing but the time."""
    with Answerer(scripted_engine) as answerer:
        first = answerer.client
        with pytest.raises(EngineDeadError, match="SIGSEGV"):
            first.call_utility("die", "sigsegv")
        assert answerer.answer([1], max_tokens=2) == [1, 1]
        assert answerer.client is not first


def test_an_engine_that_fails_in_every_step(scripted_engine: Callable[..., Any]) -> None:
    """The second death is told, with what the engine raised."""

    def make_failing() -> Any:
        client = scripted_engine()
        client.call_utility("set_script", {"step_seconds": 0.1})
        client.collective_rpc(fail_in_the_next_step)
        return client

    with pytest.raises(EngineDeadError, match="out of memory"), Answerer(make_failing) as answerer:
        answerer.answer([1])


def fail_in_the_next_step(engine: Any) -> None:
    """Run in the engine, with the engine as argument."""
    engine.advance = _run_out


def _run_out(running: Any) -> Any:
    raise MemoryError("out of memory, says the test")


def test_an_engine_that_hangs(scripted_engine: Callable[..., Any]) -> None:
    """The caller gets an error in time; when the engine goes on, the request is gone and the next one is answered."""
    with Answerer(scripted_engine) as answerer:
        pid = answerer.client.call_utility("info")["pid"]
        with frozen(pid), pytest.raises(TimeoutError):
            answerer.answer([1], timeout=0.2)
        assert answerer.answer([1], max_tokens=2) == [1, 1]
        eventually(lambda: not answerer.client.call_utility("info")["requests"])
