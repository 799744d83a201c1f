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
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest

from engine_client.integrations.vllm.refusals import UnsupportedError
from engine_client.integrations.vllm.serving import patch_serve
from engine_client.testing.inventory import marked_processes
from helpers.procs import script_environment
from helpers.timing import eventually
from helpers.vllm_scripts import ENVIRONMENT, model_folder

COMMAND = [sys.executable, "-m", "engine_client.integrations.vllm"]
SETTINGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--served-model-name", "tiny")
QUESTION = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "temperature": 0,
}
ENDLESS = {**QUESTION, "stream": True, "max_tokens": 1500, "ignore_eos": True}


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

    def metrics(self, name):
        """Return a metric's values, one for each engine."""
        rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return [float(row) for row in rows]

    def metric(self, name):
        """Return the sum of a metric's values."""
        return sum(self.metrics(name))

    def interrupt(self):
        """Interrupt the server, which runs; it ends as it should, and nothing of it may be left."""
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(60) == 0, self.log.read_text(encoding="utf-8")
        eventually(lambda: not marked_processes(self.mark), 10)


@contextmanager
def serving(model, folder, *options):
    """Run a server that logs into a folder; at the end SIGINT must leave nothing of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mark, log = f"serve-{os.getpid()}-{time.monotonic_ns()}", folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [*COMMAND, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), *SETTINGS, *options],
            env=script_environment(**ENVIRONMENT, ENGINE_CLIENT_TEST_RUN=mark),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    server = Server(port, process, mark, log)
    try:
        eventually(server.is_healthy, 200)
        yield server
        if process.returncode is None:  # not interrupted by the test
            server.interrupt()
    finally:
        for key in marked_processes(mark):
            with suppress(OSError):
                os.kill(key.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def server(smollm, tmp_path_factory):
    """Give a server of SmolLM2."""
    with serving(smollm, tmp_path_factory.mktemp("server")) as running:
        yield running


def command_line(*arguments):
    """Run vLLM's command line to its end; return how it ended and what it printed."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=script_environment(**ENVIRONMENT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )


def fake_module(seen):
    """Return what of vLLM's ``serve`` module is replaced."""

    class ServeSubcommand:
        @staticmethod
        def cmd(args):
            seen.append(args.api_server_count)

    launchers = dict.fromkeys(("run_multi_api_server", "run_headless", "run_dp_supervisor"))
    return SimpleNamespace(ServeSubcommand=ServeSubcommand, **launchers)


def test_one_server_is_the_default():
    """vLLM would start a server for each rank; who says a number, or wants none, is heard."""
    seen = []
    module = fake_module(seen)
    patch_serve(module)
    patch_serve(module)
    for count, headless in ((None, False), (3, False), (None, True)):
        module.ServeSubcommand.cmd(SimpleNamespace(api_server_count=count, headless=headless))
    assert seen == [1, 3, None]


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("run_multi_api_server", "several API servers"),
        ("run_headless", "without an API server"),
        ("run_dp_supervisor", "an API server for each rank"),
    ],
)
def test_what_launches_engines_by_itself(name, feature):
    """What would go around the client is refused, with the reason."""
    module = fake_module([])
    patch_serve(module)
    with pytest.raises(UnsupportedError, match=rf"{feature}.*launches their engines by itself.*over ZMQ"):
        getattr(module, name)(SimpleNamespace())


@pytest.mark.slow
def test_several_api_servers_are_refused(tmp_path):
    """``serve --api-server-count 2`` ends at once, and says why."""
    done = command_line("serve", model_folder(tmp_path), *SETTINGS, "--api-server-count", "2")
    assert done.returncode == 1
    assert "UnsupportedError: engine_client does not carry several API servers" in done.stdout


@pytest.mark.slow
def test_health_models_metrics(server):
    """The server says that it is well, which models it has, and what it has counted."""
    assert server.ask("/health")[0] == 200
    assert json.loads(server.ask("/v1/models")[1])["data"][0]["id"] == "tiny"
    before = server.metric("vllm:generation_tokens_total")
    assert server.ask("/v1/chat/completions", {**QUESTION, "max_tokens": 3, "ignore_eos": True})[0] == 200
    eventually(lambda: server.metric("vllm:generation_tokens_total") == before + 3, 30)


@pytest.mark.slow
def test_chat(server):
    """SmolLM2 knows the capital of France, in the same words at once and as a stream."""
    status, text = server.ask("/v1/chat/completions", QUESTION)
    assert status == 200, text
    answer = json.loads(text)["choices"][0]["message"]["content"]
    assert "Paris" in answer
    _, text = server.ask("/v1/chat/completions", {**QUESTION, "stream": True})
    rows = [json.loads(row[6:]) for row in text.splitlines() if row.startswith("data: {")]
    assert len(rows) >= 2  # vLLM joins what a slow machine has not sent yet
    assert "".join(row["choices"][0]["delta"].get("content") or "" for row in rows) == answer
    assert text.rstrip().endswith("data: [DONE]")


@pytest.mark.slow
def test_who_disconnects_aborts(server):
    """The request of a client that goes away ends in the engine, long before its last token."""
    before = server.metric("vllm:generation_tokens_total")
    with server.connection() as connection:
        server.start(connection, "/v1/chat/completions", ENDLESS).read(10)
        eventually(lambda: server.metric("vllm:num_requests_running") == 1, 30)
    eventually(lambda: server.metric("vllm:num_requests_running") == 0, 30)
    assert server.metric("vllm:generation_tokens_total") < before + 1500


@pytest.mark.slow
def test_two_ranks_and_an_interrupt(smollm, tmp_path):
    """Two ranks are served by one server, both at work; SIGINT in the middle of their streams ends everything."""
    with serving(smollm, tmp_path, "--data-parallel-size", "2") as server, ExitStack() as stack:
        connections = [stack.enter_context(server.connection()) for _ in range(4)]
        streams = [server.start(connection, "/v1/chat/completions", ENDLESS) for connection in connections]
        eventually(lambda: server.metrics("vllm:num_requests_running") == [2, 2], 30)
        server.interrupt()
        for stream in streams:
            *_, last, done = stream.read().decode().split("\n\n")[:-1]
            assert done == "data: [DONE]"
            assert "the engine client is closed" in json.loads(last.removeprefix("data: "))["error"]["message"]


@pytest.mark.slow
def test_bench(smollm, tmp_path):
    """vLLM's own benchmarks run as they are."""
    result = tmp_path / "latency.json"
    sizes = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--batch-size",
        "2",
        "--num-iters-warmup",
        "1",
        "--num-iters",
        "2",
    )
    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
    done = command_line("bench", "latency", "--model", smollm, *options, *sizes, "--output-json", result)
    assert done.returncode == 0, done.stdout
    assert len(json.loads(result.read_text(encoding="utf-8"))["latencies"]) == 2
