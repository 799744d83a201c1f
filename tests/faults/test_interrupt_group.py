"""A signal goes to the host's whole process group: the engine outlives an interrupt, and ends with its host (BC-14)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_client.testing.inventory import ProcessKey, key_of
from helpers.procs import ScriptResult, run_script
from helpers.scenes import METHODS, methods, told
from helpers.timing import DEADLOCK, eventually

pytestmark = pytest.mark.crash

ORPHAN_BOUND = 2.0

HOST = """
import os, sys, time
from engine_client.testing.scripted import Script
from helpers.clients import collect, make_request, pid_of, scripted_client
from helpers.drivers import tell
method, doing, directory = sys.argv[1:]
client = scripted_client(Script(grandchildren=1, step_seconds=0.01), start_method=method)
pid = pid_of(client)
grandchildren = client.call_utility("info")["grandchildren"]
interrupts = 0
def signalled(number):
    # Have the test send a signal to the group once this is being waited in.
    tell(f"{directory}/{number}", pid=os.getpid(), below=[pid, *grandchildren])
"""

INTERRUPTED = """
if doing == "request":
    client.add_request(make_request("old", 100_000, (7, 8)))
    client.get_output()
try:
    signalled(0)
    if doing == "idle":
        time.sleep(20)
    elif doing == "utility":
        client.call_utility("deferred", None, 0.5)
    while True:
        client.get_output()
except KeyboardInterrupt:
    interrupts += 1
# What else is to come would come now.
time.sleep(0.5)
client.add_request(make_request("next", 3))
outputs = collect(client, 1)
assert list(outputs) == ["next"], outputs
assert len(outputs["next"]) == 3
info = client.call_utility("info")
assert info["pid"] == pid and info["grandchildren"] == grandchildren
for below in grandchildren:
    os.kill(below, 0)
assert client.is_alive
client.shutdown()
assert interrupts == 1
print("clean")
"""


def signal_group(signum: signal.Signals, directory: Path, after: float = 0.2) -> Callable[[Any], None]:
    """Return what sends a signal to the script's process group when it says so, and ``after`` seconds later."""

    def watch(process: subprocess.Popen[bytes]) -> None:
        eventually(lambda: (directory / "0").exists() or process.poll() is not None, DEADLOCK)
        if process.poll() is not None:
            return  # how and why is about to be checked
        time.sleep(after)
        assert os.getpgid(process.pid) == process.pid
        os.killpg(process.pid, signum)

    return watch


def pairs(name: str, values: Sequence[Any], always: set[tuple[str, Any]]) -> pytest.MarkDecorator:
    """Parametrise over all start methods and ``name``; pairs that are not named are for the full matrix."""
    return pytest.mark.parametrize(
        ("method", name),
        [
            pytest.param(method, value, marks=() if (method, value) in always else pytest.mark.full)
            for method in METHODS
            for value in values
        ],
    )


@pairs(
    "doing",
    ["idle", "request", "utility"],
    {("exec", "idle"), ("exec", "request"), ("exec", "utility"), ("spawn", "request"), ("fork", "idle")},
)
def test_bc14_an_interrupt_of_the_group_leaves_the_engine(doing: str, method: str, tmp_path: Path) -> None:
    """One KeyboardInterrupt in the host; engine and grandchild live, none prints, and the next call is clean."""
    result = run_script(HOST + INTERRUPTED, method, doing, str(tmp_path), started=signal_group(signal.SIGINT, tmp_path))
    assert result.check().stdout == "clean\n"


def check_silent(result: ScriptResult, method: str) -> None:
    """Check that a script ended well and nothing was printed on stderr.

    The exception is multiprocessing's fork server, which cannot be kept from being interrupted while it starts.
    """
    result.check(stderr=result.stderr if method == "forkserver" else "")
    assert "engine_client" not in result.stderr


@pairs(
    "at",
    ["process", "engine"],
    {("exec", "process"), ("exec", "engine"), ("spawn", "process"), ("fork", "engine"), ("forkserver", "engine")},
)
def test_bc14_an_interrupt_of_the_group_ends_the_start(at: str, method: str, tmp_path: Path) -> None:
    """KeyboardInterrupt leaves the constructor within 2 s, the child is stopped, silently; the next one starts."""
    result = run_script(
        """
        import sys, threading, time
        from engine_client.testing.scripted import Script
        from engine_client.testing.inventory import Inventory
        from helpers.clients import collect, make_request, scripted_client
        from helpers.drivers import tell
        method, at, directory = sys.argv[1:]
        began = []
        def now(*_):
            began.append(time.monotonic())
            tell(f"{directory}/0")
        script = Script(grandchildren=1, start_seconds=20, progress=(("loading", 0, 1),))
        if at == "process":
            now()
        interrupts = 0
        try:
            scripted_client(script, start_method=method, on_progress=now if at == "engine" else None)
        except KeyboardInterrupt:
            interrupts += 1
        assert interrupts == 1
        assert time.monotonic() - began[0] < 2.0
        left = Inventory.take().processes
        assert not left, left
        with scripted_client(start_method=method) as client:
            client.add_request(make_request("a", 3))
            assert len(collect(client, 1)["a"]) == 3
        """,
        method,
        at,
        str(tmp_path),
        started=signal_group(signal.SIGINT, tmp_path, 0.05 if at == "process" else 0.3),
    )
    check_silent(result, method)


