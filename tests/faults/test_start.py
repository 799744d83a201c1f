"""Starts that fail, stall or are interrupted: the error says why and nothing is left (BC-01, BC-16, BC-19)."""

from __future__ import annotations

import asyncio
import importlib
import linecache
import math
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from engine_client import (
    ClientOptions,
    EngineConfig,
    EngineCoreClient,
    HandshakeTimeout,
    RemoteCallError,
    StartupError,
)
from engine_client.testing.executors import FailingInit
from engine_client.testing.faults import frozen
from engine_client.testing.inventory import descendants
from engine_client.testing.scripted import TARGET, Script
from helpers.clients import collect, make_request, scripted_client
from helpers.colours import make_coloured
from helpers.doomed import FailsUnpicklably, Nest
from helpers.fakes import several_engines
from helpers.procs import run_script
from helpers.scenes import METHODS, client_of, colours_with, interrupt_after, methods
from helpers.timing import eventually, took_at_most

pytestmark = pytest.mark.crash

MIB = 1 << 20


def start_again() -> None:
    """Check that the next client can be had at once."""
    with scripted_client() as client:
        client.add_request(make_request("a", 2))
        assert len(collect(client, 1)["a"]) == 2


# -- BC-01 -------------------------------------------------------------------------------------------------------------


@methods("spawn", "forkserver", "fork")
def test_bc01_the_cause_of_a_failed_start_arrives(method: str) -> None:
    """The RuntimeError has marker, type and traceback of the engine's exception, which is its cause, chain and all."""
    with took_at_most(2.0), pytest.raises(RuntimeError, match="unique marker") as caught:
        client_of(method, FailingInit, {"marker": "unique marker"})
    error = caught.value
    assert isinstance(error, StartupError)
    assert "ValueError: outer unique marker" in str(error)
    assert "engine core 0" in str(error)
    assert "in __init__" in str(error)
    assert "Traceback" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("outer unique marker",)
    assert isinstance(error.__cause__.__cause__, KeyError)
    start_again()


@colours_with("dp")
def test_bc01_the_cause_arrives_at_every_client(colour: str) -> None:
    """Whichever client it is, the RuntimeError has marker, type and traceback of an exception, which is its cause."""
    with took_at_most(2.0), pytest.raises(StartupError, match="ValueError: outer unique marker") as caught:
        client_of(colour, FailingInit, {"marker": "unique marker"})
    assert "engine core" in str(caught.value)
    assert "in __init__" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    assert not descendants()
    client_of(colour).shutdown()


def test_bc01_in_process_the_exception_itself_arrives() -> None:
    """Without a process in between the constructor raises the executor's own exception, with its cause."""
    with pytest.raises(ValueError, match="outer unique marker") as caught:
        client_of("inproc", FailingInit, {"marker": "unique marker"})
    assert isinstance(caught.value.__cause__, KeyError)
    client_of("inproc").shutdown()


ENDS = {
    "exit0": "exit code 0",
    "exit3": "exit code 3",
    "sigkill": "SIGKILL(-9)",
    "sigsegv": "SIGSEGV(-11)",
    "system_exit": "SystemExit",
}


@methods()
@pytest.mark.parametrize("how", ENDS)
def test_bc01_an_engine_that_ends_before_ready(how: Any, method: str) -> None:
    """The error names the engine and its exit status or signal, and comes within 2 s; status 0 is a failure, too."""
    with took_at_most(2.0), pytest.raises(RuntimeError) as caught:
        scripted_client(Script(start_death=how), start_method=method)
    assert "engine core 0" in str(caught.value)
    assert ENDS[how] in str(caught.value)
    assert "building the engine" in str(caught.value)
    if how == "sigkill":
        assert "memory" in str(caught.value)
    if how == "sigsegv":
        assert "in die" in str(caught.value)
    start_again()


@pytest.mark.parametrize("how", ENDS)
@colours_with()
def test_bc01_an_engine_of_every_client_that_ends_before_ready(colour: str, how: Any) -> None:
    """Whichever client it is, the error names the engine and its end, within 2 s, and the next client works."""
    with took_at_most(2.0), pytest.raises(RuntimeError, match=r"engine core [01]") as caught:
        scripted_client(Script(start_death=how), colour=colour)
    assert ENDS[how] in str(caught.value)
    assert not descendants()
    with scripted_client(colour=colour) as client:
        client.check_health()


