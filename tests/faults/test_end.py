"""The end of a client, asked for or not: in order, in time, without a word, and complete (BC-04, 26, 40, 42, 66)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import subprocess
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_client import ClosedError, EngineDeadError, StartupError, SyncMPClient
from engine_client.testing.executors import FailingInit
from engine_client.testing.inventory import descendants
from engine_client.testing.scripted import Script
from helpers.calls import async_client
from helpers.clients import collect, make_request, pid_of, pids_of, scripted_client
from helpers.colours import COLOURS
from helpers.doomed import Ending, ignore_sigterm, late_reply
from helpers.fakes import several_engines
from helpers.procs import holders_of, memory_of, run_script, wait_gone
from helpers.scenes import METHODS, Waiter, client_of, colours_with, interrupt_after, methods, record_logs
from helpers.timing import eventually, took_at_most

pytestmark = pytest.mark.crash

REPEATS = os.environ.get("ENGINE_CLIENT_TEST_REPEATS")
"""How often stress tests repeat what they do; None: as often as the scenarios say."""
KINDS = ["inproc", *METHODS]


def kinds(*always: str) -> pytest.MarkDecorator:
    """Parametrise over every client and start method; those not named are for the full matrix."""
    usual = ("inproc", "exec", *always)
    return pytest.mark.parametrize(
        "kind", [kind if kind in usual else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
    )


# -- BC-04, BC-42: scripts that come to their end ----------------------------------------------------------------------

PROLOGUE = """
import atexit, gc, logging, os, signal, sys, threading, time
from engine_client import ClientOptions, EngineConfig, InprocClient, SyncMPClient
from helpers.clients import collect, make_request
from helpers.doomed import Ending

kind, ended = sys.argv[1:]
logging.basicConfig(level=logging.WARNING)

def start(**options):
    config = EngineConfig(additional_config={"ended": ended})
    if kind == "inproc":
        return InprocClient(config, Ending, False)
    return SyncMPClient(config, Ending, False, options=ClientOptions(start_method=kind, **options))

def use(client):
    client.add_request(make_request("a", 2))
    if kind == "inproc":
        while not client.get_output().outputs:
            pass
    else:
        collect(client, 1)

def ok():
    print("OK", flush=True)
"""

ENDS = {
    "falls off the end": """
        client = start()
        use(client)
        ok()
        """,
    "calls shutdown": """
        client = start()
        use(client)
        client.shutdown()
        ok()
        """,
    "leaves a with block": """
        with start() as client:
            use(client)
        ok()
        """,
    "deletes the client": """
        client = start()
        use(client)
        del client
        ok()
        """,
    "has it in a function": """
        def main():
            client = start()
            use(client)
            ok()
        main()
        """,
    "exits from a coroutine": """
        import asyncio
        async def main():
            client = start()
            use(client)
            ok()
            sys.exit(0)
        asyncio.run(main())
        """,
    "exits while a request runs": """
        client = start()
        client.add_request(make_request("a", 3000))
        client.get_output()
        ok()
        """,
    "exits while a thread waits": """
        client = start()
        threading.Thread(target=client.get_output, daemon=True).start()
        time.sleep(0.05)
        ok()
        """,
    "never used it": """
        client = start()
        ok()
        """,
    "made two": """
        first, second = start(), start()
        use(second)
        ok()
        """,
    # -- BC-42 --
    "in an atexit hook of before": """
        holder = []
        atexit.register(lambda: holder.clear())
        holder.append(start())
        ok()
        """,
    "in an atexit hook of after": """
        holder = [start()]
        atexit.register(lambda: (use(holder[0]), holder.clear()))
        ok()
        """,
    "in a cycle": """
        class Holder: pass
        holder = Holder()
        holder.self, holder.client = holder, start()
        use(holder.client)
        del holder
        ok()
        """,
    "in a thread-local": """
        local = threading.local()
        local.client = start()
        use(local.client)
        ok()
        """,
    "in a thread-local of a thread that waits": """
        local = threading.local()
        held = threading.Event()
        def work():
            local.client = start()
            held.set()
            time.sleep(600)
        threading.Thread(target=work, daemon=True).start()
        held.wait()
        ok()
        """,
    "in a module": """
        import types
        module = sys.modules["holder"] = types.ModuleType("holder")
        module.client = start()
        use(module.client)
        del module
        ok()
        """,
    "in an object that has __del__": """
        class Holder:
            def __init__(self):
                self.client = start()
            def __del__(self):
                self.client.shutdown()
        holder = Holder()
        use(holder.client)
        ok()
        """,
}

NO_NEW_THREAD = """
def watch():
    real = threading.Thread.start
    def start(thread):
        print("a thread is started at exit:", thread, file=sys.stderr)
        real(thread)
    threading.Thread.start = start
