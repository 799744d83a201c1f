"""Interrupts at every point where one can come, one after the other.

CPython looks for signals where a function of Python begins, where a function in C returns to Python (in Python 3.10:
any function), and when a loop goes round, where there is nearly always one of the others.  From Python 3.12 on,
``sys.monitoring`` calls us at exactly these points, and what we raise comes out as it does from a signal handler: in
the same place, and with the C function's result lost.  Older Pythons have a profile function for that, which they
forget when it raises; a second interrupt then comes from a trace function, at the start of some function only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from types import CodeType
from typing import Any

import engine_client

__all__ = ["act_everywhere", "interrupt_at", "interrupt_everywhere"]

_PACKAGE = str(Path(engine_client.__file__).parent)
_TOOL = 4  # of sys.monitoring; not taken by debuggers, coverage, profilers or optimizers


def _interrupt() -> None:
    raise KeyboardInterrupt


class _Interrupter:
    """Raises at the n-th point inside of the package, ``testing`` apart; the second time, ``gap`` points later.

    Or it does something else there: ``act``.
    """

    def __init__(self, number: int, gap: int = 0, act: Callable[[], object] = _interrupt) -> None:
        self.waits = [number, gap] if gap else [number]
        self.act = act
        self.where: list[str] = []
        self.thread = get_ident()

    def pass_by(self, code: CodeType, what: str) -> None:
        name = code.co_filename
        if not self.waits or not name.startswith(_PACKAGE) or "/testing/" in name or get_ident() != self.thread:
            return
        self.waits[0] -= 1
        if self.waits[0] <= 0:
            del self.waits[0]
            self.where.append(f"{Path(name).name}: {code.co_name}, {what}")
            self.act()


@contextmanager
def _watching(interrupter: _Interrupter) -> Iterator[None]:
    """Have the interrupter called at every point of this thread."""
    if sys.version_info < (3, 12):
        tracer = sys.gettrace()  # coverage's
        sys.setprofile(lambda frame, event, argument: _on_profile(interrupter, frame.f_code, event, argument))
        if len(interrupter.waits) > 1:
            sys.settrace(lambda frame, event, _: _on_trace(interrupter, frame.f_code))
        try:
            yield
        finally:
            sys.setprofile(None)
            sys.settrace(tracer)
        return
    events = sys.monitoring.events
    sys.monitoring.use_tool_id(_TOOL, "interrupts")
    sys.monitoring.register_callback(_TOOL, events.PY_START, lambda code, _: interrupter.pass_by(code, "its start"))
    sys.monitoring.register_callback(
        _TOOL, events.C_RETURN, lambda code, _, call, __: interrupter.pass_by(code, f"after {_name(call)}")
    )
    sys.monitoring.set_events(_TOOL, events.PY_START | events.CALL)  # C_RETURN goes with CALL
    try:
        yield
    finally:
        sys.monitoring.set_events(_TOOL, 0)
        sys.monitoring.free_tool_id(_TOOL)


def _name(call: Any) -> str:
    return str(getattr(call, "__qualname__", call))


def _on_profile(interrupter: _Interrupter, code: CodeType, event: str, argument: Any) -> None:
    if event == "call":
        interrupter.pass_by(code, "its start")
    elif event == "c_return":
        interrupter.pass_by(code, f"after {_name(argument)}")
    elif event == "return" and sys.version_info < (3, 11):
        interrupter.pass_by(code, "its end")


def _on_trace(interrupter: _Interrupter, code: CodeType) -> None:
    if len(interrupter.where) == 1:
        interrupter.pass_by(code, "its start")


def interrupt_at(number: int, operation: Callable[[], Any], gap: int = 0) -> str:
    """Interrupt an operation at its ``number``-th point, and again ``gap`` points later if that is not zero.

    Returns:
        Where that was; empty if the operation has fewer points.
    """
    interrupter = _Interrupter(number, gap)
    try:
        with _watching(interrupter):
            operation()
    except KeyboardInterrupt:
        assert interrupter.where
    else:
        assert not interrupter.where, f"the interrupt was swallowed: {interrupter.where}"
    return " and then ".join(interrupter.where)


def interrupt_everywhere(
    operation: Callable[[], Any], check: Callable[[str], Any], prepare: Callable[[], Any] = lambda: None, gap: int = 0
) -> int:
    """Interrupt an operation at every point that it has; return how many these are.

    Args:
        operation: takes the same way each time.
        check: called after each interrupt, with where that was.
        prepare: called before each.
        gap: points until a second interrupt, inside of what handles the first; 0: there is none.
    """
    number = 0
    while True:
        number += 1
        prepare()
        where = interrupt_at(number, operation, gap)
        if not where:
            return number - 1
        try:
            check(where)
        except AssertionError as error:
            raise AssertionError(f"after an interrupt at point {number}, {where}: {error}") from error


def act_everywhere(operation: Callable[[], Any], act: Callable[[], object]) -> int:
    """Do something in the middle of an operation, at every point that it has, one after the other; return their number.

    Args:
        operation: takes the same way each time.
        act: called on the thread that is inside of the operation, which then goes on.
    """
    number = 0
    while True:
        number += 1
        acted = _Interrupter(number, act=act)
        with _watching(acted):
            operation()
        if not acted.where:
            return number - 1
