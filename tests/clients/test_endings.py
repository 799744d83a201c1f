"""How the end of an engine is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_client.clients.endings import closed_ending, death_of, owner_of_fork
from engine_client.errors import ClosedError, EngineDeadError


def link(**facts: Any) -> Any:
    values: dict[str, Any] = {"last_words": None, "farewell": None, "stacks": "", "lines": [], "is_alive": None}
    values |= facts
    return SimpleNamespace(
        rank=2,
        pid=77,
        title="engine core 2 (pid 77)",
        is_foreign=values["is_alive"] is not None,
        handle=SimpleNamespace(is_alive=lambda: values["is_alive"]),
        last_words=values["last_words"],
        farewell=values["farewell"],
        read_stacks=lambda: values["stacks"],
        log_lines=lambda: values["lines"],
    )


def test_a_closed_client_says_so() -> None:
    """Every waiter gets a ClosedError of its own."""
    ending = closed_ending()
    first, second = ending.error(), ending.error()
    assert isinstance(first, ClosedError)
    assert first is not second


@pytest.mark.parametrize(
    ("exitcode", "name"), [(3, "exit code 3"), (0, "exit code 0"), (-11, "SIGSEGV(-11)"), (None, "unknown")]
)
def test_an_exit_is_named(exitcode: int | None, name: str) -> None:
    """The message names engine and exit, and the error carries rank, pid and exit."""
    error = death_of(link(), exitcode).error()
    assert type(error) is EngineDeadError
    assert name in str(error)
    assert "engine core 2 (pid 77)" in str(error)
    assert (error.rank, error.pid, error.exit_name) == (2, 77, name)


def test_a_kill_comes_with_what_is_known_of_memory() -> None:
    """SIGKILL may be the kernel's, so the memory limit is named."""
    assert "memory" in str(death_of(link(), -9).error())


def test_stacks_and_log_lines_are_told() -> None:
    """What faulthandler wrote and what was logged last is part of the message."""
    error = death_of(link(stacks="File x.py, line 3", lines=["WARNING a: b"]), -11).error()
    assert "File x.py, line 3" in str(error)
    assert "WARNING a: b" in str(error)
    assert error.remote_traceback == "File x.py, line 3"


def test_the_engine_s_exception_is_the_cause() -> None:
    """Its type, text and traceback are told, and it is the cause of every waiter's error."""
    cause = KeyError("marker")
    cause.remote_traceback = "Traceback: marker"  # type: ignore[attr-defined]
    error = death_of(link(last_words=(cause, "serving")), 1).error()
    assert error.__cause__ is cause
    for text in ("KeyError", "marker", "while serving", "Traceback: marker"):
        assert text in str(error)
    assert "ValueError (exit code 1)" in str(death_of(link(last_words=(ValueError(), "")), 1).error())


def test_a_cause_of_fifty_megabytes_is_cut_in_the_message_alone() -> None:
    """The message stays readable; the cause is whole."""
    cause = ValueError("x" * 50_000_000)
    error = death_of(link(last_words=(cause, "")), 1).error()
    assert len(str(error)) < 100_000
    assert error.__cause__ is cause


def test_an_end_in_order_is_no_death() -> None:
    """An engine that was stopped by somebody else ended in order, and the error says why."""
    ending = death_of(link(farewell="SIGTERM"), 0)
    assert ending.in_order
    assert "SIGTERM" in str(ending.error())


def test_a_fault_of_the_stream_is_the_cause() -> None:
    """A broken stream is told as the cause."""
    fault = ValueError("garbage")
    assert death_of(link(), None, fault).error().__cause__ is fault


def test_a_forked_copy_is_told_whose_client_it_is() -> None:
    """The sentence names the owner."""
    assert "42" in owner_of_fork(42)


def test_an_engine_of_another_process_is_told_as_far_as_it_is_known() -> None:
    """How it died is its launcher's to know; one that lives has closed the channel to this front-end alone."""
    assert "the process that has launched it knows how" in death_of(link(is_alive=False), None).message
    cut_off = death_of(link(is_alive=True), None, RuntimeError("hung up")).error()
    assert "serves this front-end no longer, though it runs (RuntimeError: hung up)" in str(cut_off)
    last_words = death_of(link(is_alive=True, last_words=(ValueError("broken"), "serving")), None).message
    assert "died: ValueError: broken while serving" in last_words