atexit.register(watch)
"""


@pytest.mark.newer
@kinds()
@pytest.mark.parametrize("end", ENDS)
def test_bc04_bc42_a_script_that_ends_well(end: str, kind: str, tmp_path: Path) -> None:
    """However a script lets go of its client, it ends with status 0 and without a word, and the engine in order."""
    _run_to_end(end, kind, tmp_path)


@pytest.mark.full
@pytest.mark.stress
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("end", ENDS)
def test_bc04_bc42_again_and_again(end: str, tmp_path: Path) -> None:
    """The same, as often as ENGINE_CLIENT_TEST_REPEATS says: a race would show."""
    for number in range(int(REPEATS or 200)):
        (tmp_path / str(number)).mkdir()
        _run_to_end(end, "exec", tmp_path / str(number))


def _run_to_end(end: str, kind: str, directory: Path) -> None:
    ended = directory / "ended"
    # The hook is registered last and runs first: everything of ours comes after it.
    source = PROLOGUE + textwrap.dedent(ENDS[end]) + NO_NEW_THREAD
    flags = ["-W", "error"]
    if kind == "fork":  # of a process with threads is warned of: by us, and by Python from 3.12 on
        flags += ["-W", "ignore:start method 'fork'", "-W", "ignore:This process"]
    result = run_script(source, kind, str(ended), flags=flags).check()
    assert result.stdout == "OK\n"
    assert ended.read_text()
    assert ended.read_text().replace("begin end", "") == ""
    assert result.elapsed < 10.0


ASYNC_PROLOGUE = """
import asyncio, atexit, gc, logging, os, sys, threading
from engine_client import EngineConfig, EngineCoreClient
from helpers.clients import make_request
from helpers.doomed import Ending

ended = sys.argv[1]
logging.basicConfig(level=logging.WARNING)

def start():
    config = EngineConfig(additional_config={"ended": ended})
    config.parallel_config.data_parallel_size = 2
    return EngineCoreClient.make_client(True, True, config, Ending, False)

async def use(client):
    async for output in client.stream(make_request("a", 2)):
        pass
    await client.add_request_async(make_request("b", 3000))

def ok():
    print("OK", flush=True)
"""

ASYNC_ENDS = {
    "falls off the end": """
        client = start()
        asyncio.run(use(client))
        ok()
        """,
    "is made and left in a coroutine": """
        async def main():
            client = start()
            await use(client)
            ok()
        asyncio.run(main())
        """,
    "exits from a coroutine": """
        async def main():
            global client
            client = start()
            await use(client)
            tasks = [asyncio.ensure_future(client.get_output_async()) for _ in range(3)]
            await asyncio.sleep(0)
            ok()
            sys.exit(0)
        asyncio.run(main())
        """,
    "leaves waiting tasks to the end of the loop": """
        async def main():
            stream = client.stream(make_request("stream", 3000))
            await stream.next()
            kept.extend([asyncio.ensure_future(client.get_output_async()), stream])
            await use(client)
            ok()
        kept = []
        client = start()
        asyncio.run(main())
        """,
    "keeps it in a cycle": """
        client = start()
        client.myself = client
        asyncio.run(use(client))
        del client
        gc.collect()
        ok()
        """,
    "has a loop in a daemon thread": """
        async def main():
            async for output in client.stream(make_request("a", 2)):
                pass
            ok()
            await asyncio.gather(client.get_output_async(), client.get_output_async())
        client = start()
        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        thread.join(0.5)
        """,
}


@pytest.mark.parametrize("end", ASYNC_ENDS)
def test_bc04_bc42_an_asyncio_script_that_ends_well(end: str, tmp_path: Path) -> None:
    """The same of a client with an event loop and two ranks: status 0, not a word, both engines in order."""
    source = ASYNC_PROLOGUE + textwrap.dedent(ASYNC_ENDS[end]) + NO_NEW_THREAD
    result = run_script(source, str(tmp_path / "ended")).check()
    assert result.stdout == "OK\n"
    assert (tmp_path / "ended").read_text().count("begin") == (tmp_path / "ended").read_text().count("end") == 2
    assert result.elapsed < 10.0


@pytest.mark.newer
@kinds("spawn", "fork")
def test_bc42_a_hook_of_the_host_that_comes_later_than_ours(kind: str, tmp_path: Path) -> None:
    """A host's exit hook that runs after ours and calls the client gets a clear error, at once."""
    source = """
        def hook():
            began = time.monotonic()
            for call in (client.is_sleeping, client.get_output, client.shutdown, lambda: use(client)):
                try:
                    call()
                except Exception as error:
                    print(type(error).__name__, "closed" in str(error))
            print(time.monotonic() - began < 1.0)

        atexit.register(hook)
        client = start()
        use(client)
        """
    result = run_script(PROLOGUE + textwrap.dedent(source), kind, str(tmp_path / "ended")).check()
    assert result.stdout == "ClosedError True\n" * 3 + "True\n"


