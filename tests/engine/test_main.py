"""An engine process, spoken to by hand over the protocol."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import pytest

from engine_client import ClientOptions, EngineConfig, EngineDeadError, SyncMPClient
from engine_client.clients.link import EngineLink
from engine_client.clients.start import launch_engine
from engine_client.ipc.arena import ArenaWriter, create_memory
from engine_client.ipc.process_group import ProcessGroup
from engine_client.ipc.status_page import EngineState
from engine_client.protocol.codec import dumps
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import (
    PROTOCOL_VERSION,
    Init,
    decode_dead,
    decode_ready,
    decode_reply,
    decode_status,
    decode_text,
    encode_init,
    encode_text,
    encode_utility,
)
from engine_client.testing.executors import EchoExecutor, FailingInit, SlowInit
from engine_client.testing.scripted import TARGET, Script
from helpers.lockstep import lock_step
from helpers.timing import DEADLOCK, eventually


class Engine:
    """A real engine process and the client's end of its channel."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.frames: list[Frame] = []

    def receive(self, kind: Kind) -> Frame:
        """Return the next frame of a kind."""

        def look() -> bool:
            self.frames.extend(self.link.channel.receive())
            return any(frame.kind == kind for frame in self.frames) or self.link.channel.ended

        eventually(look, DEADLOCK)
        for frame in self.frames:
            if frame.kind == kind:
                self.frames.remove(frame)
                return frame
        raise AssertionError(f"no {kind.name} before the end; {[Kind(f.kind).name for f in self.frames]}")

    def init(self, *values: Any, target: str = TARGET, **changes: Any) -> None:
        payload = dumps(values or (EngineConfig(), None, False))
        options = ClientOptions().for_engine()
        init = Init("token", 0, target, list(sys.path), ["script"], {}, options, payload)
        self.link.channel.send(encode_init(init if not changes else init.__class__(**{**vars(init), **changes})))

    def exit_code(self) -> int | None:
        self.link.handle.join(DEADLOCK)
        return self.link.handle.exitcode


@contextmanager
def engine() -> Iterator[Engine]:
    fd = create_memory("requests")
    writer = ArenaWriter(fd, limit=1 << 30)
    link = launch_engine(0, ClientOptions(), writer)
    group = ProcessGroup()
    group.add(0, link.handle)
    try:
        yield Engine(link)
    finally:
        group.kill_now()
        group.close()
        link.close()
        writer.close()


def test_the_phases_of_a_life_in_order() -> None:
    """HELLO, STATUS, READY, a reply, GOODBYE, exit code 0; the status page follows."""
    with engine() as e:
        version, pid = decode_text(e.receive(Kind.HELLO))
        assert (version, pid) == (PROTOCOL_VERSION, e.link.pid)
        script = Script(progress=(("loading weights", 1, 2),))
        e.init(EngineConfig(additional_config={"script": script}), None, False)
        assert decode_status(e.receive(Kind.STATUS)) == ("loading weights", 1, 2)
        token, response = decode_ready(e.receive(Kind.READY))
        assert (token, response.vllm_version) == ("token", "scripted")
        assert e.link.status.snapshot().state is EngineState.READY
        e.link.channel.send(encode_utility(1, "info", ()))
        failed, info = decode_reply(e.receive(Kind.REPLY))
        assert not failed
        assert info["argv"] == ["script"]
        e.link.channel.send(encode_text(Kind.SHUTDOWN, "please"))
        e.receive(Kind.GOODBYE)
        assert e.exit_code() == 0
        assert e.link.status.snapshot().state is EngineState.ENDED


def test_each_of_several_engines_is_built_for_its_rank() -> None:
    """Independent ranks, too, find their rank in the configuration, and make no steps for each other."""
    with lock_step(2, in_step=False) as engines:
        engines[1].add(1, 3)
        engines[1].wait_for(1)
        facts = [member.facts() for member in engines.members]
        assert [fact["built_for"] for fact in facts] == [(0, 0), (1, 1)]
        assert engines.steps() == [0, 3]


def test_the_built_in_engine_reports_progress_and_capacities() -> None:
    """The default target builds our own core, whose executor's progress arrives."""
    with engine() as e:
        target = "engine_client.engine.main:build_engine"
        e.init(EngineConfig(additional_config={"init_seconds": 0.01}), SlowInit, False, target=target)
        e.receive(Kind.STATUS)
        _, response = decode_ready(e.receive(Kind.READY))
        assert response.num_gpu_blocks > 0


@pytest.mark.parametrize(
    ("values", "target", "phase", "error"),
    [
        ((EngineConfig(), None, False), "no_such_module:f", "building", ModuleNotFoundError),
        ((EngineConfig(), None, False), "engine_client.engine.main:no_such", "building", AttributeError),
        ((EngineConfig(), FailingInit, False), "engine_client.engine.main:build_engine", "building", ValueError),
        ((EngineConfig(), EchoExecutor), "engine_client.engine.main:build_engine", "loading", ValueError),
    ],
)
def test_a_start_that_fails_says_what_and_where(values: Any, target: str, phase: str, error: type[Exception]) -> None:
    """FAILED carries the exception and the phase, and the process ends with 1, silently."""
    with engine() as e:
        e.init(*values, target=target)
        cause, where = decode_dead(e.receive(Kind.FAILED))
        assert type(cause) is error
        assert phase in where
        assert e.exit_code() == 1


