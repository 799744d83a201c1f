"""A plain twin on ZeroMQ and msgpack: the same calls, for those who have pyzmq and msgspec but not vLLM.

::

    client  ── PUSH ── [kind, msgpack, tensor …] ──▶ PULL  thread ─▶ queue ─▶ loop          engine process
    queue ◀─ thread  PULL ◀── [msgpack, tensor …] ── PUSH  thread ◀─ queue ◀─ stub step

It is built as the reference is (threads and queues at the same places, structs as arrays without defaults, tensors as
frames of their own without a copy), and leaves out what a benchmark does not need: no supervision, so a death is never
noticed.  Run by ``driver``.

Threads: as drawn; the client belongs to one thread or one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from typing import Any

from engine_client.bench import zmq_engine
from engine_client.bench.zmq_engine import STOP

__all__ = ["AsyncTwin", "PeerZmq", "SyncTwin", "make_side"]


class _Twin:
    """Sockets and engine process of a client."""

    def __init__(self, context: Any) -> None:
        import zmq  # noqa: PLC0415  # optional

        self._wire = zmq_engine.Wire()
        self._folder = tempfile.mkdtemp(prefix="engine-client-bench-")
        self._addresses = [f"ipc://{self._folder}/{name}" for name in ("requests", "outputs")]
        self._context = context
        self._requests, self._outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._requests.bind(self._addresses[0])
        self._outputs.bind(self._addresses[1])
        self._calls = itertools.count()
        self.process = subprocess.Popen([sys.executable, zmq_engine.__file__, *self._addresses])  # noqa: S603  # ours

    def _end(self) -> None:
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class SyncTwin(_Twin):
    """The blocking client: a thread reads, a queue holds outputs."""

    def __init__(self) -> None:
        import zmq  # noqa: PLC0415  # optional

        super().__init__(zmq.Context())
        self._queue: queue.Queue[Any] = queue.Queue()
        self._replies: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            frames = self._outputs.recv_multipart(copy=False)
            if frames[0].bytes == STOP:
                return
            outputs = self._wire.read_outputs(frames)
            if outputs.reply is None:
                self._queue.put(outputs)
            else:
                self._replies.pop(outputs.reply[0]).set_result(outputs.reply[1])

    def add_request(self, request: Any) -> None:
        """Send a request."""
        self._requests.send_multipart(self._wire.request_frames(request), copy=False)

    def get_output(self) -> Any:
        """Wait for the next outputs."""
        return self._queue.get()

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call the engine and wait for the reply."""
        call_id = next(self._calls)
        reply = self._replies[call_id] = Future()
        self._requests.send_multipart((b"U", self._wire.encode([call_id, method, args])), copy=False)
        return reply.result()

    def shutdown(self) -> None:
        """End the engine and the reader."""
        import zmq  # noqa: PLC0415  # optional

        with self._context.socket(zmq.PUSH) as socket:
            self._requests.send_multipart((STOP,))
            socket.connect(self._addresses[1])
            socket.send(STOP)
            self._reader.join()
        self._end()


class AsyncTwin(_Twin):
    """The client for an event loop: a task reads, a queue holds outputs."""

    def __init__(self) -> None:
        import zmq.asyncio  # noqa: PLC0415  # optional

        super().__init__(zmq.asyncio.Context())
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            outputs = self._wire.read_outputs(await self._outputs.recv_multipart(copy=False))
            if outputs.reply is None:
                self._queue.put_nowait(outputs)
            else:
                self._replies.pop(outputs.reply[0]).set_result(outputs.reply[1])

    async def add_request_async(self, request: Any) -> None:
        """Send a request."""
        await self._requests.send_multipart(self._wire.request_frames(request), copy=False)

    async def get_output_async(self) -> Any:
        """Wait for the next outputs."""
        return await self._queue.get()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call the engine and wait for the reply."""
        call_id = next(self._calls)
        reply = self._replies[call_id] = asyncio.get_running_loop().create_future()
        await self._requests.send_multipart((b"U", self._wire.encode([call_id, method, args])), copy=False)
        return await reply

    def shutdown(self) -> None:
        """End the engine and the task."""
        self._task.cancel()
        self._requests.send_multipart((STOP,))
        self._end()


class PeerZmq:
    """Makes clients, requests and tensors of the twin."""

    def __init__(self) -> None:
        self._request_class = zmq_engine.Wire().Request

    def about(self) -> dict[str, str]:
        """Return what runs here."""
        import msgspec  # noqa: PLC0415  # optional, as the next
        import zmq  # noqa: PLC0415  # optional

        return {"pyzmq": zmq.__version__, "msgspec": msgspec.__version__, "tensors": "memoryview"}

    def make_client(self, use_asyncio: bool = False, **_: Any) -> Any:
        """Start an engine and return its client; options of other clients do not count."""
        return AsyncTwin() if use_asyncio else SyncTwin()

    def make_request(self, request_id: str, max_tokens: int, tensor: Any = None) -> Any:
        """Return a request with a prompt of 128 tokens."""
        return self._request_class(request_id, list(range(128)), max_tokens, 1.0, time.time(), tensor)

    def make_tensor(self, nbytes: int) -> Any:
        """Return a buffer of so many bytes."""
        return memoryview(bytearray(b"\1") * nbytes)


def make_side() -> PeerZmq:
    """Return the side.

    Raises:
        ImportError: pyzmq or msgspec is not installed.
    """
    try:
        import msgspec  # noqa: F401, PLC0415  # only to tell whether it is there, as the next
        import zmq  # noqa: F401, PLC0415  # as above
    except ImportError as error:
        raise ImportError(f"the peer zmq needs pyzmq and msgspec: {error}") from error
    return PeerZmq()