@methods("spawn", "fork")
def test_bc04_a_real_crash_is_reported_once(method: str, tmp_path: Path) -> None:
    """When the engine has crashed before the script ends, that is one line in the log; the script ends as it wants."""
    source = """
        logging.getLogger().handlers[0].setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        client = start()
        use(client)
        (link,) = client._session.links.values()
        os.kill(link.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while client.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not client.is_alive
        ok()
        """
    result = run_script(PROLOGUE + textwrap.dedent(source), method, str(tmp_path / "ended")).check(stderr=None)
    assert result.stdout == "OK\n"
    assert result.stderr.count("SIGKILL(-9)") == 1, result.stderr
    assert result.stderr.count("ERROR") == 1, result.stderr


@methods("spawn")
@pytest.mark.parametrize("way", ["the group", "every process"])
@pytest.mark.parametrize("handled", [False, True])
def test_bc04_a_supervisor_stops_everything(handled: bool, way: str, method: str, tmp_path: Path) -> None:
    """SIGTERM to the host's group, or to host and engine alike, is a stop: no crash is reported, and all is gone."""
    source = """
        if {handled}:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        client = start()
        use(client)
        (link,) = client._session.links.values()
        with open(ended + ".pid", "w") as file:
            print(link.pid, file=file)
        while True:
            time.sleep(0.01)
        """.replace("{handled}", str(handled))
    path = tmp_path / "ended.pid"

    def stop(process: subprocess.Popen[bytes]) -> None:
        eventually(lambda: path.exists() and path.read_text().endswith("\n"), 20)
        if way == "the group":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(int(path.read_text()), signal.SIGTERM)
            os.kill(process.pid, signal.SIGTERM)

    result = run_script(PROLOGUE + textwrap.dedent(source), method, str(tmp_path / "ended"), started=stop, patience=2.0)
    result.check(0 if handled else -signal.SIGTERM)


def test_bc04_an_engine_that_a_supervisor_stops_is_not_a_crash(caplog: pytest.LogCaptureFixture) -> None:
    """SIGTERM to the engine alone ends it in order: later calls say that it was shut down, and nothing is an error."""
    logged = record_logs(caplog)
    client = scripted_client()
    os.kill(pid_of(client), signal.SIGTERM)
    with pytest.raises(EngineDeadError, match=r"was shut down.*SIGTERM"):
        client.get_output()
    client.shutdown()
    assert logged() == []


# -- BC-26: dropped ----------------------------------------------------------------------------------------------------


class Holder:
    """Something to put a client in."""

    client: Any


@methods("spawn", "fork", "forkserver")
@pytest.mark.parametrize("state", ["idle", "running", "in a utility", "with a result", "in a cycle"])
def test_bc26_a_dropped_client_is_gone(state: str, method: str) -> None:
    """When the last reference goes, so do the client and its engine, within the stop bound; results stay readable."""
    client = scripted_client(Script(step_seconds=0.001), start_method=method, shutdown_timeout=1.0)
    assert client.call_utility("echo", 1) == 1
    result = None
    if state == "running":
        client.add_request(make_request("a", 1_000_000))
        client.get_output(timeout=10)
    elif state == "in a utility":
        with pytest.raises(TimeoutError):
            client.call_utility("wait", 60, timeout=0.1)
    elif state == "with a result":
        result = client.call_utility("echo", np.arange(100_000))
    elif state == "in a cycle":
        holder = Holder()
        holder.client, client.holder = client, holder  # type: ignore[attr-defined]
        del holder
    pid, reference = pid_of(client), weakref.ref(client)
    with took_at_most(2.0):
        del client
        gc.collect()
        assert reference() is None
        wait_gone(pid, 1.0)
    if result is not None:
        assert result.sum() == 99_999 * 50_000


def test_bc26_a_dropped_in_process_client_is_shut_down(tmp_path: Path) -> None:
    """Without a process, too, dropping the last reference ends the executor in order."""
    client = client_of("inproc", Ending, {"ended": str(tmp_path / "ended")})
    client.add_request(make_request("a", 100))
    client.get_output()
    reference = weakref.ref(client)
    del client
    gc.collect()
    assert reference() is None
    assert (tmp_path / "ended").read_text() == "begin end"


async def bring_to(client: Any, state: str) -> Any:
    """Bring an asyncio client to a state; return what is kept of it."""
    if state == "dropped":
        return None
    assert await client.call_utility_async("echo", 1) == 1
    if state == "running":
        await client.add_request_async(make_request("a", 1_000_000))
        await client.get_output_async(timeout=10)
    elif state == "in a stream":
        await client.stream(make_request("a", 1_000_000)).next()
    elif state == "in a utility":
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.call_utility_async("wait", 60), 0.1)
    elif state == "with a result":
        return await client.call_utility_async("echo", np.arange(100_000))
    elif state == "in a cycle":
        holder = Holder()
        holder.client, client.holder = client, holder
    return None


