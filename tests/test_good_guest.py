"""The library leaves its host alone: importing it and building clients changes nothing that belongs to the host."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from helpers.procs import run_script, script_environment
from helpers.timing import SCALE

HOST_STATE = """
import asyncio, atexit, copyreg, faulthandler, gc, locale, logging, multiprocessing, os, random, resource, signal
import socket, sys, threading, time, warnings

def host_state():
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # asyncio's policies are deprecated in 3.14
        policy = asyncio.get_event_loop_policy()
    mask = os.umask(0o22)
    os.umask(mask)
    loggers = {
        name: (logger.level, list(logger.handlers), logger.propagate, logger.disabled)
        for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]
        if isinstance(logger, logging.Logger)
    }
    return {
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "resource tracker": tracker and tracker._resource_tracker._fd,
        "loop policy": policy,
        "loggers": {name: facts for name, facts in loggers.items() if facts != (0, [], True, False)},
        "logger class": logging.getLoggerClass(),
        "logging disabled": logging.root.manager.disable,
        "copyreg": dict(copyreg.dispatch_table),
        "environment": dict(os.environ),
        "module path": list(sys.path),
        "meta path": list(sys.meta_path),
        "path hooks": list(sys.path_hooks),
        "arguments": list(sys.argv),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook, sys.breakpointhook),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "faulthandler": faulthandler.is_enabled(),
        "collector": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()),
        "working directory": os.getcwd(),
        "umask": mask,
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "locale": locale.setlocale(locale.LC_ALL),
        "random state": random.getstate(),
        "socket timeout": socket.getdefaulttimeout(),
        "warning filters": list(warnings.filters),
        "children": sorted(os.listdir(f"/proc/self/task/{os.getpid()}")) and multiprocessing.active_children(),
        "threads": threading.enumerate(),
    }

def compare(before, when):
    after = host_state()
    for name in before:
        assert after[name] == before[name], f"{name} changed {when}: {before[name]!r} -> {after[name]!r}"

before = host_state()
"""

CLIENT = """
from engine_client import ClientOptions, EngineConfig, InprocClient, SyncMPClient
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import TARGET
compare(before, "by the import")

client = InprocClient(EngineConfig(), EchoExecutor, False)
compare(before, "by an in-process client")
client.shutdown()

client = SyncMPClient(EngineConfig(), None, False, options=ClientOptions(engine_target=TARGET))
during = host_state()
ours = set(during.pop("threads")) - set(before["threads"])
assert len(ours) <= 1, ours  # the reader
for name in during:
    assert during[name] == before[name], f"{name} changed by a client: {before[name]!r} -> {during[name]!r}"
assert client.call_utility("echo", 1) == 1
client.shutdown()
compare(before, "by a client that was shut down")
"""


def test_host_is_left_as_it_was():
    """Import, construction, use and shutdown change no handler, hook, policy, table, variable or limit of the host."""
    run_script(HOST_STATE + CLIENT).check()


def test_handlers_of_the_host_stay():
    """What the host has set up itself stays in force, too."""
    own = """
import logging, signal, sys, threading
for name in ("INT", "TERM", "CHLD", "USR1", "USR2", "PIPE", "IO", "HUP"):
    signal.signal(getattr(signal, f"SIG{name}"), lambda *_: None)
logging.basicConfig(level=logging.ERROR)
sys.excepthook = lambda *_: None
threading.excepthook = lambda *_: None
import multiprocessing
multiprocessing.set_start_method("spawn")
"""
    run_script(own + HOST_STATE + CLIENT).check()


LAZY = {
    *("asyncio", "cloudpickle", "ctypes", "logging", "multiprocessing"),
    *("numpy", "psutil", "subprocess", "tblib", "threading", "torch"),
}


def test_import_is_lazy():
    """``import engine_client`` loads nothing heavy, and no more than itself of the package."""
    result = run_script(
        "import sys; before = set(sys.modules); import engine_client; print(*sorted(set(sys.modules) - before))",
        flags=(),
    ).check()
    loaded = set(result.stdout.split())
    assert not {name.partition(".")[0] for name in loaded} & LAZY
    assert {name for name in loaded if name.startswith("engine_client")} == {"engine_client"}


@pytest.mark.parametrize("name", ["EngineConfig", "SyncMPClient", "InprocClient", "EngineCoreRequest", "Executor"])
def test_names_load_no_asyncio(name):
    """Using any part of the synchronous product loads neither asyncio nor multiprocessing nor an optional package."""
    result = run_script(f"import sys, engine_client; engine_client.{name}; print(*sys.modules)", flags=("-S",)).check()
    optional = {"asyncio", "multiprocessing", "numpy", "torch", "cloudpickle", "tqdm"}
    assert not optional & set(result.stdout.split())


def best_of(runs: int, *sources: str) -> list[tuple[float, float]]:
    """Run scripts in turn; return of each the least (wall, CPU) seconds."""
    best = [(float("inf"), float("inf"))] * len(sources)
    environment = script_environment(COVERAGE_PROCESS_CONFIG=None)
    for _ in range(runs):
        for index, source in enumerate(sources):
            began = time.perf_counter()
            process = subprocess.Popen([sys.executable, "-c", source], env=environment, cwd="/")
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            best[index] = min(best[index][0], wall), min(best[index][1], usage.ru_utime + usage.ru_stime)
    return best


@pytest.mark.timing
def test_import_time(record_property):
    """``import engine_client`` costs less than 50 ms of CPU over bare Python, and not much more by the clock."""
    (bare, bare_cpu), (wall, cpu) = best_of(7, "pass", "import engine_client")
    record_property("import_ms", round(1000 * (wall - bare), 2))
    print(
        f"\nimport engine_client: {1000 * (wall - bare):.1f} ms over bare Python, CPU {1000 * (cpu - bare_cpu):.1f} ms"
    )
    assert cpu - bare_cpu < 0.050 * SCALE
    assert wall - bare < 0.250 * SCALE
