"""``engine-client doctor``: what this machine offers, what is used instead where something is missing, and why.

Every line is one finding; the last ones come from an engine that is really started.  The exit status is 0 if engines
work here, whatever they have to do without.

Threads: the main thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["DESCRIPTION", "HELP", "Finding", "add_arguments", "examine", "run"]

HELP: Final = "tell what this machine offers"
DESCRIPTION: Final = (
    "Tell what this machine offers to engines, and what is used instead where something is missing. "
    "Exit status 0: engines work here."
)
_MIB: Final = 1 << 20
_ROOMY: Final = 256 * _MIB  # the temporary file in place of a memfd goes to /dev/shm if so much is free there
_V1_UNLIMITED: Final = 1 << 62  # version 1 of the memory cgroup says "no limit" by a huge number
_DESCRIPTORS: Final = 64  # an engine needs about a dozen, its host has some too

_OPTIONAL: Final = (
    ("cloudpickle", "classes of notebook cells and lambdas reach the engine", "pip install engine_client[notebook]"),
    ("tqdm", "progress bars", "pip install engine_client[progress]"),
    ("prometheus_client", "client.metrics() and serve_metrics()", "pip install engine_client[metrics]"),
    ("matplotlib", "engine-client bench --plot", "pip install engine_client[plot]"),
    ("numpy", "arrays travel without a copy", "not needed"),
    ("torch", "CPU tensors travel without a copy", "not needed"),
    ("transformers", "TransformersExecutor, if torch is there too", "pip install engine_client[transformers]"),
    (
        "vllm",
        "engine_client.integrations.vllm, if it is the version that this knows",
        "pip install engine_client[vllm]",
    ),
)


class Finding(NamedTuple):
    """One thing found.

    Args:
        state: ``"ok"``; ``"none"``: not there, something else is used; ``"FAIL"``: engines cannot work without it.
        subject: what was looked at.
        text: what was found, and what follows from it.
    """

    state: str
    subject: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="seconds for the engine that is tried out"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the findings as they come; return 1 if engines do not work here."""
    usable = True
    for finding in examine(arguments.timeout):
        usable = usable and finding.state != "FAIL"
        print(f"{finding.state:4}  {finding.subject:18}  {finding.text}", flush=True)
    print("Engines work here." if usable else "Engines do not work here: see FAIL above.")
    return 0 if usable else 1


def examine(timeout: float) -> Iterator[Finding]:
    """Look at everything, one after the other; a look that fails is a finding too."""
    for look in (
        _python,
        _start_methods,
        _nameless_memory,
        _dev_shm,
        _process_descriptors,
        _death_signal,
        _memory,
        _limits,
        _pipes,
        _extras,
    ):
        yield from _look(look)
    yield from _engine(timeout)


def _look(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except OSError as error:  # a sandbox that forbids the call: an engine falls back there as well, or fails below
        yield Finding("none", look.__name__.strip("_").replace("_", " "), f"cannot be looked at: {error}")


def _python() -> Iterator[Finding]:
    system = os.uname()
    number = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        "ok", "python", f"{sys.implementation.name} {number} on {system.sysname} {system.release} {system.machine}"
    )


def _start_methods() -> Iterator[Finding]:
    from multiprocessing import get_all_start_methods  # noqa: PLC0415  # not for other commands

    others = ", ".join(get_all_start_methods())
    if sys.executable and os.access(sys.executable, os.X_OK):
        yield Finding("ok", "start method", f"exec: {sys.executable}, needs no __main__ guard; can be chosen: {others}")
    else:
        text = f"exec is not possible: sys.executable is {sys.executable!r}; choose one of {others} by start_method"
        yield Finding("FAIL", "start method", text)