STATES_OF_DROPPED = ["dropped", "idle", "running", "in a stream", "in a utility", "with a result", "in a cycle"]


@pytest.mark.parametrize(
    ("colour", "in_loop", "state"),
    [
        pytest.param(colour, in_loop, state, marks=[] if is_usual else pytest.mark.full)
        for colour in ("dp", "async", "external")
        for in_loop in (True, False)
        for state in STATES_OF_DROPPED
        for is_usual in [(colour, in_loop) == ("dp", True) and state in ("running", "in a cycle")]
    ],
)
def test_bc26_a_dropped_asyncio_client_is_gone(colour: str, in_loop: bool, state: str) -> None:
    """The same for those of asyncio, whether the loop still runs or has ended; with two ranks both are gone."""
    holder = Holder()
    script = Script(step_seconds=0.001)
    holder.client = scripted_client(script, colour=colour, shutdown_timeout=1.0).asynchronous
    pids, reference = pids_of(holder.client), weakref.ref(holder.client)

    def drop() -> None:
        del holder.client
        gc.collect()
        assert reference() is None
        for pid in pids:
            wait_gone(pid, 1.0)

    async def main() -> Any:
        kept = await bring_to(holder.client, state)
        if in_loop:
            with took_at_most(2.0):
                drop()
        return kept

    result = asyncio.run(main())
    if not in_loop:
        with took_at_most(2.0):
            drop()
    if result is not None:
        assert result.sum() == 99_999 * 50_000


@pytest.mark.parametrize(
    ("method", "colour"),
    [
        *((method, "sync") for method in METHODS),
        *(pytest.param("exec", colour, marks=pytest.mark.full) for colour in COLOURS[1:]),
    ],
)
def test_bc26_a_failed_start_holds_nothing(method: str, colour: str) -> None:
    """While the error of a failed start is kept, nothing else of it is: no process, no descriptor, no thread."""
    from engine_client.testing.leaks import LeakGuard

    with LeakGuard(patience=2.0):
        with pytest.raises(StartupError) as caught:
            client_of(method, FailingInit, colour=colour)
        kept = caught.value
    assert "ValueError" in str(kept)


@colours_with("sync")
def test_bc26_twenty_in_a_row(colour: str) -> None:
    """The twentieth client of a process is as fast as the first ones."""
    times = []
    for _ in range(20):
        began = time.monotonic()
        client = scripted_client(colour=colour)
        client.add_request(make_request("a", 1))
        collect(client, 1)
        del client
        gc.collect()
        times.append(time.monotonic() - began)
    assert min(times[-5:]) < 1.5 * min(times[:5]) + 0.05, times
    assert not descendants()


@pytest.mark.parametrize("where", ["thread", "event loop", "worker of an event loop"])
def test_bc26_dropped_elsewhere(where: str) -> None:
    """It makes no difference in which thread the last reference goes."""
    holder = Holder()
    holder.client = scripted_client()
    pid, reference = pid_of(holder.client), weakref.ref(holder.client)

    def drop() -> None:
        del holder.client

    async def drop_in_loop() -> None:
        if where == "event loop":
            drop()
        else:
            await asyncio.to_thread(drop)

    with took_at_most(2.0):
        if where == "thread":
            thread = threading.Thread(target=drop)
            thread.start()
            thread.join()
        else:
            asyncio.run(drop_in_loop())
        assert reference() is None
        wait_gone(pid, 1.0)


@contextmanager
def on_reader(client: SyncMPClient, action: Callable[[], Any]) -> Iterator[None]:
    """Inside of the block something has been begun on the client's reader thread, which ends futures of calls."""
    begun: list[str] = []

    def act(_: object) -> None:
        begun.append(threading.current_thread().name)
        action()

    caller = Waiter(partial(client.call_utility, "wait", 0.1), again=False)
    future = eventually(lambda: list(client.utility_results.values()))[0]  # the first rank's
    future.add_done_callback(act)
    try:
        eventually(lambda: begun)
        assert "reader" in begun[0]
        yield
    finally:
        caller.join(20)


