"""Interrupts at every point where one can come, one after the other.

CPython looks for signals where a function of Python begins, where a function in C returns to Python, and when a loop
goes round, where there is nearly always one of the two.  A profile function is called at these points, and what it
raises comes out as it does from a signal handler: in the same place, and with the C function's result lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import engine_client

__all__ = ["interrupt_at", "interrupt_everywhere"]

_PACKAGE = str(Path(engine_client.__file__).parent)


class _Interrupter:
    """Raises at the n-th point inside of the package, ``testing`` apart."""

    def __init__(self, number: int, times: int = 1) -> None:
        self.left = number
        self.times = times
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event not in ("call", "c_return") or not name.startswith(_PACKAGE) or "/testing/" in name:
            return
        self.left -= 1
        if self.left <= 0:
            what = getattr(argument, "__qualname__", "the start")
            self.where = f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}, after {what}"
            self.times -= 1
            if not self.times:
                sys.setprofile(None)
            raise KeyboardInterrupt


def interrupt_at(number: int, operation: Callable[[], Any], times: int = 1) -> str:
    """Interrupt an operation at its ``number``-th point, and at the points that follow if ``times`` is more than one.

    Returns:
        Where that was; empty if the operation has fewer points.
    """
    interrupter = _Interrupter(number, times)
    sys.setprofile(interrupter)
    try:
        operation()
    except KeyboardInterrupt:
        assert interrupter.where
    else:
        assert not interrupter.where, f"the interrupt was swallowed at {interrupter.where}"
    finally:
        sys.setprofile(None)
    return interrupter.where


def interrupt_everywhere(
    operation: Callable[[], Any], check: Callable[[], Any], prepare: Callable[[], Any] = lambda: None, times: int = 1
) -> int:
    """Interrupt an operation at every point that it has; return how many these are.

    Args:
        operation: takes the same way each time.
        check: called after each interrupt; an AssertionError tells where that was.
        prepare: called before each.
        times: interrupts in a row, the second inside of what handles the first.
    """
    number = 0
    while True:
        number += 1
        prepare()
        where = interrupt_at(number, operation, times)
        if not where:
            return number - 1
        try:
            check()
        except AssertionError as error:
            raise AssertionError(f"after an interrupt at point {number}, {where}: {error}") from error