def test_bc01_a_python_that_cannot_start() -> None:
    """An interpreter that fails before its first line is named with its exit status, in the first phase."""
    result = run_script(
        """
        import os, pytest
        from engine_client import StartupError
        from helpers.clients import scripted_client
        os.environ["PYTHONHOME"] = "/nowhere"
        with pytest.raises(StartupError, match="exit code 1 while starting the process"):
            scripted_client()
        """
    )
    result.check(stderr=None) if "Fatal" not in result.stderr else None
    assert result.returncode == 0, result.stderr
    assert not result.left


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("unpicklable", "needs one and more"),
        ("local", "only in the engine"),
        ("huge", "begin"),
        ("mute", "Unspeakable"),
    ],
)
def test_bc01_an_exception_that_cannot_be_pickled(what: str, text: str) -> None:
    """Its type is named and its traceback is there as text, within 2 s, also if it is 50 MiB or has no text at all."""
    # Through the pipe, which takes many reads.
    with took_at_most(2.0), pytest.raises(StartupError, match=text) as caught:
        client_of("exec", FailsUnpicklably, {"what": what}, arena_limit=0)
    assert "Traceback" in str(caught.value)
    assert "in __init__" in str(caught.value)
    assert len(str(caught.value)) < MIB
    if what == "local":
        assert isinstance(caught.value.__cause__, RemoteCallError)
    if what == "huge":
        assert len(caught.value.__cause__.args[0]) > 50 * MIB  # type: ignore[union-attr]
    start_again()


def test_bc01_one_of_two_ranks_fails() -> None:
    """The other rank is stopped, too, and the message names the failed one only."""
    scripts = [Script(start_seconds=60), Script(start_error=ValueError("unique marker"))]
    began = time.monotonic()
    with several_engines(scripts) as (session, handshake):
        with pytest.raises(StartupError, match="engine core 1") as caught:
            handshake.run()
        assert "engine core 0" not in str(caught.value)
        assert "unique marker" in str(caught.value)
    assert time.monotonic() - began < 3.0
    assert all(not link.handle.is_alive() for link in session.links.values())
    assert not descendants()


def start_ranks(colour: str, *scripts: Script, **options: Any) -> Any:
    """Return a client whose ranks start as these scripts say."""
    config = EngineConfig(additional_config={"scripts": scripts})
    config.parallel_config.data_parallel_size = len(scripts)
    return make_coloured(
        colour, config, None, False, ClientOptions(engine_target="helpers.doomed:build_by_rank", **options)
    )


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ({"start_error": ValueError("unique marker")}, "unique marker"),
        ({"start_death": "exit0"}, "exit code 0"),
        ({"start_death": "sigkill"}, "SIGKILL"),
    ],
)
@pytest.mark.parametrize("colour", ["sync", "dp"])
def test_bc01_a_client_whose_second_rank_fails(colour: str, failure: Any, text: str) -> None:
    """The constructor raises within 2 s and names rank 1 and its end only; rank 0, ready or not, is gone by then."""
    for first in (Script(grandchildren=1), Script(grandchildren=1, start_seconds=60)):
        with took_at_most(2.0), pytest.raises(StartupError, match="engine core 1") as caught:
            start_ranks(colour, first, Script(start_seconds=0.2, **failure))
        assert text in str(caught.value)
        assert "engine core 0" not in str(caught.value)
        assert not descendants()
    with start_ranks(colour, Script(), Script()) as client:
        assert client.call_utility("echo", 1, ranks=[0, 1]) == [1, 1]


@pytest.mark.parametrize("how", ["exit3", "sigkill"])
def test_bc01_both_ranks_fail(how: Any) -> None:
    """Every rank that failed by the time of the error is named, and none that has not."""
    with several_engines([Script(start_death=how)] * 2) as (_, handshake):
        with pytest.raises(StartupError) as caught:
            handshake.run()
        assert ENDS[how] in str(caught.value)


@pytest.mark.parametrize(
    ("babble", "text"),
    [
        ("garbage", "unintelligible"),
        ("outputs", "sent OUTPUTS although it is INIT"),
        ("undecodable", "cannot be used"),
        ("version", "sent HELLO although it is INIT"),
        ("half", "exit code 0|ended inside"),
        ("silence", "closed its channel"),
    ],
)
def test_bc01_an_engine_that_speaks_in_tongues(babble: str, text: str) -> None:
    """What is not the handshake ends the start at once, with a message that says what came."""
    with took_at_most(3.0), pytest.raises(StartupError, match=text):
        client_of("exec", None, {"babble": babble}, engine_target="helpers.fakes:build_babbler")
    start_again()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("no_such_module:build", "No module named 'no_such_module'"),
        ("engine_client.testing.scripted:no_such", "no attribute 'no_such'"),
        ("engine_client.testing.scripted:TARGET", "not callable"),
    ],
)
def test_bc01_a_target_that_is_not_there(target: str, text: str) -> None:
    """A target that cannot be imported or called is named in the error."""
    with took_at_most(2.0), pytest.raises(StartupError, match=text):
        client_of("exec", engine_target=target)


