"""The engine process from its first line to its last: handshake, engine, busy loop, last words.

::

    HELLO ─▶ … INIT ─▶ sys.path, argv ─▶ build (STATUS …) ─▶ READY ─▶ BusyLoop.run ─▶ GOODBYE ─▶ shutdown
                            └─ exception: FAILED                 └─ exception: DEAD

Invariants: I10 (an exception anywhere is told to the client before the process ends).

Threads: ``run_engine`` is the main thread of its process.  The watcher of ``lifeline`` and what waits in ``ipc.stacks``
are the only others of ours.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from typing import Any, Final

from engine_client.deadline import Deadline
from engine_client.engine import lifeline
from engine_client.engine.busy_loop import BusyLoop
from engine_client.engine.front_end import FrontEnd, drain_all
from engine_client.engine.lock_step import LockStep
from engine_client.engine.log_ring import LogRing
from engine_client.engine.log_sender import LogSender
from engine_client.errors import RemoteProtocolError
from engine_client.interfaces import EngineContext, EngineCore
from engine_client.ipc.arena import ArenaReader, ArenaWriter
from engine_client.ipc.channel import Channel
from engine_client.ipc.engine_fds import EngineFds
from engine_client.ipc.group_page import GroupMember
from engine_client.ipc.stacks import report_stacks
from engine_client.ipc.status_page import EngineState, StatusWriter
from engine_client.ipc.user_main import decoding, ensure_main, importable
from engine_client.protocol.codec import loads
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import (
    Init,
    decode_init,
    encode_failed,
    encode_hello,
    encode_ready,
    encode_reply,
    encode_status,
)

__all__ = ["build_engine", "run_engine"]

_LAST_WORDS_TIMEOUT: Final = 1.0
"""Seconds for the cause of a death to leave; the client waits about as long for the process to end."""


_HANG_UP_WAIT: Final = 0.05
"""Seconds between the moment that a dying client's channel is seen closed and the one that its lifeline is."""


def build_engine(
    vllm_config: Any, executor_class: Callable[..., Any], log_stats: bool, context: EngineContext
) -> EngineCore:
    """Build this library's own engine core; the default ``ClientOptions.engine_target``."""
    from engine_client.engine.core import EngineCore as OwnEngineCore  # noqa: PLC0415  # another target never loads it
    from engine_client.engine.executor import progress_to  # noqa: PLC0415  # as above

    with progress_to(context.progress):
        return OwnEngineCore(vllm_config, executor_class, log_stats, context.executor_failed, counters=context.counters)


def run_engine(fds: EngineFds, launcher_pid: int) -> None:
    """Be an engine process: the entry point that the launcher calls.

    Args:
        fds: the descriptors that the launcher handed over; owned by this call.
        launcher_pid: whose end is this process's end too.

    Raises:
        SystemExit: always; the exit code says whether the end was in order.
    """
    channel = Channel(fds.channel, name="client")
    with ExitStack() as stack:
        stack.callback(channel.close)
        try:
            line = lifeline.arm(fds.lifeline, launcher_pid)
            report_stacks(fds.faults)
        except RuntimeError as error:  # there are no more threads
            channel.send(encode_failed(error, "starting its threads"))
            sys.exit(1)
        status = StatusWriter(fds.page)
        stack.callback(status.close)
        line.on_strays = status.set_strays
        engine = _Engine(channel, status, fds, line)
        code = engine.run()
        line.leave(_HANG_UP_WAIT if channel.ended else 0.0)
        sys.exit(code)


def _used(writer: ArenaWriter) -> int:
    return writer.used


def _close_memory(writer: ArenaWriter, reader: ArenaReader) -> None:
    writer.close()
    reader.close()


def _prepare_for_failures() -> None:
    """Load what it takes to send an exception: when descriptors or memory have run out, it is too late for that."""
    with suppress(Exception):  # then it is found out when there is a failure
        encode_reply(0, error=RuntimeError())


def _set_rank(vllm_config: Any, rank: int) -> None:
    """Tell this process's own copy of the configuration which of several engines it is for."""
    parallel = getattr(vllm_config, "parallel_config", None)
    if parallel is not None and getattr(parallel, "data_parallel_size", 1) > 1:
        parallel.data_parallel_rank = parallel.data_parallel_index = rank


