"""Executors and utilities of engines that come to a bad end; imported by engines, so nothing here is slow to load."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from engine_client.engine.executor import Batch, ModelOutput
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.faults import die, hold_gil, start_grandchild

__all__ = [
    "Crash",
    "Ending",
    "FailsUnpicklably",
    "Gated",
    "Loud",
    "NeedsTwo",
    "Nest",
    "Spiteful",
    "break_shutdown",
    "build_by_rank",
    "build_by_sign",
    "die_at",
    "hang_up",
    "ignore_sigterm",
    "late_reply",
    "plant",
    "reply_to_nobody",
    "send_strays",
    "wait_for",
]

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


def hang_up(worker: object) -> None:
    """Close the engine's channel, and live on."""
    from engine_client.ipc.channel import Channel

    del worker
    for channel in [found for found in gc.get_objects() if isinstance(found, Channel)]:
        channel.close()
    time.sleep(60)


def late_reply(worker: object) -> None:
    """Take some time, then send a reply to nobody before the real one."""
    time.sleep(0.3)
    reply_to_nobody(worker)


class Crash(Exception):
    """Raised in engines."""


class Spiteful(Exception):
    """Cannot be told: whoever asks for its text ends the process."""

    armed = False

    def __str__(self) -> str:
        if self.armed:
            os._exit(9)
        return "spiteful"

    __repr__ = __str__


def build_by_rank(vllm_config: Any, executor_class: Any, log_stats: bool, context: Any) -> Any:
    """Build a scripted engine whose script is the one of its rank; for ``ClientOptions(engine_target=...)``."""
    from engine_client.testing.scripted import build_engine

    settings = vllm_config.additional_config
    settings["script"] = settings["scripts"][context.rank]
    return build_engine(vllm_config, executor_class, log_stats, context)


def build_by_sign(vllm_config: Any, executor_class: Any, log_stats: bool, context: Any) -> Any:
    """Build a scripted engine; ranks from 2 on look into the file ``sign`` for what is to become of them.

    That is ``raise``, ``die``, ``hang`` or ``slow``; no file: all is well.
    """
    from engine_client.testing.scripted import build_engine

    sign = Path(vllm_config.additional_config["sign"])
    what = sign.read_text() if context.rank >= 2 and sign.exists() else ""
    if what == "raise" and context.rank == 3:
        raise ValueError("unique marker")
    if what == "die" and context.rank == 3:
        die("exit3")
    if what == "hang" and context.rank == 3:
        time.sleep(60)
    if what == "slow":
        time.sleep(1.0)
    return build_engine(vllm_config, executor_class, log_stats, context)


class Loud(Exception):
    """Fails again while it is reported."""

    def __str__(self) -> str:
        raise RuntimeError("second failure")

    __repr__ = __str__


def plant(worker: Any, kind: type[Exception]) -> None:
    kind.armed = True
    worker.step_error = kind()


def break_shutdown(worker: Any) -> None:
    def shutdown() -> None:
        raise SystemExit("the second")

    worker.shutdown = shutdown


def send_strays(worker: Any) -> None:
    real = worker.advance

    def advance(running: Any) -> Any:
        index, output = real(running)
        worker.advance = real
        for stray in (None, "unknown", 5):
            worker.aborted.append(Stray(stray))
        return index, output

    worker.advance = advance


class Stray:
    """Stands in for an aborted request with a strange id."""

    client_index = 0

    def __init__(self, request_id: Any) -> None:
        self.request_id = request_id


class NeedsTwo(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one: object, *, two: object) -> None:
        super().__init__(f"needs {one} and {two}")
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise TypeError("not me")


class Unspeakable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit("no text")


class FailsUnpicklably(EchoExecutor):
    """Raises what cannot be pickled, or what has no text."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        what = vllm_config.additional_config["what"]
        if what == "unpicklable":
            raise NeedsTwo("one", two="more")
        if what == "local":

            class Local(Exception):
                pass

            raise Local("only in the engine")
        if what == "huge":
            raise ValueError("begin " + "x" * (50 << 20) + " end")
        raise Unspeakable


class Nest(EchoExecutor):
    """Starts two grandchildren, one of them in a session of its own, then does what it is told for a minute."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        settings = vllm_config.additional_config
        pids = [start_grandchild(), start_grandchild(new_session=True)]
        if settings.get("stubborn"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(settings["pids"]).write_text(" ".join(map(str, [os.getpid(), *pids])))
        if settings.get("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if settings.get("gil"):
            hold_gil(60)
        time.sleep(60)