class DropOnReader(logging.Handler):
    """Drops something on the reader's thread, which logs a reply that nobody waits for."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(logging.WARNING)
        self.holder = holder
        self.thread = ""
        self.at = float("nan")

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(self.holder, "client"):
            self.thread = threading.current_thread().name
            self.at = time.monotonic()
            del self.holder.client


@pytest.mark.parametrize("whose", ["its own", "another"])
def test_bc26_collected_on_a_reader_thread(whose: str) -> None:
    """A client collected on a reader's thread ends in its stop bound; another one, whose thread it is, goes on."""
    holder = Holder()
    holder.client = scripted_client(shutdown_timeout=2.0)
    other = scripted_client()
    pid, reference = pid_of(holder.client), weakref.ref(holder.client)

    dropped: list[float] = []

    def drop() -> None:
        dropped.append(time.monotonic())
        del holder.client

    if whose == "another":
        with pytest.raises(TimeoutError):
            holder.client.call_utility("wait", 60, timeout=0.05)  # its stop takes all of the grace
        with on_reader(other, drop), took_at_most(1.0):
            assert other.call_utility("echo", 5) == 5
    else:
        logger = logging.getLogger("engine_client.session")
        logger.addHandler(handler := DropOnReader(holder))
        with pytest.raises(TimeoutError):  # its own call is given up: the client is then held by the holder alone
            holder.client.call_utility("collective_rpc", late_reply, None, (), None, timeout=0.05)
        eventually(lambda: reference() is None)
        logger.removeHandler(handler)
        assert "reader" in handler.thread
        dropped.append(handler.at)
    wait_gone(pid, dropped[0] + 3.0 - time.monotonic())
    assert reference() is None
    other.shutdown()
    eventually(lambda: not any("reader" in thread.name for thread in threading.enumerate()), 2.0)


# -- BC-40: shutdown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "colour"), [*((method, "sync") for method in METHODS), ("exec", "dp")])
def test_bc40_idle(method: str, colour: str) -> None:
    """An idle engine is shut down in less than 0.2 s (the best of five: the machine is shared)."""
    times = []
    for _ in range(5):
        client = scripted_client(start_method=method, colour=colour)
        began = time.monotonic()
        client.shutdown()
        times.append(time.monotonic() - began)
        assert not descendants()
    assert min(times) < 0.2, times
    assert max(times) < 1.0, times


def _make_busy(client: SyncMPClient, _: ExitStack) -> None:
    with pytest.raises(TimeoutError):
        client.call_utility("wait", 60, timeout=0.05)


def _make_busy_with_the_gil(client: SyncMPClient, _: ExitStack) -> None:
    with pytest.raises(TimeoutError):
        client.call_utility("hold_gil", 60, timeout=0.05)


def _make_busy_in_steps(client: SyncMPClient, _: ExitStack) -> None:
    client.call_utility("set_script", {"step_seconds": 60.0})
    client.add_request(make_request("a", 10))
    time.sleep(0.05)


def _make_dead(client: SyncMPClient, _: ExitStack) -> None:
    os.kill(pid_of(client), signal.SIGKILL)


def _make_stopped(client: SyncMPClient, _: ExitStack) -> None:
    os.kill(pid_of(client), signal.SIGSTOP)


def _make_stubborn(client: SyncMPClient, _: ExitStack) -> None:
    client.collective_rpc(ignore_sigterm)
    _make_busy(client, _)


def _make_full(client: SyncMPClient, stack: ExitStack) -> None:
    """Leave the engine with output that nobody takes: the client's reader is busy elsewhere."""
    stack.enter_context(on_reader(client, lambda: time.sleep(4)))
    with pytest.raises(TimeoutError):
        client.call_utility("echo", b"x" * (48 << 20), timeout=0.2)


STATES = {
    "idle": (lambda client, stack: None, 0.5),
    "dead": (_make_dead, 1.0),
    "busy": (_make_busy, None),
    "busy, holding the GIL": (_make_busy_with_the_gil, None),
    "busy in a step": (_make_busy_in_steps, None),
    "stopped": (_make_stopped, None),
    "ignoring SIGTERM": (_make_stubborn, None),
    "full": (_make_full, None),
}


@pytest.mark.parametrize(
    ("method", "timeout", "colour"),
    [
        ("exec", 0.0, "sync"),
        ("exec", 1.0, "sync"),
        pytest.param("exec", 0.0, "async", marks=pytest.mark.full),
        ("exec", 0.3, "dp"),
        *(pytest.param(method, t, "sync", marks=pytest.mark.full) for method in METHODS[1:] for t in (0.0, 1.0)),
    ],
)
@pytest.mark.parametrize("state", STATES)
def test_bc40_the_bound_holds_in_every_state(state: str, method: str, timeout: float, colour: str) -> None:
    """Shutdown takes at most its timeout and a second, leaves nothing, and those who wait get an error by then."""
    client = scripted_client(Script(grandchildren=1), start_method=method, arena_limit=0, colour=colour)
    make, bound = STATES[state]
    with ExitStack() as stack:
        make(client, stack)
        waiters = [Waiter(client.get_output), Waiter(lambda: client.call_utility("deferred"))]
        time.sleep(0.02)
        with took_at_most(min(timeout + 1.0, bound or 100.0)):
            client.shutdown(timeout)
        ended = time.monotonic()
        assert not descendants()
        for waiter in waiters:
            error = waiter.end(ended, 0.5)
            # The second one: what an engine says that ends in order.
            assert isinstance(error, EngineDeadError) or str(error) == "Server shutting down", error
        with took_at_most(0.1):
            client.shutdown(timeout)
        with pytest.raises(EngineDeadError):
            client.get_output()