class _Engine:
    """The phases of one engine process, in order."""

    def __init__(self, channel: Channel, status: StatusWriter, fds: EngineFds, line: lifeline.Lifeline) -> None:
        self.channel = channel
        self.status = status
        self.fds = fds
        self.lifeline = line
        self.phase = "handshake"
        self.loop: BusyLoop | None = None
        self.executor_error: BaseException | None = None
        self.member: GroupMember | None = None

    def run(self) -> int:
        """Live from HELLO to the end; return the exit code."""
        self.channel.send(encode_hello(os.getpid()))
        self.status.set_state(EngineState.HELLO)
        try:
            init = self._wait_for_init()
            self.status.set_state(EngineState.INIT)
            front_ends, engine, timeout = self._start(init)
        except EOFError:
            return 0  # the client left before it said anything
        except BaseException as error:  # noqa: BLE001  # I10: whatever ends the start is the client's to know
            self._say(encode_failed(error, self.phase))
            return 1
        code = self._serve(init, front_ends, engine, timeout)
        # Their handler has nothing left to ask, and Python complains about one that comes while the interpreter ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
        return code

    def _wait_for_init(self) -> Init:
        """Block until INIT is here; the lifeline and the client's end interrupt it."""
        while True:
            for frame in self.channel.receive():
                if frame.kind != Kind.INIT:
                    raise RemoteProtocolError(f"expected INIT, got {Kind(frame.kind).name}")
                return decode_init(frame)
            if self.channel.ended:
                raise EOFError
            select.select([self.channel.fileno()], [], [])

    def _start(self, init: Init) -> tuple[list[FrontEnd], EngineCore, float]:
        """Become the engine that INIT describes."""
        sys.path[:] = init.sys_path
        sys.argv[:] = init.argv
        ring = LogRing(self.status)
        ring.install()
        if init.options["forward_logs"] is not None:
            LogSender(self.channel, init.options["forward_logs"]).install()
        options = init.options
        self.status.set_rank(init.rank)
        self.status.results = ArenaWriter(self.fds.arena_out, limit=options["arena_limit"])
        self.channel.connect_memory(
            writer=self.status.results,
            reader=ArenaReader(self.fds.arena_in, party=init.rank),
            threshold=options["arena_threshold"],
        )
        if self.fds.group is not None:
            self.member = GroupMember(self.fds.group, init.rank)
        front_ends = self._connect(init)
        self.phase = "loading the configuration"
        if init.payload.needs_main:
            ensure_main(init.main)
        with decoding:
            vllm_config, executor_class, log_stats = loads(init.payload.header, init.payload.buffers)
        _set_rank(vllm_config, init.rank)
        self.phase = "building the engine"
        module, _, function = init.target.partition(":")
        build = getattr(import_module(module), function)
        context = EngineContext(init.rank, self._progress, options, self._executor_failed, self.status.counters)
        engine: EngineCore = build(vllm_config, executor_class, log_stats, context)
        return front_ends, engine, float(getattr(vllm_config, "shutdown_timeout", 0) or 0)

    def _connect(self, init: Init) -> list[FrontEnd]:
        """Return the front-ends, by client index; the launcher is the last of them, and often the only one."""
        front_ends = []
        main_importable = importable(init.main)
        for index, fds in enumerate(self.fds.front_ends):
            writer = ArenaWriter(fds.arena_out, limit=init.options["arena_limit"])
            reader = ArenaReader(fds.arena_in, party=init.rank)
            channel = Channel(
                fds.channel,
                name=f"client {index}",
                writer=writer,
                reader=reader,
                threshold=init.options["arena_threshold"],
            )
            front_end = FrontEnd(
                index,
                channel,
                init.rank,
                main_importable=main_importable,
                is_guest=True,
                prefix=f"{index}/",
                release=partial(_close_memory, writer, reader),
                held=partial(_used, writer),
            )
            front_ends.append(front_end)
        launcher = FrontEnd(len(front_ends), self.channel, init.rank, main_importable=main_importable)
        launcher.wants_outputs = not front_ends
        return [*front_ends, launcher]

    def _executor_failed(self) -> None:
        """End the loop, from whichever thread; before there is one, the start itself is about to fail."""
        self.executor_error = RuntimeError("Executor failed.")
        if self.loop is not None:
            self.loop.fail(self.executor_error)

    def _progress(self, phase: str, done: int, total: int) -> None:
        self.phase = phase
        self._say(encode_status(phase, done, total), wait=False)

    def _serve(self, init: Init, front_ends: list[FrontEnd], engine: EngineCore, timeout: float) -> int:
        """Say READY, run the loop, end; the engine is shut down whatever happens."""
        try:
            self.loop = BusyLoop(
                engine,
                front_ends,
                self.status,
                shutdown_timeout=timeout,
                backlog_limit=init.options["backlog_limit"],
                spin_us=init.options["spin_us"],
                ensure_main=lambda: ensure_main(init.main),
                look_around=self.lifeline.look,
                pace=None if self.member is None else LockStep(engine, self.member),
            )
            self.lifeline.started()
            if self.executor_error is not None:
                raise self.executor_error  # noqa: TRY301  # it ends the engine as any error of its own would
            self._handle_signals()
            self.phase = "serving"
            self.status.set_state(EngineState.READY)
            self._say(encode_ready(init.token, engine.ready_response()))
            _prepare_for_failures()
            self.loop.run()
            self.status.set_state(EngineState.ENDED)
            self.phase = "shutting down"
            engine.shutdown()
        except BaseException as error:  # noqa: BLE001  # I10: whatever ends the engine is the client's to know
            deadline = Deadline(_LAST_WORDS_TIMEOUT)
            for front_end in front_ends:
                front_end.send_dead(error, self.phase)
            drain_all(front_ends, deadline)
            self._shutdown_quietly(engine)
            return 1
        return 0

    def _shutdown_quietly(self, engine: EngineCore) -> None:
        if self.phase == "shutting down":
            return
        with suppress(Exception):  # the engine is broken already, and its cause is on its way
            engine.shutdown()

    def _handle_signals(self) -> None:
        """Make SIGTERM and SIGINT ask the loop to end; nothing else happens inside the handler."""

        def handler(number: int, frame: object) -> None:
            if self.loop is not None:
                self.loop.request_shutdown(signal.Signals(number).name)

        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)

    def _say(self, frame: Frame, *, wait: bool = True) -> None:
        """Send a frame; wait until it has left, within a bound, where the process may end right after."""
        with suppress(BrokenPipeError):  # nobody is left to be told
            self.channel.send(frame)
            deadline = Deadline(_LAST_WORDS_TIMEOUT)
            while wait and not self.channel.flush() and not deadline.expired():
                select.select([], [self.channel.fileno()], [], deadline.capped(0.1))
