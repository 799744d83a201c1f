"""Nothing is left of payloads: no name, no file, no noise, however a run ends (BC-08, BC-46)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine_client import EngineDeadError
from engine_client.testing.inventory import (
    NAME_PREFIXES,
    ProcessKey,
    describe_process,
    is_running,
    key_of,
    marked_processes,
)
from helpers.clients import scripted_client
from helpers.payloads import MIB
from helpers.procs import run_script, script_environment
from helpers.sandbox import can_unshare
from helpers.scenes import told
from helpers.timing import eventually

pytestmark = pytest.mark.crash

RUN = """
import os, signal, sys
import numpy as np
from helpers.clients import pid_of, scripted_client
from helpers.payloads import MIB, pattern, pool_request, refuse_poison
from engine_client import EngineDeadError, FinishReason

def run(end, count, method):
    client = scripted_client(start_method=method)
    client.call_utility("set_echo_tensor", True)
    client.collective_rpc(refuse_poison)
    sent, lost, kept = {}, set(), []
    dice = np.random.default_rng(1)
    for number in range(count):
        kind = dice.random()
        name = f"{number}{'bad' if kind < 0.05 else ''}"
        payload = [pattern(number, size) for size in (1, 4096, 4 * MIB)]
        client.add_request(pool_request(name, payload))
        sent[name] = [int(part[-1]) for part in payload]
        if 0.05 < kind < 0.15:
            client.abort_requests([name])
            del sent[name]
        if end == "sigkill" and number == count // 2:
            os.kill(pid_of(client), signal.SIGKILL)
            try:
                while True:
                    client.get_output()
            except EngineDeadError:
                break
        while len(sent) > 8 or (sent and number == count - 1):
            for output in client.get_output(timeout=30).outputs:
                last = sent.pop(output.request_id)
                if output.request_id.endswith("bad"):
                    assert output.finish_reason is FinishReason.ERROR
                else:
                    assert [int(part[-1]) for part in output.pooling_output] == last
                    kept = output.pooling_output  # the last one is held to the end
    print("ran", flush=True)
    if end in ("shutdown", "sigkill"):
        client.shutdown()
    elif end == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    elif end == "interrupt":
        try:
            os.kill(os.getpid(), signal.SIGINT)
            client.get_output()
        except KeyboardInterrupt:
            sys.exit(130)
    globals()["left_open"] = client, kept

if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), sys.argv[3])
"""

ENDS = {"shutdown": 0, "fall": 0, "sigterm": -signal.SIGTERM, "interrupt": 130, "sigkill": 0}


def _cases() -> list[Any]:
    cases: list[Any] = [(end, "exec", 40) for end in ENDS]
    cases.append(("fall", "spawn", 40))
    cases += [
        pytest.param(end, method, 40, marks=pytest.mark.full)
        for end, methods in (
            ("shutdown", ["spawn"]),
            ("fall", ["forkserver", "fork"]),
            ("sigterm", ["spawn", "fork"]),
            ("interrupt", ["forkserver"]),
            ("sigkill", ["spawn", "forkserver", "fork"]),
        )
        for method in methods
    ]
    cases.append(pytest.param("fall", "exec", 500, marks=[pytest.mark.full, pytest.mark.slow]))
    many = [pytest.mark.full, pytest.mark.slow, pytest.mark.stress]
    cases += [pytest.param(end, "exec", 500, marks=many) for end in ENDS if end != "fall"]
    return cases


@pytest.mark.parametrize(("end", "method", "count"), _cases())
def test_bc08_a_run_with_tensors_ends_without_a_word(end: str, method: str, count: int, tmp_path: Path) -> None:
    """Requests with tensors of three sizes, some aborted or refused: no end of it prints or leaves anything."""
    result = run_script(RUN, end, str(count), method, env={"TMPDIR": str(tmp_path)}, patience=2.0)
    result.check(ENDS[end], stderr=None if end == "sigkill" else "")
    assert result.stdout == "ran\n"
    if end == "sigkill":  # the log, on stderr for want of a handler, tells the death once
        first, *others = result.stderr.splitlines()
        assert first.endswith("died: SIGKILL(-9)")
        assert not [line for line in others if "KeyError" in line or "track" in line], others
    assert our_names() == set()
    assert os.listdir(tmp_path) == []


def our_names() -> set[str]:
    """Return the names of ours in /dev/shm; there is to be none, at any time."""
    try:
        names = {name for name in os.listdir("/dev/shm") if name.startswith(NAME_PREFIXES)}
        return {name for name in names if ".test_bc46" not in name}  # a test's that may run meanwhile
    except OSError:  # there is no /dev/shm
        return set()


def test_bc08_no_tracker_and_no_name_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a run with payloads there is no file in the temporary directory or /dev/shm, and no tracker process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with scripted_client() as client:
        block = client.allocate(MIB)
        assert client.call_utility("echo", block) is not None
        assert os.listdir(tmp_path) == []
        assert our_names() == set()
        for files in (_named_files(None), *client.collective_rpc(_named_files)):
            assert not [name for name in files if name.startswith((str(tmp_path), "/dev/shm"))], files
        block = None
    assert os.listdir(tmp_path) == []


def _named_files(core: object) -> list[str]:
    """Return the files that this process has open or mapped and that still have a name."""
    del core
    links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    found = {*map(os.readlink, links), *(row[5] for row in rows if len(row) == 6)}
    return sorted(name for name in found if name.startswith("/") and not name.endswith("(deleted)"))


# -- BC-46 -------------------------------------------------------------------------------------------------------------

STREAM = """
import os, sys
from helpers import sandbox
from helpers.clients import pid_of, scripted_client
if sys.argv[2] == "file":
    sandbox.forget_memfd()