def test_bc01_an_executor_class_that_is_gone_over_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that the engine cannot import is named in the error."""
    (tmp_path / "vanishing.py").write_text("class Executor:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("vanishing")
    (tmp_path / "vanishing.py").unlink()
    with pytest.raises(StartupError, match="vanishing"):
        client_of("exec", module.Executor)
    del sys.modules["vanishing"]


# -- BC-16 -------------------------------------------------------------------------------------------------------------

SITE = """
import os, time
if os.environ.get("STALL") == "before hello" and os.environ.get("HOST") != str(os.getpid()):
    time.sleep(60)
"""
STALLING = """
import time
time.sleep(60)
"""


@pytest.fixture
def stalling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that engines import from: an interpreter that stalls when told so, and a target that does."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (tmp_path / "stalling_target.py").write_text(STALLING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOST", str(os.getpid()))
    return tmp_path


STALLS: dict[str, tuple[dict[str, Any], str]] = {
    "before hello": ({}, "while starting the process"),
    "after hello": ({"engine_target": "stalling_target:build"}, "while importing and building the engine"),
    "after init": ({}, "while loading weights"),
}


@pytest.mark.usefixtures("stalling")
@pytest.mark.parametrize(
    ("stall", "method"),
    # A fork runs no start of an interpreter that could stall.
    [(stall, m) for stall in STALLS for m in METHODS if stall != "before hello" or m in ("exec", "spawn")],
)
def test_bc16_the_deadline_covers_every_phase(stall: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the engine stalls, TimeoutError comes within the limit + 1 s; phase, limit and setting are named."""
    resource_tracker.ensure_running()  # not with the environment that makes interpreters stall
    monkeypatch.setenv("STALL", stall)
    options, phase = STALLS[stall]
    script = Script(progress=(("loading weights", 1, 9),), start_seconds=60)
    with took_at_most(2.0) as elapsed, pytest.raises(TimeoutError, match=phase) as caught:
        scripted_client(script, ready_timeout=1.0, start_method=method, **options)
    assert elapsed.seconds >= 1.0
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, HandshakeTimeout)
    assert "waited 1 s" in text
    assert "VLLM_ENGINE_READY_TIMEOUT_S" in text
    assert "slow weight loading" in text
    assert "engine core 0" in text


@pytest.mark.slow
def test_bc16_a_second_rank_that_is_late() -> None:
    """One deadline is for all ranks: the error names the rank that is late and no other, and nothing is left."""
    with took_at_most(2.0), pytest.raises(HandshakeTimeout, match="engine core 1") as caught:
        start_ranks("dp", Script(), Script(start_seconds=60), ready_timeout=1.0)
    assert "engine core 0" not in str(caught.value)
    assert not descendants()


@pytest.mark.parametrize("limit", [10.0, None])
def test_bc16_a_slow_engine_starts_within_its_limit(limit: float | None) -> None:
    """An engine that takes 3 s starts with a limit of 10 s, and without one."""
    with took_at_most(6.0) as elapsed, scripted_client(Script(start_seconds=3.0), ready_timeout=limit) as client:
        assert client.call_utility("echo", 1) == 1
    assert elapsed.seconds >= 3.0


def test_bc16_the_variable_sets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """``VLLM_ENGINE_READY_TIMEOUT_S`` is the limit where the options have none; nonsense in it is refused by name."""
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.5")
    with took_at_most(1.5), pytest.raises(TimeoutError, match=r"waited 0\.5 s"):
        scripted_client(Script(start_seconds=60))
    for wrong in ("soon", "-1", "nan"):
        monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", wrong)
        with pytest.raises(ValueError, match="VLLM_ENGINE_READY_TIMEOUT_S"):
            scripted_client()
    with scripted_client(ready_timeout=30.0):
        pass