def test_a_client_that_leaves_at_once_ends_the_engine() -> None:
    """The end of the stream before INIT is an end in order."""
    with engine() as e:
        e.receive(Kind.HELLO)
        e.link.channel.close()
        assert e.exit_code() == 0


def test_anything_but_init_is_refused() -> None:
    """A wrong first message ends the start with its reason."""
    with engine() as e:
        e.link.channel.send(encode_text(Kind.SHUTDOWN, "too early"))
        cause, _ = decode_dead(e.receive(Kind.FAILED))
        assert "SHUTDOWN" in str(cause)
        assert e.exit_code() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_engine_in_order(number: signal.Signals) -> None:
    """SIGTERM and SIGINT only set a flag: the engine says goodbye with the signal's name."""
    with engine() as e:
        e.init()
        e.receive(Kind.READY)
        os.kill(e.link.pid, number)
        assert decode_text(e.receive(Kind.GOODBYE)) == number.name
        assert e.exit_code() == 0


def test_a_step_that_fails_is_told_with_its_cause() -> None:
    """DEAD carries the exception; the engine is shut down and the exit code is 1."""
    with engine() as e:
        e.init()
        e.receive(Kind.READY)
        e.link.channel.send(encode_utility(1, "fail_step", (ZeroDivisionError("marker"),)))
        cause, phase = decode_dead(e.receive(Kind.DEAD))
        assert (type(cause), str(cause), phase) == (ZeroDivisionError, "marker", "serving")
        assert e.exit_code() == 1


def broken_shutdown(vllm_config: Any, executor_class: Any, log_stats: bool, context: Any) -> Any:
    """Build a scripted engine whose shutdown fails."""
    from engine_client.testing.scripted import build_engine

    made = build_engine(vllm_config, executor_class, log_stats, context)

    def shutdown() -> None:
        raise OSError("cannot let go")

    made.shutdown = shutdown  # type: ignore[method-assign]
    return made


def test_a_shutdown_that_fails_is_told() -> None:
    """The exception of ``shutdown`` is the last word, once."""
    with engine() as e:
        e.init(target=f"{__name__}:broken_shutdown")
        e.receive(Kind.READY)
        e.link.channel.send(encode_text(Kind.SHUTDOWN, "please"))
        cause, phase = decode_dead(e.receive(Kind.DEAD))
        assert (str(cause), phase) == ("cannot let go", "shutting down")
        assert e.exit_code() == 1


def test_a_failure_while_dying_does_not_hide_the_cause() -> None:
    """When a step failed, a failing shutdown changes nothing."""
    with engine() as e:
        e.init(target=f"{__name__}:broken_shutdown")
        e.receive(Kind.READY)
        e.link.channel.send(encode_utility(1, "fail_step", (KeyError("first"),)))
        assert type(decode_dead(e.receive(Kind.DEAD))[0]) is KeyError
        assert e.exit_code() == 1


def test_stacks_can_be_read_from_outside() -> None:
    """SIGUSR2 writes the Python stacks of all threads where the client reads them, also of a crash."""
    with engine() as e:
        e.init()
        e.receive(Kind.READY)

        def ask() -> bool:
            os.kill(e.link.pid, signal.SIGUSR2)
            return "busy_loop" in e.link.read_stacks()

        eventually(ask, DEADLOCK)  # it may be on its way there
        e.link.channel.send(encode_utility(1, "die", ("sigsegv",)))
        assert e.exit_code() == -signal.SIGSEGV
        assert "Segmentation fault" in e.link.read_stacks()


def test_log_lines_outlive_the_engine() -> None:
    """What the engine logged last is in memory that the client holds."""
    with engine() as e:
        e.init()
        e.receive(Kind.READY)
        e.link.channel.send(encode_utility(1, "log", ("the last line",)))
        e.receive(Kind.REPLY)
        e.link.handle.kill()
        e.link.handle.join(DEADLOCK)
        assert e.link.log_lines() == ["WARNING engine_client.testing: the last line"]


class LosesWorkers(EchoExecutor):
    """Reports, from a thread of its own, that its workers have failed."""

    def encode(self, text: str) -> list[int]:
        """Fail in a moment."""
        assert self.failure_callback is not None
        threading.Timer(0.05, self.failure_callback).start()
        return super().encode(text)


def test_workers_that_fail_between_steps_end_the_engine() -> None:
    """An idle engine whose executor reports a failure dies with that cause."""
    with SyncMPClient(EngineConfig(), LosesWorkers, False) as client:
        assert client.collective_rpc("encode", args=("x",)) == [[120]]
        with pytest.raises(EngineDeadError, match="Executor failed"):
            client.get_output(timeout=DEADLOCK)


def note_at_exit(worker: Any, path: str) -> None:
    """Have this process write which signals it does not take while it ends."""

    def note() -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        Path(path).write_text(" ".join(sorted(number.name for number in blocked if number in (SIGTERM, SIGINT))))

    atexit.register(note)


def test_a_signal_while_the_interpreter_ends_is_nobody_s(tmp_path: Path) -> None:
    """It would find no handler any more, which Python complains about on stderr; it is left to wait for the end."""
    with SyncMPClient(EngineConfig(), EchoExecutor, False) as client:
        client.collective_rpc(note_at_exit, args=(str(tmp_path / "blocked"),))
    assert (tmp_path / "blocked").read_text() == "SIGINT SIGTERM"