def _nameless_memory() -> Iterator[Finding]:
    import fcntl  # noqa: PLC0415  # not for other commands

    try:
        fd = os.memfd_create("engine-client-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        yield _file_in_place_of_memory(error)
        return
    with closing(os.fdopen(fd, "r+b")):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield Finding("ok", "shared memory", "memfd_create: without a name, sealed against shrinking")


def _file_in_place_of_memory(error: Exception) -> Finding:
    import tempfile  # noqa: PLC0415  # not for other commands

    directory = "/dev/shm" if _free("/dev/shm") >= _ROOMY else tempfile.gettempdir()  # noqa: S108  # only named here
    text = f"no memfd_create ({error}): an unlinked temporary file in {directory} is used instead"
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as failure:
        return Finding("FAIL", "shared memory", f"{text}, and that fails: {failure}")
    return Finding("none", "shared memory", text)


def _free(directory: str) -> int:
    if not os.access(directory, os.W_OK | os.X_OK):
        return 0
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _dev_shm() -> Iterator[Finding]:
    directory = "/dev/shm"  # noqa: S108  # only looked at
    if os.path.isdir(directory):
        yield Finding("ok", directory, f"{_free(directory) / _MIB:.0f} MiB free; nothing of an engine has a name there")
    else:
        yield Finding("none", directory, "not there, and not needed")


def _process_descriptors() -> Iterator[Finding]:
    try:
        fd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:
        text = f"no pidfd_open ({error}): a pipe that only the engine holds tells its end instead"
        yield Finding("none", "pidfd", text)
        return
    os.close(fd)
    yield Finding("ok", "pidfd", "the end of engine and launcher is seen at once")


def _death_signal() -> Iterator[Finding]:
    import fcntl  # noqa: PLC0415  # not for other commands
    import signal  # noqa: PLC0415  # as above

    reader, writer = os.pipe()
    with closing(os.fdopen(reader, "rb")), closing(os.fdopen(writer, "wb")):
        try:
            fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
        except (AttributeError, OSError) as error:
            text = f"no F_SETSIG ({error}): a thread of the engine looks, which it cannot while C code holds the GIL"
            yield Finding("none", "launcher's death", text)
            return
    yield Finding("ok", "launcher's death", "F_SETSIG: the kernel ends the engine, also while C code holds the GIL")


def _memory() -> Iterator[Finding]:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield Finding("ok", "memory", f"{int(line.split()[1]) // 1024} MiB available")
    limits = list(memory_limits())
    if not limits:
        yield Finding("ok", "memory limit", "none (no control group limits it)")
    for limit, usage, directory in limits:
        room = (limit - usage) / _MIB
        text = f"{limit / _MIB:.0f} MiB, {room:.0f} MiB left ({directory}); beyond it payloads go through the pipe"
        yield Finding("ok", "memory limit", text)


def memory_limits(root: str = "/") -> Iterator[tuple[int, int, str]]:
    """Yield the limit, use and directory of each control group (version 1 or 2) that limits this process's memory."""
    top = Path(root, "sys/fs/cgroup")
    for line in _read(Path(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, limit_name, usage_name = top / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            mount, limit_name, usage_name = top, "memory.max", "memory.current"
        else:
            continue
        group = mount / path.strip("/")
        # In a container the path may be the host's and not exist; the mount is then our own group.
        for directory in (group, *group.parents):
            limit, usage = (_read(directory / name).strip() for name in (limit_name, usage_name))
            if limit.isdigit() and usage.isdigit() and int(limit) < _V1_UNLIMITED:
                yield int(limit), int(usage), str(directory)
            if directory == mount:
                break


def _read(path: str | Path) -> str:
    with suppress(OSError):  # a file that this system does not have says nothing
        return Path(path).read_text(encoding="ascii", errors="replace")
    return ""


def _limits() -> Iterator[Finding]:
    import resource  # noqa: PLC0415  # not for other commands

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _DESCRIPTORS
    yield Finding(
        "FAIL" if few else "ok", "descriptors", f"{_limit(soft)} per process" + (" (ulimit -n)" if few else "")
    )
    for name, number, meaning in (
        ("file size", resource.RLIMIT_FSIZE, "payloads beyond it go through the pipe (ulimit -f)"),
        ("address space", resource.RLIMIT_AS, "payloads beyond it go through the pipe (ulimit -v)"),
    ):
        soft, _ = resource.getrlimit(number)
        if soft != resource.RLIM_INFINITY:
            yield Finding("ok", name, f"{_limit(soft)} bytes: {meaning}")


def _limit(number: int) -> str:
    return "unlimited" if number < 0 else str(number)


def _pipes() -> Iterator[Finding]:
    import socket  # noqa: PLC0415  # not for other commands

    ours, theirs = socket.socketpair()
    with ours, theirs:
        size = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    most = _read("/proc/sys/net/core/wmem_max").strip()
    text = f"{size // 1024} KiB buffered" + (f", {int(most) // 1024} KiB possible" if most.isdigit() else "")
    yield Finding("ok", "pipe", f"{text}; larger buffers go through shared memory")


def _extras() -> Iterator[Finding]:
    from importlib.util import find_spec  # noqa: PLC0415  # not for other commands

    for module, present, absent in _OPTIONAL:
        found = find_spec(module) is not None  # torch, transformers and vllm take seconds to import
        yield Finding("ok" if found else "none", module, present if found else f"not installed ({absent})")


def _engine(timeout: float) -> Iterator[Finding]:
    """Start an engine, ask it something, end it."""
    from engine_client import ClientOptions, EngineConfig, SyncMPClient  # noqa: PLC0415  # not for other commands
    from engine_client.cli.probe import ProbeExecutor  # noqa: PLC0415  # as above

    began = time.monotonic()
    with ExitStack() as stack:
        try:
            client = SyncMPClient(EngineConfig(), ProbeExecutor, False, options=ClientOptions(ready_timeout=timeout))
            stack.callback(client.shutdown)
            ready = time.monotonic()
            client.is_sleeping()
            answered = time.monotonic()
        except Exception as error:  # noqa: BLE001  # whatever keeps engines from working here is the finding
            yield Finding("FAIL", "engine", f"{type(error).__name__}: {error}")
            return
        text = f"ready after {1e3 * (ready - began):.0f} ms, answers in {1e3 * (answered - ready):.2f} ms"
        ending = time.monotonic()
    yield Finding("ok", "engine", f"{text}, ends in {1e3 * (time.monotonic() - ending):.0f} ms")
