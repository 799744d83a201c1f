"""An engine that sends pickles which run code where they are loaded, in every message that an engine can send."""

from __future__ import annotations

import os
import pickle
from typing import Any

from engine_client.engine import front_end, main
from engine_client.interfaces import EngineContext
from engine_client.protocol.frames import Frame, Kind
from engine_client.testing.scripted import ScriptedCore

__all__ = ["PLACES", "TARGET", "Poison", "answer", "poison_outputs", "raise_poison"]

TARGET = "helpers.malicious:build_engine"

PLACES = ("STATUS", "READY", "FAILED", "DEAD", "OUTPUTS", "REPLY", "GOODBYE")
"""The messages that are poisoned as a whole."""


class Poison:
    """Makes a directory where it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


class PoisonedError(Exception):
    """Carries poison in its arguments and attributes."""

    def __init__(self, mark: str) -> None:
        super().__init__("what has happened", Poison(f"{mark}-1"))
        self.detail = Poison(f"{mark}-2")


def build_engine(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> ScriptedCore:
    """Build an engine that poisons ``additional_config["where"]``; the target that ``TARGET`` names."""
    del executor_class
    settings = vllm_config.additional_config
    where = settings.get("where")
    if where is not None:
        _poison(Kind[where], pickle.dumps(Poison(settings["mark"])))
        context.progress("a phase", 1, 2)
    if where == "FAILED":
        raise ValueError("no engine")
    return ScriptedCore(vllm_config, log_stats, context)


def _poison(kind: Kind, poison: bytes) -> None:
    """Have a message of a kind consist of poison."""

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        ref = args[0] if kind == Kind.REPLY else 0
        frame = Frame(kind, 0, ref, poison)
        return (frame, []) if kind == Kind.OUTPUTS else frame

    def say_goodbye(own: Any, reason: str) -> None:
        own.channel.send(Frame(kind, 0, 0, poison))

    name = f"encode_{kind.name.lower()}"
    if kind == Kind.GOODBYE:
        front_end.FrontEnd.say_goodbye = say_goodbye  # type: ignore[method-assign]
    for module in (main, front_end):
        if hasattr(module, name):
            setattr(module, name, poisoned)


def answer(core: Any, mark: str) -> Any:
    """Answer a call with poison inside plain data."""
    del core
    return {"a": [1, Poison(mark)]}


def raise_poison(core: Any, mark: str) -> None:
    """Fail a call with an exception that carries poison."""
    del core
    raise PoisonedError(mark)


def poison_outputs(core: Any, mark: str) -> None:
    """Have the outputs of requests whose ids begin with "bad" carry poison."""
    real = core.advance

    def advance(running: Any) -> Any:
        index, output = real(running)
        if output.request_id.startswith("bad"):
            output.kv_transfer_params = {"x": Poison(mark)}
        return index, output

    core.advance = advance