def test_bc16_a_nonsense_shutdown_variable_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grace time that cannot be read raises ValueError before anything is started, not in a finalizer."""
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"):
        scripted_client()


def test_bc16_zero_negative_and_nan() -> None:
    """Zero is missed at once; negative and NaN are refused; infinite is no limit."""
    with took_at_most(1.0), pytest.raises(TimeoutError, match="waited 0 s"):
        scripted_client(ready_timeout=0)
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="ready_timeout"):
            ClientOptions(ready_timeout=wrong)
    with pytest.raises(TypeError, match="ready_timeout"):
        ClientOptions(ready_timeout="1")  # type: ignore[arg-type]
    with scripted_client(ready_timeout=math.inf):
        pass


def test_bc16_a_death_is_told_at_once_and_not_at_the_deadline() -> None:
    """A child that dies long before the limit is reported within 2 s."""
    with took_at_most(2.0), pytest.raises(StartupError, match="exit code 3"):
        scripted_client(Script(start_death="exit3"), ready_timeout=30.0)


def test_bc16_the_wall_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that jumps by years makes no deadline expire, nor one that never comes."""
    times = iter(range(0, 10**12, 10**8))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))
    with scripted_client(Script(start_seconds=0.1), ready_timeout=20.0) as client:
        client.check_health(10)
    with took_at_most(1.5), pytest.raises(TimeoutError):
        scripted_client(Script(start_seconds=60), ready_timeout=0.5)


def test_bc16_a_host_that_is_suspended_meanwhile(tmp_path: Path) -> None:
    """A host that sleeps through its own deadline finds READY when it wakes up, and has its client."""
    source = """
        import sys
        from pathlib import Path
        from helpers.clients import scripted_client
        from engine_client.testing.scripted import Script

        script = Script(progress=(("loading weights", 1, 9),), start_seconds=0.5)
        tell = lambda *_: Path(sys.argv[1]).touch()
        with scripted_client(script, ready_timeout=1.5, on_progress=tell) as client:
            print(client.call_utility("echo", "OK"))
        """

    def suspend(process: subprocess.Popen[bytes]) -> None:
        eventually((tmp_path / "loading").exists)
        with frozen(process.pid):
            time.sleep(2.0)

    result = run_script(source, str(tmp_path / "loading"), started=suspend).check()
    assert result.stdout == "OK\n"


def test_bc16_ready_in_the_moment_of_the_deadline() -> None:
    """When READY and the deadline coincide the client is there or the timeout is, and never both or neither."""
    began = time.monotonic()
    scripted_client().shutdown()
    typical = time.monotonic() - began
    outcomes = set()
    for step in range(12):
        try:
            client = scripted_client(ready_timeout=typical * (0.4 + 0.08 * step))
        except HandshakeTimeout:
            outcomes.add("late")
        else:
            assert client.call_utility("echo", 1) == 1
            client.shutdown()
            outcomes.add("in time")
        assert not descendants()
    assert outcomes


# -- BC-19 -------------------------------------------------------------------------------------------------------------


def check_gone(path: Path) -> None:
    """Check that the processes that were noted are gone by now."""
    pids = path.read_text().split()
    assert len(pids) == 3
    for pid in pids:
        eventually(lambda pid=pid: not _is_running(pid), 0.5)


def _is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@methods()
@pytest.mark.parametrize("nature", ["", "stubborn", "stopped", "gil"])
def test_bc19_a_missed_deadline_leaves_nothing(nature: str, method: str, tmp_path: Path) -> None:
    """TimeoutError comes within timeout + 1 s, and by then engine and grandchildren are gone, whatever they resist."""
    settings = {"pids": str(tmp_path / "pids"), **({nature: True} if nature else {})}
    with took_at_most(2.5), pytest.raises(TimeoutError):
        client_of(method, Nest, settings, ready_timeout=1.5)
    check_gone(tmp_path / "pids")
    start_again()


MOMENTS = (0.0, 0.02, 0.1, 0.5, 2.0)


