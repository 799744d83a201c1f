"""The server answers what it is asked, survives what it is not, and is gone when it is closed."""

from __future__ import annotations

import os
import resource
import socket
import threading
from contextlib import suppress

import pytest

from engine_client.clients import metrics_server
from engine_client.clients.metrics_server import MetricsServer
from helpers.timing import DEADLOCK, took_at_most


class Client:
    """Stands for a client."""

    def metrics(self, prefix: str) -> str:
        if prefix == "bad":
            raise ZeroDivisionError("no metrics today")
        return f"{prefix}:up 1\n"


@pytest.fixture
def client() -> Client:
    return Client()


def ask(server: MetricsServer, text: bytes) -> bytes:
    with socket.create_connection((server.host, server.port), DEADLOCK) as connection:
        connection.sendall(text)
        connection.settimeout(DEADLOCK)
        answer = b""
        while data := connection.recv(4096):
            answer += data
        return answer


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1", b"200", b"x:up 1\n"),
        (b"GET /?a=b HTTP/1.0", b"200", b"x:up 1\n"),
        (b"HEAD /metrics HTTP/1.1", b"200", b""),
        (b"POST /metrics HTTP/1.1", b"405", b"only GET is answered here\n"),
        (b"GET /etc/passwd HTTP/1.1", b"404", b"there is /metrics\n"),
        (b"\xff\xfe", b"405", b"only GET is answered here\n"),
    ],
)
def test_it_answers(client: Client, request_line: bytes, status: bytes, body: bytes) -> None:
    """Metrics for a GET, and an error for anything else."""
    with MetricsServer(client, "x", "127.0.0.1", 0) as server:
        head, _, content = ask(server, request_line + b"\r\nHost: x\r\n\r\n").partition(b"\r\n\r\n")
        assert head.split()[1] == status
        assert content == body


def test_strange_askers_do_not_end_it(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing, too much, or leaves in the middle is cut off, and the next is served."""
    monkeypatch.setattr(metrics_server, "_PATIENCE", 0.2)
    with MetricsServer(client, "x", "127.0.0.1", 0) as server:
        with socket.create_connection((server.host, server.port)) as silent:
            socket.create_connection((server.host, server.port)).close()
            with suppress(ConnectionError):  # cut off before it had said everything
                assert ask(server, b"a" * 200_000) == b""
            silent.settimeout(DEADLOCK)
            assert silent.recv(1) == b""
        monkeypatch.setattr(metrics_server, "_PATIENCE", DEADLOCK)
        assert b"x:up 1" in ask(server, b"GET / HTTP/1.1\r\n\r\n")


def test_an_error_is_the_asker_s(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``metrics`` raises is the answer, with status 500; a client that is gone is 503."""
    with MetricsServer(client, "bad", "127.0.0.1", 0) as server:
        answer = ask(server, b"GET / HTTP/1.1\r\n\r\n")
        assert b" 500 " in answer
        assert b"ZeroDivisionError: no metrics today" in answer
        monkeypatch.setattr(server, "_client", lambda: None)
        assert b" 503 " in ask(server, b"GET / HTTP/1.1\r\n\r\n")


def test_it_ends_at_once(client: Client) -> None:
    """``close`` may come twice, ends the thread, and frees the port."""
    server = MetricsServer(client, "x", "127.0.0.1", 0)
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert "serving" in repr(server)
    with took_at_most(1.0):
        server.close()
    server.close()
    assert not [thread for thread in threading.enumerate() if "metrics" in thread.name]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((server.host, server.port))
    MetricsServer(client, "x", server.host, server.port).close()


def test_it_answers_where_descriptors_have_high_numbers(client: Client) -> None:
    """A host may have thousands of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with MetricsServer(client, "x", "127.0.0.1", 0) as server:
            assert b"x:up 1" in ask(server, b"GET / HTTP/1.1\r\n\r\n")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_thread_there_is_no_server(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call says so, and its port is free again."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
        patch.setattr(threading.Thread, "start", start)
        MetricsServer(client, "x", "127.0.0.1", 0)
    MetricsServer(client, "x", "127.0.0.1", 0).close()


def test_an_address_that_cannot_be_had_is_an_error(client: Client) -> None:
    """It is told at once, and nothing is left."""
    with MetricsServer(client, "x", "127.0.0.1", 0) as server, pytest.raises(OSError, match="in use"):
        MetricsServer(client, "x", "127.0.0.1", server.port)