@pytest.mark.slow
@pytest.mark.parametrize(("timeout", "complete"), [(5.0, True), (1.0, False)])
def test_bc40_time_to_flush(timeout: float, complete: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An executor that needs 3 s to flush gets them where the timeout allows it; where not, the log says it was cut."""
    logged = record_logs(caplog)
    ended = tmp_path / "ended"
    client = client_of("exec", Ending, {"ended": str(ended), "flush_seconds": 3.0})
    began = time.monotonic()
    client.shutdown(timeout)
    took = time.monotonic() - began
    assert ended.read_text() == ("begin end" if complete else "begin ")
    assert took < timeout + 1.0
    assert (took < 4.0) is True
    assert len(logged()) == (0 if complete else 1)
    assert complete or "cut short" in logged()[0]


@pytest.mark.parametrize("colour", ["sync", "dp"])
def test_bc40_from_two_threads_at_once(colour: str) -> None:
    """Several threads may shut a client down at once; each returns within its own bound, when all is gone."""
    client = scripted_client(colour=colour)
    _make_busy(client, ExitStack())
    began = time.monotonic()
    waiters = [Waiter(lambda: client.shutdown(1.0), again=False) for _ in range(4)]
    for waiter in waiters:
        assert waiter.end(began, 2.0) is None
    assert not descendants()


def test_bc40_a_shorter_timeout_joins_in() -> None:
    """Who comes with a shorter timeout, while another waits with a long one, is not held up by it."""
    client = scripted_client()
    _make_busy(client, ExitStack())
    patient = Waiter(lambda: client.shutdown(30.0), again=False)
    time.sleep(0.2)
    with took_at_most(1.5):
        client.shutdown(0.5)
    assert patient.end(time.monotonic(), 1.0) is None
    assert not descendants()


@pytest.mark.parametrize("ranks", [1, 2])
def test_bc40_in_an_event_loop(ranks: int) -> None:
    """Called in a coroutine, it returns within its bound, and what waits in that loop and in others is told."""

    async def wait(client: Any, name: str) -> list[Any]:
        stream = client.stream(make_request(name, 1_000_000))
        await stream.next()
        await client.call_utility_async("wait", 0.2)
        waiting = [
            client.get_output_async(),
            client.call_utility_async("deferred"),
            *(stream.next() for _ in range(200)),
        ]
        return await asyncio.gather(*waiting, return_exceptions=True)

    async def main(client: Any) -> list[Any]:
        task = asyncio.create_task(wait(client, "mine"))
        await asyncio.sleep(0.5)
        with took_at_most(1.0):
            client.shutdown(5.0)
        with took_at_most(0.5):
            return await task

    client = async_client(ranks, Script(step_seconds=0.05))
    other = Waiter(lambda: asyncio.run(wait(client, "other")), again=False)
    errors = asyncio.run(main(client))
    assert other.end(time.monotonic(), 0.5) is None
    for error in [errors[0], errors[1], errors[-1], *other.result[:2], other.result[-1]]:
        told = isinstance(error, (EngineDeadError, StopAsyncIteration)) or "shutting down" in str(error)
        assert told or str(error.finish_reason) == "abort", error  # which one of those in the stream is given
    with pytest.raises(ClosedError):
        asyncio.run(client.call_utility_async("echo", 1))


def test_bc40_from_the_reader_thread() -> None:
    """A client that is shut down on its own reader's thread ends within the bound; calls end with an error."""
    client = scripted_client(shutdown_timeout=1.0)
    waiter = Waiter(client.get_output)
    began = time.monotonic()
    with on_reader(client, client.shutdown):
        assert isinstance(waiter.end(began, 2.0), EngineDeadError)
        eventually(lambda: not descendants(), max(0.1, began + 2.0 - time.monotonic()))
    client.shutdown()


def test_bc40_from_a_finalizer() -> None:
    """A client that is shut down by another object's finalizer, in the middle of a call on it, ends in order."""
    client = scripted_client()
    weakref.finalize(holder := Holder(), client.shutdown)
    with took_at_most(2.0):
        del holder
    assert not client.is_alive
    assert not descendants()


@pytest.mark.parametrize("after", [0.0, 0.05, 0.3])
def test_bc40_with_a_pending_interrupt(after: float) -> None:
    """Ctrl-C during a shutdown ends it at once: KeyboardInterrupt, and nothing is left."""
    client = scripted_client()
    _make_busy(client, ExitStack())
    with took_at_most(1.5 + after), pytest.raises(KeyboardInterrupt), interrupt_after(after):
        client.shutdown(30.0)
        time.sleep(30)
    eventually(lambda: not descendants(), 1.0)
    client.shutdown()


def test_bc40_ten_engines_take_the_time_of_the_slowest() -> None:
    """Ten engines that all need the whole grace are gone after one grace, not ten."""
    with several_engines([Script()] * 10) as (session, handshake):
        handshake.run()
        for link in session.links.values():
            os.kill(link.pid, signal.SIGSTOP)
        with took_at_most(2.0):
            session.close(1.0)
    assert not descendants()


def test_bc40_requests_in_flight_are_drained_or_aborted() -> None:
    """Without a ``shutdown_timeout`` in the configuration running requests do not hold the end up."""
    client = scripted_client(Script(step_seconds=0.01))
    for index in range(20):
        client.add_request(make_request(f"r{index}", 1_000_000))
    client.get_output(timeout=10)
    with took_at_most(1.0):
        client.shutdown(5.0)


# -- BC-66 -------------------------------------------------------------------------------------------------------------


MANY = pytest.param(
    int(REPEATS or 300), marks=[pytest.mark.full, pytest.mark.stress, pytest.mark.slow, pytest.mark.timeout(1800)]
)


def _begin_slow_end(client: SyncMPClient) -> tuple[float, Waiter]:
    """Begin to shut down a client whose engine takes a second to die; return when, and who waits for it."""
    _make_stubborn(client, ExitStack())
    return time.monotonic(), Waiter(lambda: client.shutdown(1.0), again=False)


@pytest.mark.parametrize("count", [16, MANY])
def test_bc66_clients_without_pause(count: int) -> None:
    """Clients made and ended without pause, whose engines are slow to die, each see their own engine's outputs only."""
    old: dict[int, SyncMPClient] = {}
    pids: list[int] = []
    dying: list[tuple[float, Waiter]] = []
    with ExitStack() as stack:
        for number in range(count):
            client = scripted_client(Script(token=number), shutdown_timeout=0.0)
            pids.append(pid_of(client))
            if number % 5 == 0 and len(old) < 3:
                client.call_utility("set_script", {"step_seconds": 0.001})
                client.add_request(make_request("endless", 10_000_000))  # goes on sending meanwhile
                old[number] = client
                stack.callback(client.shutdown)
                continue
            client.add_request(make_request("a", 3))
            outputs = collect(client, 1)["a"]
            assert [token for output in outputs for token in output.new_token_ids] == [number] * 3
            if number % 8 == 3:  # takes a second to die, while the next ones are made
                dying.append(_begin_slow_end(client))
                continue
            if number % 4 == 1:
                client.collective_rpc(ignore_sigterm)
            elif number % 4 == 2:
                os.kill(pid_of(client), signal.SIGSTOP)
            client.shutdown()
        for began, waiter in dying:
            assert waiter.end(began, 2.0) is None
            assert waiter.at - began > 0.9
        for number, client in old.items():
            for _ in range(100):
                outputs = client.get_output(timeout=10).outputs
                assert {token for output in outputs for token in output.new_token_ids} == {number}
            assert client.call_utility("echo", number) == number
    for pid in pids:
        wait_gone(pid, 2.0)


def test_bc66_two_clients_used_in_turn() -> None:
    """Two clients of one process never see each other's outputs."""
    with scripted_client(Script(token=1)) as one, scripted_client(Script(token=2)) as two:
        for round_number in range(30):
            for client in (one, two):
                client.add_request(make_request(f"r{round_number}", 2))
            for token, client in ((2, two), (1, one)):
                (outputs,) = collect(client, 1).values()
                assert {t for output in outputs for t in output.new_token_ids} == {token}
                assert client.call_utility("echo", token) == token


def test_bc66_the_token_of_another_client_is_refused() -> None:
    """An engine that says READY with the token of another client is not taken for ours."""
    with took_at_most(3.0), pytest.raises(StartupError, match="belongs to another client"):
        client_of("exec", None, engine_target="helpers.fakes:build_impostor")


def test_bc66_memory_has_no_name() -> None:
    """Memory is nameless, and no two clients share any: only a client's own process and its engine have it."""
    payload = b"x" * (1 << 20)
    before = memory_of(os.getpid())  # of clients that others still have
    with scripted_client() as one:
        assert one.call_utility("echo", payload) == payload
        of_one = memory_of(os.getpid()) - before
        with scripted_client() as two:
            assert two.call_utility("echo", payload) == payload
            of_two = memory_of(os.getpid()) - before - of_one
            for memory, client in ((of_one, one), (of_two, two)):
                assert memory
                assert all(row.endswith(" (deleted)") for row in memory)
                assert holders_of(memory) == {os.getpid(), pid_of(client)}
    eventually(lambda: not holders_of(of_one | of_two), 2.0)
    assert [line for line in Path("/proc/net/unix").read_text().splitlines() if "engine-client" in line] == []


# -- BC-55 -------------------------------------------------------------------------------------------------------------

HOST = """
import logging, os, signal, subprocess, sys, threading, time
from engine_client import ClientOptions, EngineConfig, SyncMPClient
from engine_client.testing.executors import FailingInit
from helpers.clients import make_request, pid_of, scripted_client
from engine_client.testing.faults import die

logging.getLogger("engine_client").setLevel(logging.CRITICAL + 1)
method, group = sys.argv[1:]
signals = []
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, lambda number, frame: signals.append(number))

kills = []
def pid_behind(fd):
    with open(f"/proc/self/fdinfo/{fd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

for module, name in ((os, "kill"), (os, "killpg"), (signal, "pidfd_send_signal")):
    def record(target, number, *rest, real=getattr(module, name), name=name):
        kills.append((name, pid_behind(target) if name.startswith("pidfd") else target, number))
        return real(target, number, *rest)
    setattr(module, name, record)
own_groups = {os.getpgrp(), os.getpgid(os.getppid())}

unrelated = subprocess.Popen(["sleep", "600"])
if group == "shared":
    class Popen(subprocess.Popen):
        def __init__(self, *args, start_new_session=False, **kwargs):
            super().__init__(*args, **kwargs)
    subprocess.Popen = Popen
    os.setsid = lambda: None
ticks = []
def count():
    while True:
        ticks.append(1)
        time.sleep(0.01)
threading.Thread(target=count, daemon=True).start()

engines = set()
for fault in ("start", "step", "kill", "segv"):
    if fault == "start":
        try:
            SyncMPClient(EngineConfig(), FailingInit, False, options=ClientOptions(start_method=method))
        except RuntimeError as error:
            assert "ValueError" in str(error)
        else:
            raise AssertionError
        continue
    client = scripted_client(start_method=method)
    engines.add(pid_of(client))
    assert (os.getpgid(pid_of(client)) == os.getpgrp()) is (group == "shared")
    if fault == "step":
        client.call_utility("fail_step", RuntimeError("x"))
    else:
        os.kill(pid_of(client), signal.SIGKILL if fault == "kill" else signal.SIGSEGV)
        kills.pop()
    threads = [threading.Thread(target=client.shutdown) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        client.get_output()
    except RuntimeError:
        raise
    except Exception as error:
        assert "EngineDeadError" in str(type(error)) or "ClosedError" in str(type(error)), repr(error)
    else:
        raise AssertionError
    client.shutdown()
    for thread in threads:
        thread.join()

for name, pid, number in kills:
    if number == 0:
        continue  # only a question
    assert pid > 1 and pid not in {os.getpid(), os.getppid(), unrelated.pid} | own_groups, (name, pid, number)
assert any(number for _, _, number in kills), "nothing was recorded"
assert unrelated.poll() is None
before = len(ticks)
time.sleep(0.2)
assert len(ticks) > before
assert signals == [], signals
unrelated.kill()
unrelated.wait()
print("OK")
"""


# A host that forks with threads is warned.
FORK_FLAGS = ("-W", "error", "-W", "ignore:start method 'fork'", "-W", "ignore:This process")


@methods("spawn")
def test_bc55_the_host_and_its_others_are_left_alone(method: str) -> None:
    """Whatever ends an engine, the host gets exceptions and no signal, and nothing outside of the engine is killed."""
    result = run_script(HOST, method, "", flags=FORK_FLAGS).check()
    assert result.stdout == "OK\n"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exec", pytest.param("fork", marks=pytest.mark.full)])
def test_bc55_a_host_in_the_process_group_of_its_engine(method: str) -> None:
    """Should an engine have stayed in the host's group, which it leaves at once, that group is never signalled."""
    result = run_script(HOST, method, "shared", flags=FORK_FLAGS).check()
    assert result.stdout == "OK\n"


def test_bc55_a_host_that_is_the_first_process() -> None:
    """A host that is process 1 of a container lives through the death of its engine."""
    from helpers.sandbox import can_unshare

    if not can_unshare():
        pytest.skip("needs the right to make a namespace of pids: root, or user namespaces")
    command = f"""
        import subprocess, sys
        script = {HOST!r}
        unshare = ["unshare", "-p", "-f", "--mount-proc"]
        sys.exit(subprocess.run([*unshare, sys.executable, "-c", script, "exec", ""]).returncode)
        """
    result = run_script(command).check()
    assert result.stdout == "OK\n"