@pytest.mark.parametrize(
    ("after", "method"),
    [
        pytest.param(after, method, marks=[] if method == "exec" or after == 0.1 else [pytest.mark.full])
        for after in MOMENTS
        for method in METHODS
    ],
)
def test_bc19_an_interrupt_leaves_nothing(after: float, method: str, tmp_path: Path) -> None:
    """KeyboardInterrupt leaves the constructor within 2 s, and nothing is left, however early it came."""
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupt_after(after):
        client_of(method, Nest, {"pids": str(tmp_path / "pids")})
    assert time.monotonic() - began - after < 2.0
    if after >= 1.0:
        check_gone(tmp_path / "pids")
    eventually(lambda: not descendants(), 1.0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("seconds", [60.0, 0.7])
def test_bc19_a_start_whose_task_is_cancelled_leaves_nothing(seconds: float, ranks: int) -> None:
    """The task ends at once; its thread ends by the deadline, or with a client that nobody has: all is gone then."""
    config = EngineConfig(additional_config={"script": Script(grandchildren=2, start_seconds=seconds)})
    config.parallel_config.data_parallel_size = ranks
    options = ClientOptions(engine_target=TARGET, ready_timeout=1.5)

    async def main() -> None:
        make = EngineCoreClient.make_async_mp_client
        task = asyncio.ensure_future(asyncio.to_thread(make, config, None, False, options=options))  # type: ignore[arg-type]  # a scripted engine has no executor
        await asyncio.to_thread(eventually, lambda: len(descendants()) >= 3 * ranks)
        task.cancel()
        with took_at_most(0.5), pytest.raises(asyncio.CancelledError):
            await task

    began = time.monotonic()
    asyncio.run(main())  # which waits for the thread
    eventually(lambda: not descendants(), began + 1.5 + 3.0 - time.monotonic())
    start_again()


@pytest.mark.filterwarnings("ignore:start method 'fork' in a process with other threads")
def test_bc19_one_rank_fails_while_the_others_load() -> None:
    """When rank 1 fails, ranks 0 and 2, still loading, are gone with their grandchildren by the time of the error."""
    loading = Script(grandchildren=1, start_seconds=60)
    with several_engines([loading, Script(start_error=ValueError("unique")), loading]) as (_, handshake):
        time.sleep(0.3)
        with pytest.raises(StartupError, match="unique"):
            handshake.run()
    assert not descendants()


@pytest.mark.parametrize(
    "acquire",
    [
        "session.create_memory",
        "session.ArenaWriter",
        "mp.Session",
        "starter.launch_engine",
        "start.pipe_pair",
        "start.create_memory",
        "start.StatusReader",
        "start.ArenaReader",
        "start.Channel",
        "start.launch",
        "start.EngineLink",
    ],
)
def test_bc19_an_interrupt_right_after_something_was_acquired(acquire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that comes before what was just made has an owner leaves nothing of it."""
    module, _, name = acquire.partition(".")
    place = f"engine_client.clients.{module}.{name}"
    real = getattr(importlib.import_module(f"engine_client.clients.{module}"), name)
    interrupts = [signal.SIGINT]

    def acquired(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if interrupts:
            os.kill(os.getpid(), interrupts.pop())
            time.sleep(0.05)  # until it has arrived, on whichever thread
        return result

    acquired.prepare = getattr(real, "prepare", None)  # type: ignore[attr-defined]  # of StatusReader
    monkeypatch.setattr(place, acquired)
    with pytest.raises(KeyboardInterrupt):
        scripted_client()
    assert not descendants()


PACKAGE = str(Path(sys.modules["engine_client"].__file__ or "").parent)


class _InterruptAtLine:
    """Raises KeyboardInterrupt at the n-th line that is executed in the client's half."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and self.left >= 0 and not _is_with(frame):
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def _is_with(frame: Any) -> bool:
    """Tell whether this is the head of a block, where the tracer, unlike a signal, could come before its exit."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def _lines_of_a_start() -> int:
    tracer = _InterruptAtLine(10**9)
    sys.settrace(tracer)
    try:
        client = scripted_client()
    finally:
        sys.settrace(None)
    client.shutdown()
    return 10**9 - tracer.left


@pytest.mark.parametrize("part", range(3))
def test_bc19_an_interrupt_at_any_line(part: int) -> None:
    """Wherever in the constructor the interrupt comes, no process, descriptor or thread is left."""
    _interrupt_lines(range(part, 10**6, 3), 12)


@pytest.mark.full
@pytest.mark.stress
@pytest.mark.slow
def test_bc19_an_interrupt_at_every_line() -> None:
    """As above, at a hundred lines."""
    _interrupt_lines(range(10**6), 100)


def _interrupt_lines(numbers: range, count: int) -> None:
    from engine_client.testing.leaks import LeakGuard

    total = _lines_of_a_start()
    step = max(1, total // count)
    for number in numbers[:total][::step]:
        tracer = _InterruptAtLine(number)
        with LeakGuard(patience=2.0):
            sys.settrace(tracer)
            try:
                client = scripted_client()
            except KeyboardInterrupt:
                client = None
            finally:
                sys.settrace(None)
            if client is not None:  # the interrupt came to the tracer's own line
                client.shutdown()
            del tracer, client
