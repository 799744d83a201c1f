"""A small HTTP server for one client's metrics; the only thing in this library that listens, and only when asked to.

Threads: a ``MetricsServer`` owns one, named ``engine-client-metrics-…``, and its listening socket.  It answers one
request at a time, each within a bound, and ends by ``close``, which the end of the client calls too.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from engine_client.deadline import Deadline
from engine_client.ipc.wakeup import Wakeup

if TYPE_CHECKING:
    import socket

__all__ = ["MetricsServer"]

_PATIENCE: Final = 2.0
"""Seconds for a request and its answer; who is slower is cut off."""
_LONGEST_REQUEST: Final = 16 * 1024
_CONTENT: Final = "text/plain; version=0.0.4; charset=utf-8"


class MetricsServer:
    """Answers ``GET /metrics``; a context manager that closes it.

    Args:
        client: whose ``metrics`` it serves; not kept alive by this.
        prefix: of the names.
        host, port: to listen on.

    Raises:
        OSError: that address cannot be listened on.
        RuntimeError: there are no more threads.
    """

    def __init__(self, client: Any, prefix: str, host: str, port: int) -> None:
        import socket  # noqa: PLC0415  # takes 10 ms, and nobody else needs it

        self._client = weakref.ref(client)
        self._prefix = prefix
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._wakeup = Wakeup()
        self._is_closed = False
        self._lock = threading.Lock()
        self.host, self.port = self._listener.getsockname()[:2]
        self._listener.setblocking(False)
        self._finalizer = weakref.finalize(client, self.close)
        self._pid = os.getpid()
        # Last: all it needs is there.
        name = f"engine-client-metrics-{self.port}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:  # there are no more threads
            self._finalizer.detach()
            self._listener.close()
            self._wakeup.close()
            raise

    def __repr__(self) -> str:
        return f"<MetricsServer {'closed' if self._is_closed else 'serving'} {self.url}>"

    @property
    def url(self) -> str:
        """Return what to give to Prometheus."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more; idempotent, from any thread."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        self._finalizer.detach()
        if self._pid != os.getpid():  # a forked copy, which has no such thread
            return
        if not was_closed:
            self._wakeup.wakeup()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _PATIENCE)

    # -- the server's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()  # select knows no descriptor above 1023
        for source in (self._listener, self._wakeup):
            poller.register(source.fileno(), select.POLLIN)
        try:
            while not self._is_closed:
                ready = dict(poller.poll())
                if self._listener.fileno() in ready and not self._is_closed:
                    # Whoever asks in vain, or goes away, is not to end this.
                    with suppress(OSError):
                        self._accept()
        finally:
            self._listener.close()
            self._wakeup.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            deadline = Deadline(_PATIENCE)
            request = self._read(connection, deadline)
            if request:
                connection.settimeout(deadline.remaining())
                connection.sendall(self._answer(request))

    def _read(self, connection: socket.socket, deadline: Deadline) -> bytes:
        """Return a request's head; empty if it does not come."""
        request = b""
        while b"\r\n\r\n" not in request:
            left = deadline.remaining()
            if not left or self._is_closed or len(request) > _LONGEST_REQUEST:
                return b""
            connection.settimeout(left)
            data = connection.recv(4096)
            if not data:
                return b""
            request += data
        return request

    def _answer(self, request: bytes) -> bytes:
        method, _, rest = request.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET is answered here\n")
        if path not in (b"/metrics", b"/"):
            return _response("404 Not Found", b"there is /metrics\n")
        client = self._client()
        if client is None:
            return _response("503 Service Unavailable", b"the client is gone\n")
        try:
            body = client.metrics(self._prefix).encode()
        except Exception as error:  # noqa: BLE001  # it is the asker's to know; the next one may have more luck
            return _response("500 Internal Server Error", f"{type(error).__name__}: {error}\n".encode())
        return _response("200 OK", b"" if method == b"HEAD" else body)


def _response(status: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_CONTENT}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
