"""Executors and utilities of engines that come to a bad end; imported by engines, so nothing here is slow to load."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

from engine_client.engine.executor import Batch, ModelOutput
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.faults import die

__all__ = ["Ending", "Gated", "die_at", "ignore_sigterm", "late_reply", "reply_to_nobody", "spawn_forever", "wait_for"]

_PATIENCE = 60.0


def wait_for(path: str | Path) -> None:
    """Wait, in an engine, until a file is there."""
    deadline = time.monotonic() + _PATIENCE
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gated(EchoExecutor):
    """Stays in a step until the file ``gate`` is there, then dies by ``how``, or raises if that is an exception."""

    def execute_model(self, batch: Batch) -> ModelOutput:
        settings = self.vllm_config.additional_config
        Path(settings["gate"] + ".reached").touch()
        wait_for(settings["gate"])
        return die_at(self, settings["gate"], settings["how"])


def die_at(worker: object, gate: str, how: Any) -> Any:
    """Wait for the file, then die; a utility through ``collective_rpc``."""
    del worker
    Path(gate + ".reached").touch()
    wait_for(gate)
    if isinstance(how, BaseException):
        raise how
    die(how)


class Ending(EchoExecutor):
    """Says in the file ``ended`` that it was shut down in order, for as long as ``flush_seconds``."""

    def shutdown(self) -> None:
        settings = self.vllm_config.additional_config
        if "ended" not in settings:
            return
        with open(settings["ended"], "a") as file:
            file.write("begin ")
            file.flush()
            time.sleep(settings.get("flush_seconds", 0.0))
            file.write("end")


def ignore_sigterm(worker: object) -> None:
    """Have the engine process ignore SIGTERM, and whatever its channel says, from now on."""
    del worker
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def reply_to_nobody(worker: object, count: int = 1) -> None:
    """Send replies to calls that nobody has made, good ones and a bad one."""
    from engine_client.engine.front_end import FrontEnd

    del worker
    for front_end in [found for found in gc.get_objects() if isinstance(found, FrontEnd)]:
        for _ in range(count):
            front_end.send_failure(2**63, ValueError("nobody's"))
            front_end.send_result(0, "nobody's")
            front_end.send_result(2**63 + 1, "nobody's")


def late_reply(worker: object) -> None:
    """Take some time, then send a reply to nobody before the real one."""
    time.sleep(0.3)
    reply_to_nobody(worker)


def spawn_forever(worker: object) -> int:
    """Start a child that ignores SIGTERM and sleeps for an hour; return its pid."""
    del worker
    from engine_client.testing.faults import start_grandchild

    return start_grandchild()
