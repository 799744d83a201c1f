"""An engine that raises exceptions which pickle cannot carry, from wherever an engine can raise (BC-07)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from engine_client.interfaces import EngineContext
from engine_client.testing.scripted import ScriptedCore

__all__ = ["ATTRIBUTES", "FAULTS", "LARGE", "STAND_INS", "TARGET", "make_error"]

TARGET = "helpers.raising:build_engine"
LARGE = 50 << 20


class KeywordOnly(Exception):
    def __init__(self, *, code: int, detail: str) -> None:
        super().__init__(f"{detail} ({code})")
        self.code = code


class TakesNothing(Exception):
    def __init__(self) -> None:
        super().__init__("fixed text")


class TwoRequired(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first
        self.second = second


class HoldsLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class ReduceRaises(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("cannot be reduced")


class RequiredNew(Exception):
    def __new__(cls, needed: str) -> RequiredNew:
        self = super().__new__(cls, needed)
        self.needed = needed
        return self

    needed: str


class ExitsWhenUnpickled(Exception):
    def __reduce__(self) -> Any:
        return os._exit, (17,)


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class LockAsArgument(Exception):
    pass


def _only_here(text: str) -> Exception:
    """Make an instance of a class in a module that no file holds."""
    module = ModuleType("made_in_the_engine")
    exec("class OnlyHere(ValueError): pass", module.__dict__)
    sys.modules[module.__name__] = module
    error: Exception = module.OnlyHere(text)
    return error


def _local(text: str) -> Exception:
    class Local(Exception):
        pass

    return Local(text)


def _chained() -> Exception:
    error = TwoRequired("one", "two")
    error.__cause__ = KeywordOnly(code=3, detail="the cause")
    error.__context__ = _only_here("the context")
    return error


FAULTS: dict[str, tuple[Callable[[], Exception], str]] = {
    "KeywordOnly": (lambda: KeywordOnly(code=3, detail="wrong"), "wrong (3)"),
    "TakesNothing": (TakesNothing, "fixed text"),
    "TwoRequired": (lambda: TwoRequired("one", "two"), "one and two"),
    "HoldsLock": (lambda: HoldsLock("locked"), "locked"),
    "ReduceRaises": (lambda: ReduceRaises("reduced"), "reduced"),
    "RequiredNew": (lambda: RequiredNew("thing"), "thing"),
    "ExitsWhenUnpickled": (lambda: ExitsWhenUnpickled("still here"), "still here"),
    "OnlyHere": (lambda: _only_here("only there"), "only there"),
    "Local": (lambda: _local("inside of a function"), "inside of a function"),
    "NoText": (lambda: NoText("hidden"), "<its text cannot be had"),
    "LockAsArgument": (lambda: LockAsArgument("marker", threading.Lock()), "marker"),
    "chained TwoRequired": (_chained, "one and two"),
    "large ValueError": (lambda: ValueError("<" + "x" * LARGE + ">"), "xxx"),
}
"""How to make each, and what is in its text; the last word of the name is its type's."""

STAND_INS = ("OnlyHere", "Local")
"""Those that no other process can rebuild."""

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "KeywordOnly": {"code": 3},
    "TwoRequired": {"first": "one", "second": "two"},
    "RequiredNew": {"needed": "thing"},
}


def make_error(name: str) -> Exception:
    """Make one of ``FAULTS``."""
    return FAULTS[name][0]()


class RaisingCore(ScriptedCore):
    """A scripted engine with utilities that raise by name; a prompt of one token raises while it is added."""

    def preprocess_add_request(self, request: Any) -> Any:
        if len(request.prompt_token_ids) == 1:
            raise make_error(list(FAULTS)[request.prompt_token_ids[0]])
        return super().preprocess_add_request(request)

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        own = {"raise": self._raise, "raise_later": self._raise_later, "raise_in_step": self._arm}
        return {**super().utilities(), **own}

    def _raise(self, name: str) -> None:
        raise make_error(name)

    def _raise_later(self, name: str) -> Future[Any]:
        future: Future[Any] = Future()

        def finish() -> None:
            try:
                self._raise(name)
            except Exception as error:  # noqa: BLE001  # any kind comes
                future.set_exception(error)

        threading.Thread(target=finish).start()
        return future

    def _arm(self, name: str) -> None:
        self.step_error = make_error(name)


def build_engine(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> RaisingCore:
    """Build the engine; the target that ``TARGET`` names."""
    del executor_class
    return RaisingCore(vllm_config, log_stats, context)
