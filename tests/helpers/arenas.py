"""An arena with its readers, in this process and in others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from engine_client.ipc.arena import ArenaReader, ArenaWriter
from engine_client.ipc.arena_memory import create_memory
from engine_client.protocol.frames import Segment
from helpers.procs import script_environment

MIB = 1 << 20


class Arena:
    """A writer and its readers, all with descriptors of their own."""

    def __init__(self, limit: int = 64 * MIB, parties: int = 1) -> None:
        self.fd = create_memory("test")
        self.writer = ArenaWriter(os.dup(self.fd), limit=limit, parties=parties)
        self.readers = [ArenaReader(os.dup(self.fd), party=party) for party in range(parties)]
        self.reader = self.readers[0]

    def exchange(self, data: bytes | memoryview, party: int = 0) -> memoryview:
        """Send bytes and return what the reader got."""
        segment = self.writer.put(memoryview(data), party)
        assert segment is not None
        return self.readers[party].lease(segment)

    def descriptors(self) -> int:
        """Return how many descriptors of this process show the arena's memory: mappings and owners."""
        ours = os.fstat(self.fd)
        return sum(os.path.samestat(ours, status) for status in _all_descriptors())

    def mapped(self) -> bool:
        """Tell whether any part of the arena is mapped in this process."""
        with open("/proc/self/maps") as file:
            return any(line.split()[4] == str(os.fstat(self.fd).st_ino) and "memfd" in line for line in file)

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        os.close(self.fd)


def _all_descriptors() -> Iterator[os.stat_result]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            yield os.fstat(int(name))


@contextmanager
def arena(limit: int = 64 * MIB, parties: int = 1) -> Iterator[Arena]:
    made = Arena(limit, parties)
    try:
        yield made
    finally:
        made.close()


class ReaderProcess:
    """A reader in a process of its own, started by exec with the descriptor handed down."""

    def __init__(self, fd: int, party: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "helpers.arenas", str(fd), str(party)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(fd,),
            env=script_environment(),
        )

    def ask(self, order: str, *arguments: Any) -> Any:
        """Return the answer; its error is an ``AssertionError`` here."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([order, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the reader died: {self._process.stderr.read()!r}"  # type: ignore[union-attr]  # it is a pipe
        answer, error = json.loads(line)
        assert error is None, error
        return answer

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def finish(self) -> None:
        """Let it end by itself, and check that it does so in order and in silence."""
        _, errors = self._process.communicate()
        assert (self._process.returncode, errors) == (0, b"")

    def abandon(self) -> None:
        if self._process.poll() is None:
            self.kill()


def crc(data: Any) -> int:
    return zlib.crc32(data)


class _Peer:
    """What a ``ReaderProcess`` can be asked to do."""

    def __init__(self, fd: int, party: int) -> None:
        self.reader = ArenaReader(fd, party=party)
        self.views: dict[str, memoryview] = {}

    def lease(self, name: str, *segment: int) -> int:
        self.views[name] = self.reader.lease(Segment(*segment))
        return crc(self.views[name])

    def check(self, name: str) -> int:
        return crc(self.views[name])

    def fill(self, name: str, byte: int) -> None:
        self.views[name][:] = bytes([byte]) * len(self.views[name])

    def drop(self, name: str) -> None:
        del self.views[name]

    def drop_in_fork(self, name: str) -> None:
        """Drop a view in a forked copy of this process only."""
        pid = os.fork()
        if pid == 0:
            del self.views[name]
            os._exit(0)
        os.waitpid(pid, 0)

    def discard(self, *segment: int) -> None:
        self.reader.discard(Segment(*segment))

    def close(self) -> None:
        self.reader.close()


def _run_peer(fd: int, party: int) -> None:
    peer = _Peer(fd, party)
    for line in sys.stdin:
        order, *arguments = json.loads(line)
        try:
            answer = getattr(peer, order)(*arguments), None
        except Exception as error:  # noqa: BLE001  # the asking side raises it
            answer = None, f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _run_peer(int(sys.argv[1]), int(sys.argv[2]))
