"""vLLM's server on this library, through HTTP; started as a user would start it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from engine_client.testing.inventory import marked_processes
from helpers.procs import script_environment
from helpers.timing import eventually
from helpers.vllm_scripts import ENVIRONMENT


class Server:
    """A server in a process of its own.

    Args:
        port: where it listens on the loopback.
        process: ends by a signal.
        mark: that all its processes bear.
    """

    def __init__(self, port, process, mark, log):
        self.port, self.process, self.mark, self.log = port, process, mark, log

    def ask(self, path, body=None):
        """Return the status and the text of an answer."""
        with self.connection() as connection:
            response = self.start(connection, path, body)
            return response.status, response.read().decode()

    @contextmanager
    def connection(self):
        """Give a connection that is closed at the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            yield connection
        finally:
            connection.close()

    def start(self, connection, path, body=None):
        """Send a request and return what begins to answer it."""
        text = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, text, {"Content-Type": "application/json"})
        return connection.getresponse()

    def is_healthy(self):
        """Tell whether the server answers; a server that has ended is a failure."""
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        with suppress(OSError, http.client.HTTPException):
            return self.ask("/health")[0] == 200
        return False

    def metric(self, name):
        """Return the sum of a metric's values."""
        rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return sum(map(float, rows))


@contextmanager
def serving(model, folder, *options):
    """Run a server that logs into a folder; at the end SIGINT must leave nothing of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark, log = f"serve-{os.getpid()}-{time.monotonic_ns()}", folder / "server.log"
    command = [sys.executable, "-m", "engine_client.integrations.vllm", "serve", str(model), "--host", "127.0.0.1"]
    settings = ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
    environment = script_environment(**ENVIRONMENT, ENGINE_CLIENT_TEST_RUN=mark)
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *settings, "--served-model-name", "tiny", *options],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = Server(port, process, mark, log)
    try:
        eventually(server.is_healthy, 200)
        yield server
        process.send_signal(signal.SIGINT)
        process.wait(60)
        eventually(lambda: not marked_processes(mark), 10)
    finally:
        for key in marked_processes(mark):
            with suppress(OSError):
                os.kill(key.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_http(smollm, tmp_path):
    """Health, models, chats with and without a stream, and metrics; who disconnects aborts; SIGINT ends it all."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "tiny", "messages": question, "max_tokens": 24, "temperature": 0}
    with serving(smollm, tmp_path) as server:
        assert json.loads(server.ask("/v1/models")[1])["data"][0]["id"] == "tiny"
        status, text = server.ask("/v1/chat/completions", body)
        assert status == 200, text
        answer = json.loads(text)["choices"][0]["message"]["content"]
        assert "Paris" in answer
        _, text = server.ask("/v1/chat/completions", {**body, "stream": True})
        rows = [json.loads(row[6:]) for row in text.splitlines() if row.startswith("data: {")]
        assert "".join(row["choices"][0]["delta"].get("content") or "" for row in rows) == answer
        generated = server.metric("vllm:generation_tokens_total")
        assert generated > 0
        endless = {**body, "stream": True, "max_tokens": 1500, "ignore_eos": True}
        with server.connection() as connection:
            server.start(connection, "/v1/chat/completions", endless).read(10)
            eventually(lambda: server.metric("vllm:num_requests_running") == 1, 30)
        eventually(lambda: server.metric("vllm:num_requests_running") == 0, 30)
        assert server.metric("vllm:generation_tokens_total") < generated + 1500