payload = bytes(4 << 20)
with scripted_client() as client:
    client.call_utility("echo", payload)
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(str(pid_of(client)))
    os.rename(sys.argv[1] + ".part", sys.argv[1])
    while True:
        client.call_utility("echo", payload)
"""


MANY = pytest.param(
    int(os.environ.get("ENGINE_CLIENT_TEST_REPEATS", "100")),
    marks=[pytest.mark.full, pytest.mark.slow, pytest.mark.stress, pytest.mark.timeout(1800)],
)


@pytest.mark.parametrize("memory", ["memfd", "file"])
@pytest.mark.parametrize("count", [3, MANY])
def test_bc46_both_sides_are_killed_at_once(count: int, memory: str, tmp_path: Path) -> None:
    """Client and engine killed together at random moments of a stream leave no name, no file and no process."""
    dice = random.Random(count)
    mark = f"stream-{os.getpid()}-{time.monotonic_ns()}"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = script_environment(TMPDIR=str(temporary), MARK=mark)
    for number in range(count):
        facts = tmp_path / f"facts{number}"
        process = subprocess.Popen([sys.executable, "-c", STREAM, str(facts), memory], env=environment)
        engine = key_of(told(facts))
        time.sleep(dice.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        if engine is not None and key_of(engine.pid) == engine:
            os.kill(engine.pid, signal.SIGKILL)
            eventually(lambda engine=engine: _has_ended(engine), 2.0)  # type: ignore[misc]  # a default binds it
        process.wait()
    eventually(lambda: not marked_processes(mark), 2.0)
    assert os.listdir(temporary) == []
    assert our_names() == set()


def _has_ended(key: ProcessKey) -> bool:
    """Tell whether an orphan holds nothing any more; when it is buried is up to the machine's init."""
    return not is_running(key) or "state Z" in describe_process(key)


OTHERS = """
import os, sys
from pathlib import Path
from helpers import sandbox
from helpers.clients import scripted_client
from helpers.payloads import MIB, pattern
if sys.argv[1] == "file":
    sandbox.forget_memfd()
names = []
for directory in ("/dev/shm", os.environ["TMPDIR"]):
    for name in ("engine-requests", "engine-status-0", "engine-faults-0", "engine-results-0"):
        for suffix in ("", *(f"-{pid}" for pid in range(os.getpid(), os.getpid() + 5))):
            path = f"{directory}/engine-client-{name}{suffix}{sys.argv[2]}"
            with open(path, "x") as file:
                file.write("somebody else's")
            names.append(path)
try:
    with scripted_client() as client:
        payload = pattern(1, MIB)
        assert (client.call_utility("echo", payload) == payload).all()
    with scripted_client() as client:
        assert (client.call_utility("echo", payload) == payload).all()
    assert all(Path(name).read_text() == "somebody else's" for name in names)
finally:
    for name in names:
        os.remove(name)
print("done", os.listdir(os.environ["TMPDIR"]))
"""


@pytest.mark.parametrize("memory", ["memfd", "file"])
def test_bc46_names_that_are_taken_already(memory: str, tmp_path: Path) -> None:
    """Files of others with names like ours stand in nobody's way, and are not touched."""
    result = run_script(OTHERS, memory, f".{tmp_path.name}", env={"TMPDIR": str(tmp_path)})
    assert result.check().stdout == "done []\n"


TWIN = """
import os, sys, time
from helpers import sandbox
from helpers.clients import pid_of, scripted_client
from helpers.payloads import MIB
if sys.argv[3] == "file":
    sandbox.forget_memfd()
mine, other = sys.argv[1:3]
with scripted_client() as client:
    open(f"{mine}.ready", "w").close()
    while not os.path.exists(f"{other}.ready"):
        time.sleep(0.01)
    expected = bytes([len(mine)]) * MIB + mine.encode()
    for number in range(200):
        assert client.call_utility("echo", expected) == expected
    print(os.getpid(), pid_of(client), flush=True)
    open(f"{mine}.done", "w").close()
    while not os.path.exists(f"{other}.done"):
        time.sleep(0.01)
"""


@pytest.mark.parametrize("memory", ["memfd", "file"])
def test_bc46_two_containers_with_the_same_pids(memory: str, tmp_path: Path) -> None:
    """Two pid namespaces over one /dev/shm and one temporary directory never see each other's data."""
    space = ["unshare", "-m", "-p", "-f", "--mount-proc"] if can_unshare() else []  # else: two hosts side by side
    names = [str(tmp_path / "one"), str(tmp_path / "second")]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    twins = [
        subprocess.Popen(
            [*space, sys.executable, "-W", "error", "-c", TWIN, mine, other, memory],
            env=script_environment(TMPDIR=str(temporary)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for mine, other in (names, names[::-1])
    ]
    results = [twin.communicate(timeout=60) for twin in twins]
    assert [twin.returncode for twin in twins] == [0, 0], results
    assert [stderr for _, stderr in results] == ["", ""]
    if space:
        assert results[0][0] == results[1][0] != "", "the same pids on both sides"
    assert os.listdir(temporary) == []
    assert our_names() == set()


def test_bc46_a_client_starts_while_another_comes_and_goes() -> None:
    """Clients of one user that start and end beside a living one do not touch its memory."""
    with scripted_client() as living:
        block = living.allocate(MIB)
        block[:] = bytes([7]) * MIB
        kept = living.call_utility("echo", block)
        for end in ("shutdown", "die"):
            with scripted_client() as other:
                assert other.call_utility("echo", block).tobytes() == bytes(block)
                if end == "die":
                    with pytest.raises(EngineDeadError):
                        other.call_utility("die", "sigkill")
            assert living.call_utility("echo", block).tobytes() == kept.tobytes() == bytes([7]) * MIB
