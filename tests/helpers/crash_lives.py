"""The lives of clients in which ``crash_points`` come: what is done, and what everybody must see.

Nothing here imports pytest: scripts use it, too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine_client import (
    ClientOptions,
    DPAsyncMPClient,
    DPLBAsyncMPClient,
    EngineConfig,
    EngineDeadError,
    PoolingParams,
    StartupError,
)
from engine_client.config import ModelConfig
from engine_client.errors import HandshakeTimeout, RemoteCallError
from engine_client.testing.inventory import describe_process, key_of
from engine_client.testing.scripted import TARGET, Script
from helpers.clients import make_request, session_of
from helpers.colours import Driven, make_coloured
from helpers.crash_points import Point, armed
from helpers.timing import DEADLOCK, MS

__all__ = ["KINDS", "Life", "kinds_of", "live_in_a_script"]

KINDS: Final = ("sync", "async", "dp", "lb", "lock-step")
"""Blocking; asyncio; one of several ranks; two balanced ranks; two ranks in lock-step."""

DEATH_BOUND: Final = 2_000 * MS
"""Seconds in which everybody has learnt of a death."""
STOP_BOUND: Final = 1_000 * MS
"""Seconds that a shutdown may take beyond its timeout."""
CAUSES: Final = {
    "kill": ("SIGKILL",),
    **dict.fromkeys(("cut", "cut_early", "cut_late"), ("the stream ended inside a frame",)),
    **dict.fromkeys(("corrupt", "corrupt_late"), ("is not this protocol's mark", "cannot be", "RemoteProtocolError")),
}
"""What an error says of the fault that an engine met."""
READY_TIMEOUT: Final = 5_000 * MS
SIZE: Final = 1 << 20
LONG: Final = 1_000_000


def kinds_of(point: Point) -> tuple[str, ...]:
    """Return the clients in whose life a point comes."""
    if point.phase in ("join", "leave"):
        return ("lb", "lock-step")
    return ("lock-step",) if point.phase == "wave" else KINDS


class Calls:
    """Calls on threads of their own, with how each ended."""

    def __init__(self) -> None:
        from helpers.scenes import Waiter  # which imports pytest, as scripts need not

        self.make = Waiter
        self.all: list[Any] = []

    def start(self, call: Callable[[], Any], *, again: bool = False) -> Any:
        self.all.append(self.make(call, again=again))
        return self.all[-1]


class Life:
    """One client's life with one fault in it.

    Args:
        kind: of client.
        point: where the fault comes.
        fault: which.
        told: the file that appears when it has come.
    """

    def __init__(self, kind: str, point: Point, fault: str, told: Path) -> None:
        self.kind = kind
        self.point = point
        self.fault = fault
        self.told = told
        self.client: Any = None
        self.calls = Calls()
        # Seconds of the polite end.  They pass in vain where an engine has stopped, but have to suffice until then.
        self.grace = 10_000 * MS
        if fault == "stop":
            self.grace = 3_000 * MS if point.phase in ("end", "leave") else 0.5

    @property
    def is_harmless(self) -> bool:
        """Tell whether nothing may come of the fault."""
        return self.fault == "delay" or (self.point.side == "client" and self.fault == "stop")

    @property
    def is_damaged(self) -> bool:
        """Tell whether a message arrives with bytes in it that nobody has sent, which fails first what it is about."""
        return self.fault.startswith("corrupt") and self.point.name.endswith(".mid")

    def live(self, arm: Callable[[], object] = lambda: None) -> None:
        """Live it, and check it; ``arm`` is called before the engines start that are to meet the fault."""
        is_joining = self.point.phase == "join"
        if not is_joining:
            arm()
        try:
            self.start()
            if self.client is not None:
                self.serve(arm if is_joining else lambda: None)
        finally:
            client, self.client = self.client, None
            if client is not None:
                client.shutdown(0)
            for call in self.calls.all:
                call.join(DEADLOCK)
            self.calls.all.clear()
            del client
            gc.collect()

    # -- the start -----------------------------------------------------------------------------------------------------

    def make(self) -> Any:
        """Return the client."""
        start_error = ValueError("as asked") if self.point.phase == "fail" else None
        script = Script(step_seconds=0.001, progress=(("loading", 1, 2),), start_error=start_error)
        config = EngineConfig(additional_config={"script": script}, shutdown_timeout=5)
        # A stopped engine ends a start by its deadline alone.
        is_short = (
            self.fault == "stop" and self.point.side == "engine" and self.point.phase in ("start", "fail", "join")
        )
        ready_timeout = READY_TIMEOUT if is_short else DEADLOCK
        options = ClientOptions(
            engine_target=TARGET,
            ready_timeout=ready_timeout,
            shutdown_timeout=self.grace,
            forward_logs=logging.WARNING,
        )
        if self.kind in ("sync", "async"):
            return make_coloured(self.kind, config, None, False, options)
        config.parallel_config.data_parallel_size = 2
        if self.kind == "dp":
            config.parallel_config.data_parallel_external_lb = True
            return Driven(DPAsyncMPClient(config, None, False, options=options))  # type: ignore[arg-type]  # no executor
        if self.kind == "lock-step":
            config.model_config = ModelConfig(is_moe=True)
        return Driven(DPLBAsyncMPClient(config, None, False, options=options))  # type: ignore[arg-type]  # as above

    def start(self) -> None:
        """Start the client; a fault in its way ends that with an error, in time."""
        began = time.monotonic()
        try:
            self.client = self.make()
        except (StartupError, HandshakeTimeout) as error:
            if self.point.phase == "fail":
                self.check("as asked" in str(error) or not self.is_harmless, f"wrong error: {error!r}")
            else:
                self.check(self.point.phase == "start" and not self.is_harmless, f"no start: {error!r}")
            self.check(time.monotonic() - began < READY_TIMEOUT + DEATH_BOUND, "a start took too long to fail")
            return
        self.check(self.point.phase != "fail", "an engine that fails has started")

    def check(self, is_right: bool, message: str) -> None:
        if not is_right:
            raise AssertionError(f"{self.point.name}, {self.fault}, {self.kind}: {message}")

    # -- some of everything --------------------------------------------------------------------------------------------

    def serve(self, arm: Callable[[], object]) -> None:
        """Use the client for all that it is for, then end it, with others waiting all the while."""
        client = self.client
        consumer = self.calls.start(self.consume)
        pending = self.calls.start(
            lambda: client.call_utility("deferred", ranks=[0])
        )  # a rank that leaves ends its calls
        work = self.calls.start(self.work)
        self.follow(work)
        if self.point.phase in ("join", "leave") and work.error is None:
            arm()
            scale = self.calls.start(self.scale)
            self.follow(scale)
        if self.point.phase == "dead":
            self.calls.start(lambda: client.call_utility("fail_step", ValueError("as asked")))
            self.follow(consumer)
        if self.is_over():
            self.expect_death()
            for call in (consumer, pending):  # which nothing else can end
                self.check(isinstance(call.error, EngineDeadError), f"{call.call} ended with {call.error!r}")
        else:
            if self.point.name != "*" and self.point.phase not in ("end", "leave"):
                self.check(self.told.exists() or not client.is_alive, "it was not reached")
            self.end(pending)
        self.expect_no_more()

    def consume(self) -> None:
        """Take outputs until there are no more; those that were sent in vain are none of ours."""
        while True:
            self.client.get_output()

    def work(self) -> None:
        """Send requests with and without tensors, abort one, call with a large argument and result."""
        client = self.client
        value = np.full(SIZE, 7, np.uint8)
        fields = {"sampling_params": None, "pooling_params": PoolingParams(task="embed")}
        client.add_request(make_request("tensor", prompt=None, prompt_embeds=value, **fields))
        client.add_request(make_request("short", 100))
        client.add_request(make_request("long", LONG))
        client.abort_requests(["long"])
        client.call_utility("log", "a line")
        found = client.call_utility("echo", value)
        self.check(bool(np.array_equal(found, value)), "a value came back changed")
        self.rest()
        if self.kind == "lock-step":  # a wave that one rank starts, and the other joins
            client.add_request(make_request("alone", 50, data_parallel_rank=0))
            self.rest()

    def rest(self) -> None:
        """Wait until nothing is left to do, as long as the engines live."""
        session = session_of(self.client)
        while session.in_flight.of_rank(0) or session.in_flight.of_rank(1) or self.client.dp_engines_running():
            self.client.call_utility("echo", 1)
            self.client.ensure_alive()
            time.sleep(0.01)

    def scale(self) -> None:
        """Have a rank more, or one less."""
        size = 3 if self.point.phase == "join" else 1
        asyncio.run(self.client.asynchronous.scale_elastic_ep(size))

    def follow(self, call: Any) -> None:
        """Wait for the end of a call; where an engine has stopped in its way, that cannot end, and is shut down."""
        deadline = time.monotonic() + DEADLOCK
        while call.is_alive() and time.monotonic() < deadline and not self.has_stopped():
            call.join(0.01)
        if self.has_stopped():
            call.join(0.2)
        else:
            self.check(not call.is_alive(), f"{call.call} does not end")

    def has_stopped(self) -> bool:
        """Tell whether an engine has stopped at the point."""
        if self.fault != "stop" or self.point.side != "engine" or self.point.name == "*":
            return False
        with suppress(FileNotFoundError, ValueError):
            key = key_of(int(self.told.read_text(encoding="utf-8")))
            return key is not None and "state T" in describe_process(key)
        return False

    # -- its end -------------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Tell whether the client is dead already, or must be any moment."""
        if self.has_stopped() or (self.is_harmless and self.point.phase != "dead"):
            return False
        if self.point.phase in ("end", "join", "leave", "wave"):
            return not self.client.is_alive
        return self.point.phase != "end"

    def expect_death(self) -> None:
        """Everybody who waits is told in time."""
        began = time.monotonic()
        for call in self.calls.all:
            call.join(max(0.0, began + DEATH_BOUND - time.monotonic()))
            self.check(not call.is_alive(), f"{call.call} still waits {DEATH_BOUND} s after the death")
            self.check_error(call)

    def check_error(self, call: Any) -> None:
        error = call.error
        kinds = (EngineDeadError, StartupError, *((RemoteCallError,) if self.is_damaged else ()))
        is_right = error is None or isinstance(error, kinds)
        if isinstance(error, EngineDeadError) and self.point.side == "engine" and " died: " in str(error):
            # Where all engines fail in a step, the first to be heard may be one that did not meet the fault.
            causes = (*CAUSES.get(self.fault, ("",)), *(("as asked",) if self.point.phase == "dead" else ()))
            is_right = any(cause in str(error) for cause in causes)
        self.check(is_right, f"{call.call} ended with {error!r}")

    def end(self, pending: Any) -> None:
        """Shut down with a request to be finished; it is done in time, and everybody is told."""
        client = self.client
        with suppress(EngineDeadError):
            client.add_request(make_request("last", 50))
        began = time.monotonic()
        client.shutdown()
        took = time.monotonic() - began
        self.check(took < self.grace + STOP_BOUND, f"shutdown took {took:.1f} s")
        self.expect_death()
        self.check(isinstance(pending.error, EngineDeadError), f"a pending call ended with {pending.error!r}")

    def expect_no_more(self) -> None:
        """Later calls are refused, and nobody is in a table."""
        client = self.client
        for call in (
            lambda: client.call_utility("echo", 1),
            lambda: client.add_request(make_request("late")),
            lambda: client.get_output(timeout=5),
            client.check_health,
        ):
            error: BaseException | None = None
            try:
                call()
            except EngineDeadError as caught:
                error = caught
            self.check(error is not None, "a later call returned")
        session = session_of(client)
        self.check(not client.utility_results, "a call is left in the table")
        self.check(not len(session.room), "a sender is left waiting")
        client.abort_requests(["late"])
        client.shutdown()


def live_in_a_script(point: tuple[str, str, str], fault: str, kind: str, told: str) -> None:
    """Be a host that meets a fault."""
    logging.getLogger("engine_client").setLevel(logging.CRITICAL + 1)
    signal.alarm(120)
    with armed(point[0], fault, told):
        Life(kind, Point(*point), fault, Path(told)).live()
    assert os.path.exists(told), "the point was never reached"