@pairs(
    "after",
    [0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12],
    {("exec", 0.0), ("exec", 0.02), ("exec", 0.04), ("exec", 0.08), ("spawn", 0.06), ("fork", 0.01)},
)
def test_bc14_an_interrupt_at_any_moment_of_the_start(method: str, after: float, tmp_path: Path) -> None:
    """Whenever in the start the group is interrupted, the host has one KeyboardInterrupt and no child prints a word."""
    result = run_script(
        """
        import sys, time
        from helpers.clients import collect, make_request, scripted_client
        from helpers.drivers import tell
        method, directory = sys.argv[1:]
        interrupts = 0
        try:
            tell(f"{directory}/0")
            client = scripted_client(start_method=method)
            time.sleep(10)
        except KeyboardInterrupt:
            interrupts += 1
        time.sleep(0.3)
        print(interrupts)
        """,
        method,
        str(tmp_path),
        started=signal_group(signal.SIGINT, tmp_path, after),
    )
    check_silent(result, method)
    assert result.stdout == "1\n"


ENDED = """
if doing == "request":
    client.add_request(make_request("old", 100_000))
    client.get_output()
signalled(0)
if doing == "idle":
    time.sleep(600)
client.get_output()
while True:
    client.get_output()
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP])
@pytest.mark.parametrize(
    ("method", "doing"),
    [
        ("exec", "request"),
        pytest.param("exec", "idle", marks=pytest.mark.full),
        pytest.param("spawn", "request", marks=pytest.mark.full),
        pytest.param("forkserver", "request", marks=pytest.mark.full),
        pytest.param("fork", "request", marks=pytest.mark.full),
    ],
)
def test_bc14_what_ends_the_host_ends_the_engine(
    signum: signal.Signals, method: str, doing: str, tmp_path: Path
) -> None:
    """SIGTERM, SIGHUP and Ctrl-backslash to the group stop all of it within 2 s, and nothing is printed."""
    ended: list[float] = []
    keys: list[ProcessKey | None] = []

    def watch(process: subprocess.Popen[bytes]) -> None:
        facts = told(tmp_path / "0", process=process)
        keys.extend(key_of(pid) for pid in facts["below"])
        time.sleep(0.1)
        os.killpg(process.pid, signum)
        began = time.monotonic()
        process.wait(DEADLOCK)
        eventually(lambda: not any(map(_runs, keys)), ORPHAN_BOUND)
        ended.append(time.monotonic() - began)

    result = run_script(HOST + ENDED, method, doing, str(tmp_path), started=watch)
    result.check(-signum)
    assert len(keys) == 2
    assert None not in keys
    assert ended[0] < ORPHAN_BOUND


def _runs(key: ProcessKey | None) -> bool:
    """Tell whether a process runs; not as a zombie, which a container's first process takes its time to reap."""
    try:
        state = Path(f"/proc/{key.pid if key else 0}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return key is not None and key_of(key.pid) == key and state not in "ZX"


def test_bc14_a_host_that_handles_sigterm_shuts_down_in_order(tmp_path: Path) -> None:
    """Where the host turns SIGTERM into an exit, the engine is asked to end, which takes no longer than the bound."""
    result = run_script(
        HOST.replace("import os", "import os, signal", 1)
        + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
client.add_request(make_request("old", 100_000))
signalled(0)
while True:
    client.get_output()
""",
        "exec",
        "request",
        str(tmp_path),
        started=signal_group(signal.SIGTERM, tmp_path),
    )
    result.check(5)
    assert result.elapsed < 6.0


def test_bc14_an_engine_that_installs_a_handler_of_its_own(tmp_path: Path) -> None:
    """An executor's own SIGINT handler is not called by an interrupt of the host's group."""
    result = run_script(
        HOST
        + """
from helpers.drivers import handle_sigint, sigint_count
client.collective_rpc(handle_sigint)
count = client.collective_rpc(sigint_count)
assert count == [0]
"""
        + INTERRUPTED.replace(
            "client.shutdown()", "assert client.collective_rpc(sigint_count) == [0]\nclient.shutdown()"
        ),
        "exec",
        "request",
        str(tmp_path),
        started=signal_group(signal.SIGINT, tmp_path),
    )
    assert result.check().stdout == "clean\n"


@methods()
def test_bc14_a_host_under_nohup(method: str, tmp_path: Path) -> None:
    """With SIGINT and SIGHUP ignored, both go by unnoticed: the request goes on; shutdown and the host's death work."""

    def watch(process: subprocess.Popen[bytes]) -> None:
        told(tmp_path / "0", process=process)
        for signum in (signal.SIGINT, signal.SIGHUP):
            os.killpg(process.pid, signum)
        (tmp_path / "sent").touch()

    result = run_script(
        HOST
        + """
import signal
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
client.add_request(make_request("old", 50))
client.get_output()
signalled(0)
while not os.path.exists(f"{directory}/sent"):
    time.sleep(0.01)
assert sum(len(output.new_token_ids) for output in collect(client, 1)["old"]) == 49
assert client.call_utility("info")["pid"] == pid
began = time.monotonic()
client.shutdown()
assert time.monotonic() - began < 1.0
client = scripted_client(start_method=method)
os.kill(os.getpid(), signal.SIGKILL)
""",
        method,
        "request",
        str(tmp_path),
        started=watch,
        preexec_fn=_ignore,
        patience=ORPHAN_BOUND,
    )
    result.check(-signal.SIGKILL)


def _ignore() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
