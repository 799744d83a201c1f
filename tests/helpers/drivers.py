"""Host processes to be killed: what runs in them, and in their engines, until a test ends them.

Nothing here imports pytest: a host is to start quickly.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from engine_client import ClientOptions, EngineConfig, SyncMPClient
from engine_client.engine.executor import Batch, ModelOutput
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.faults import hold_gil, start_grandchild
from helpers.colours import make_coloured

__all__ = ["DOINGS", "Busy", "drive", "handle_sigint", "moments", "reap_all", "sigint_count", "tell"]

DOINGS = ("ready", "building", "building, holding the GIL", "step", "native", "holding the GIL")
"""What an engine may be doing when its client's process dies."""

MIB = 1 << 20
_AGES = 600


def tell(path: str | Path, **facts: Any) -> None:
    """Write facts to a file that is complete as soon as it is there."""
    temporary = Path(f"{path}.{os.getpid()}.part")
    temporary.write_text(json.dumps(facts))
    temporary.rename(path)


def native(seconds: int) -> None:
    """Sleep in C code that gives the interpreter to other threads and never returns to its own."""
    sleep = ctypes.CDLL(None).sleep
    while True:
        sleep(seconds)


class Busy(EchoExecutor):
    """Has grandchildren, tells the test of them, and is then busy as ``additional_config["doing"]`` says."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.settings = vllm_config.additional_config
        self.grandchildren = [start_grandchild(), start_grandchild(stubborn=False)]
        self.reach("building")
        if self.settings["doing"] == "building":
            time.sleep(_AGES)
        self.reach("building, holding the GIL")
        if self.settings["doing"] == "building, holding the GIL":
            hold_gil(_AGES)

    def reach(self, what: str) -> None:
        """Tell the test, if it waits for this."""
        if self.settings["doing"] == what:
            tell(self.settings["told"], engine=os.getpid(), grandchildren=self.grandchildren)

    def execute_model(self, batch: Batch) -> ModelOutput:
        self.reach("step")
        if self.settings["doing"] == "step":
            time.sleep(_AGES)
        return super().execute_model(batch)

    def stray(self) -> None:
        """Start a grandchild that leaves the engine's group and session."""
        self.grandchildren.append(start_grandchild(new_session=True))

    def be_busy(self) -> None:
        """Stay in C code for ever."""
        self.reach(self.settings["doing"])
        (native if self.settings["doing"] == "native" else hold_gil)(_AGES)

    def echo(self, value: Any) -> Any:
        """Return what it is given."""
        return value

    def facts(self) -> dict[str, Any]:
        """Return who is who."""
        return {"engine": os.getpid(), "grandchildren": self.grandchildren}


def client_for(method: str, doing: str, told: str, colour: str = "sync", **options: Any) -> Any:
    """Return a client whose engines do, or will do, what ``doing`` says."""
    config = EngineConfig(additional_config={"doing": doing, "told": told})
    return make_coloured(colour, config, Busy, False, ClientOptions(start_method=method, **options))  # type: ignore[arg-type]


def drive(method: str, doing: str, told: str, colour: str = "sync") -> None:
    """Be a host with a client, until this process is killed; SIGUSR1 makes it call ``os._exit``."""
    from helpers.clients import make_request

    signal.alarm(120)  # should the test itself be killed
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
    client = client_for(method, doing, told, colour)
    client.collective_rpc("stray")
    # Both arenas hold 64 MiB.
    kept = client.collective_rpc("echo", args=(memoryview(bytearray(64 * MIB)),))
    assert len(kept[0]) == 64 * MIB
    if doing == "ready":
        tell(told, **client.collective_rpc("facts")[0])
        time.sleep(_AGES)
    elif doing == "step":
        client.add_request(make_request("a"))
        client.get_output()
    client.collective_rpc("be_busy")


def moments(method: str, count: int) -> None:
    """Kill a host at ``count`` moments between its start and the end of its engine's; nothing may be left by it.

    This process adopts and reaps what is orphaned, so that it sees when all is gone, zombies included.
    """
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    for late in ("subprocess", "psutil", "multiprocessing.connection", "multiprocessing.util"):
        import_module(late)  # else every host would
    length = min(_life(method) for _ in range(3))
    worst = 0.0
    for index in range(count):
        pid = _fork_host(method, stay=True)
        time.sleep(length * 1.1 * index / count)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
        worst = max(worst, reap_all(2.0))
    print(f"{method}: {count} moments in {length:.3f} s, slowest end {worst:.3f} s")


def _life(method: str) -> float:
    """Return how long a host lives that starts an engine and ends it."""
    began = time.monotonic()
    assert os.waitpid(_fork_host(method), 0)[1] == 0
    length = time.monotonic() - began
    reap_all(2.0)
    return length


def _fork_host(method: str, *, stay: bool = False) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            options = ClientOptions(start_method=method)  # type: ignore[arg-type]
            config = EngineConfig(additional_config={"doing": "", "told": ""})
            client = SyncMPClient(config, Busy, False, options=options)
            if stay:
                time.sleep(_AGES)
            client.shutdown()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def reap_all(bound: float) -> float:
    """Reap until no process below this one is left; return how long that took."""
    began = time.monotonic()
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return time.monotonic() - began
        if pid == 0:
            left = time.monotonic() - began
            if left > bound:
                os.system("ps -eo pid,ppid,pgid,stat,args >&2")
            assert left <= bound, f"something is left after {bound} s"
            time.sleep(0.001)


def handle_sigint(worker: object) -> None:
    """Install a handler for SIGINT, as an executor might."""
    del worker
    signal.signal(signal.SIGINT, lambda *_: _interrupts.append(1))


def sigint_count(worker: object) -> int:
    """Return how often that handler was called."""
    del worker
    return len(_interrupts)


_interrupts: list[int] = []
