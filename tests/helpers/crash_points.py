"""Every step of the protocol, on either side, as a place where something can go wrong; tests arm one at a time.

``POINTS`` is the table.  A name says what happens there: ``send.REPLY.mid`` is in the middle of a REPLY's bytes.

============  ==================================================================================
kill          the process that is there ends by SIGKILL
stop          it stops there (SIGSTOP) and does not go on by itself
delay         it takes longer there: nothing may come of that
cut           the stream ends there, in mid-frame: in its header, or in its table of segments
cut_early     after its first byte
cut_late      before its last byte
corrupt       bytes that are no frame come before the frame, or inside it where ``cut`` comes
corrupt_late  before its last byte
============  ==================================================================================

In an engine, a fault is armed by the environment, from the first line on (``faulty/sitecustomize.py``); in the process
of the client by ``armed``.  The first process that reaches a point claims it, with a file that tells the test so: of
several engines one meets the fault, and what was never reached is known.

Nothing here imports pytest, and what an engine does not need is imported late: engines load this at their start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine_client.protocol.frames import Frame, Kind

__all__ = ["FAULTS", "POINTS", "UNREACHED", "Point", "arm_here", "armed", "environment_of", "faults_at"]

VARIABLE: Final = "ENGINE_CLIENT_TEST_FAULT"
DELAY: Final = 0.3
"""Seconds."""
_IN_HEADER: Final = 24 + 1
"""Bytes of a frame after which it is in its header, or in its table of segments."""

_PLACES: Final = {"cut_early": 1, "cut_late": -1, "corrupt_late": -1}
"""After how many bytes of a frame its middle comes for these faults; below zero: how many are left."""

FAULTS: Final = ("kill", "stop", "delay", "cut", "cut_early", "cut_late", "corrupt", "corrupt_late")


class Point(NamedTuple):
    """A place.

    Args:
        name: of it.
        side: ``engine`` or ``client``: which process is there.
        phase: of a client's life in which it comes: ``start``, ``serve``, ``end``; ``fail`` for an engine that fails to
            start, ``dead`` for one whose step raises; ``join`` and ``leave`` while a rank does, ``wave`` of ranks in
            lock-step.
    """

    name: str
    side: str
    phase: str


_PHASES: Final = {
    Kind.HELLO: "start",
    Kind.INIT: "start",
    Kind.STATUS: "start",
    Kind.READY: "start",
    Kind.FAILED: "fail",
    Kind.ADD: "serve",
    Kind.ABORT: "serve",
    Kind.UTILITY: "serve",
    Kind.OUTPUTS: "serve",
    Kind.REPLY: "serve",
    Kind.LOG: "serve",
    Kind.DEAD: "dead",
    Kind.SHUTDOWN: "end",
    Kind.GOODBYE: "end",
}
"""When the frames of a kind are sent."""

FROM_CLIENT: Final = (Kind.INIT, Kind.ADD, Kind.ABORT, Kind.UTILITY, Kind.SHUTDOWN)
IN_MEMORY: Final = (Kind.ADD, Kind.UTILITY, Kind.OUTPUTS, Kind.REPLY)
UNREACHED: Final[dict[Any, str]] = {
    Kind.ATTACH: "sent by front-ends of other processes alone; see tests/faults/test_front_ends.py",
    (Kind.FAILED, "after"): "its client may have killed the engine by then",
}


_OTHERS: Final = {
    ("engine", "serve"): ("step.before", "step.ran", "step.after", "utility.ran"),
    ("engine", "end"): ("drain", "finish.before", "finish.after", "engine.shutdown"),
    ("engine", "wave"): ("wave.started", "wave.joined", "wave.voted", "wave.waiting", "wave.complete"),
    ("engine", "join"): (
        *(f"send.{kind}.{stage}" for kind in ("HELLO", "STATUS", "READY") for stage in ("before", "mid")),
        "receive.INIT.before",
    ),
    ("engine", "leave"): (
        "receive.SHUTDOWN.before",
        *(f"send.GOODBYE.{stage}" for stage in ("before", "mid", "after")),
    ),
    ("client", "join"): ("scale.launched", "scale.ready", "scale.taken_part"),
    ("client", "leave"): ("scale.draining", "scale.drained"),
}
"""What is no frame, and what a rank that joins or leaves passes as any other does, but alone."""


def _points() -> Iterator[Point]:
    for kind, phase in _PHASES.items():
        sender, receiver = ("client", "engine") if kind in FROM_CLIENT else ("engine", "client")
        for stage in ("before", "mid", "after"):
            if (kind, stage) not in UNREACHED:
                yield Point(f"send.{kind.name}.{stage}", sender, phase)
        if kind in IN_MEMORY:
            yield Point(f"send.{kind.name}.copied", sender, phase)
        for stage in ("before", "after"):
            yield Point(f"receive.{kind.name}.{stage}", receiver, phase)
    for (side, phase), names in _OTHERS.items():
        for name in names:
            yield Point(name, side, phase)


POINTS: Final = tuple(_points())


def faults_at(point: Point) -> tuple[str, ...]:
    """Return the faults that make sense at a point."""
    if point.name.endswith(".mid"):
        return FAULTS
    if point.name.startswith("send.") and point.name.endswith(".before"):
        return ("kill", "stop", "delay", "corrupt")
    return ("kill", "stop", "delay")


# -- in the process that meets the fault -------------------------------------------------------------------------------


class _Armed:
    """A fault that waits for its point; ``reach`` is called at all points."""

    def __init__(self, name: str, fault: str, told: str) -> None:
        self.name = name
        self.fault = fault
        self.told = told
        self.is_met = False

    def claim(self, name: str) -> bool:
        """Tell whether this is the point, met for the first time in any process; ``*`` only notes what is reached."""
        if self.name == "*":
            with open(self.told, "a", encoding="utf-8") as file:
                file.write(f"{name}\n")
            return False
        if self.is_met or name != self.name:
            return False
        self.is_met = True
        try:
            os.close(os.open(self.told, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False  # another engine was first
        Path(self.told).write_text(str(os.getpid()), encoding="utf-8")
        return True

    def reach(self, name: str, channel: Any = None) -> None:
        """Be at a point."""
        if self.claim(name):
            self.act(channel)

    def act(self, channel: Any) -> None:
        """Let it happen."""
        if self.fault == "delay":
            time.sleep(DELAY)
        elif self.fault.startswith("cut"):
            channel.hang_up()
        elif self.fault.startswith("corrupt"):
            from helpers.pipes import GARBAGE, write_raw

            write_raw(channel, GARBAGE["another protocol"])
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.fault])

    def reach_mid(self, name: str, channel: Any) -> None:
        """Be at a point that comes when some bytes of the next frame are written."""
        if self.name == "*" or (not self.is_met and name == self.name):
            from helpers.pipes import EndingSocket

            real = channel._socket

            def act() -> None:
                channel._socket = real
                self.reach(name, channel)

            channel._socket = EndingSocket(real, _PLACES.get(self.fault, _IN_HEADER), act)


def _around(owner: Any, name: str, before: Callable[..., object], after: Callable[..., object]) -> Callable[[], None]:
    """Have something called before and after a function, with its arguments; return what undoes that."""
    real = getattr(owner, name)

    @wraps(real)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = real(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    setattr(owner, name, wrapped)
    return partial(setattr, owner, name, real)


def _nothing(*_: object, **__: object) -> None:
    pass


def _patch_channel(armed: _Armed) -> list[Callable[[], None]]:
    from engine_client.ipc.channel import Channel

    def before_send(channel: Any, frame: Frame) -> None:
        kind = Kind(frame.kind).name
        armed.reach(f"send.{kind}.before", channel)
        armed.reach_mid(f"send.{kind}.mid", channel)

    def copied(_: object, channel: Any, frame: Frame, segments: list[Any]) -> None:
        if any(segment.offset >= 0 for segment in segments):
            armed.reach(f"send.{_name(frame)}.copied", channel)

    return [
        _around(
            Channel, "send", before_send, lambda _, channel, frame: armed.reach(f"send.{_name(frame)}.after", channel)
        ),
        _around(Channel, "_place", _nothing, copied),
        _around(
            Channel,
            "receive",
            _nothing,
            lambda frames, channel: [armed.reach(f"receive.{_name(frame)}.before", channel) for frame in frames],
        ),
    ]


def _name(frame: Frame) -> str:
    return Kind(frame.kind).name


def _patch_engine(armed: _Armed) -> None:
    from engine_client.engine.busy_loop import BusyLoop, LoopState
    from engine_client.engine.lock_step import LockStep
    from engine_client.engine.main import _Engine
    from engine_client.protocol.waves import Action, State
    from engine_client.testing.scripted import ScriptedCore

    def reach(name: str) -> Callable[..., None]:
        return lambda *_, **__: armed.reach(name)

    def draining(_: bool, loop: Any) -> None:
        if loop.state is LoopState.DRAINING and loop._engine.has_work():
            armed.reach("drain")

    def looked(action: Action, *_: object, **__: object) -> None:
        names = {Action.START: "started", Action.JOIN: "joined", Action.WAIT: "waiting", Action.COMPLETE: "complete"}
        if action in names:
            armed.reach(f"wave.{names[action]}")

    def stepped(_: object, pace: Any, **__: object) -> None:
        if pace._waves is not None and pace._waves.state is State.VOTED:
            armed.reach("wave.voted")

    _around(_Engine, "_wait_for_init", _nothing, reach("receive.INIT.after"))
    _around(BusyLoop, "_dispatch", _nothing, lambda _, loop, end, frame: armed.reach(f"receive.{_name(frame)}.after"))
    _around(BusyLoop, "_step", reach("step.before"), reach("step.after"))
    _around(BusyLoop, "_read_aborts", reach("step.ran"), _nothing)
    _around(BusyLoop, "_before_reply", reach("utility.ran"), _nothing)
    _around(BusyLoop, "_handle_shutdown", _nothing, draining)
    _around(BusyLoop, "_finish", reach("finish.before"), reach("finish.after"))
    _around(ScriptedCore, "shutdown", reach("engine.shutdown"), _nothing)
    _around(LockStep, "look", _nothing, looked)
    _around(LockStep, "stepped", _nothing, stepped)


def _patch_client(armed: _Armed) -> list[Callable[[], None]]:
    from engine_client.clients import session
    from engine_client.clients.elastic import Elastic
    from engine_client.clients.start import Handshake
    from engine_client.clients.starter import Starter

    def reach(name: str) -> Callable[..., None]:
        return lambda *_, **__: armed.reach(name)

    def after(_: object, __: object, ___: object, frame: Frame, **____: object) -> None:
        armed.reach(f"receive.{_name(frame)}.after")

    return [
        _around(session, "deliver", _nothing, after),
        _around(Handshake, "_advance", _nothing, after),
        _around(Starter, "launch", _nothing, reach("scale.launched")),
        _around(Starter, "make_ready", _nothing, reach("scale.ready")),
        _around(Elastic, "_take_part", _nothing, reach("scale.taken_part")),
        _around(Elastic, "_wait_idle", reach("scale.draining"), reach("scale.drained")),
    ]


def arm_here() -> None:
    """Arm, in an engine, what the environment names."""
    armed = _Armed(*os.environ[VARIABLE].split("|"))
    _patch_channel(armed)
    _patch_engine(armed)


@contextmanager
def armed(name: str, fault: str, told: str | Path) -> Iterator[None]:
    """Have a fault wait for its point in this process, for the length of the block."""
    one = _Armed(name, fault, str(told))
    undo = _patch_channel(one) + _patch_client(one)
    try:
        yield
    finally:
        for function in reversed(undo):
            function()


def environment_of(name: str, fault: str, told: str | Path) -> dict[str, str]:
    """Return the changes to the environment that arm a fault in the engines that are started with it."""
    import engine_client

    tests = Path(__file__).parent.parent
    package = Path(engine_client.__file__).parent.parent
    path = os.pathsep.join(map(str, (tests / "helpers" / "faulty", tests, package)))
    return {VARIABLE: f"{name}|{fault}|{told}", "PYTHONPATH": path}
