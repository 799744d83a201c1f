"""A client tells Prometheus what it knows, under the field's names, and keeps it to itself until somebody asks."""

from __future__ import annotations

import re
import sys
import urllib.request
from typing import Any

import pytest

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, ModelConfig, ParallelConfig, SyncMPClient
from engine_client.clients.metrics import EngineReading, Measurements, render
from engine_client.ipc.counters import Counters
from engine_client.ipc.status_page import EngineStatus
from engine_client.testing.executors import DyingStep
from helpers.clients import make_request, scripted_client, session_of
from helpers.engines import Recording
from helpers.timing import DEADLOCK, eventually

pytest.importorskip("prometheus_client")

REFERENCE = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket"),
    *("e2e_request_latency_seconds_sum", "prefix_cache_queries_total", "prefix_cache_hits_total", "engine_sleep_state"),
)
OURS = (
    *("engine_up", "engine_steps_total", "engine_restarts_total", "frame_latency_seconds_count", "arena_used_bytes"),
    *("arena_capacity_bytes", "arena_fallbacks_total", "num_requests_in_flight", "num_calls_pending"),
)


def parse(text: str) -> dict[str, dict[str, float]]:
    """Return the values by name, and by labels."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([^{ ]+)(?:{(.*)})? (\S+)", line).groups()
            found.setdefault(name, {})[labels] = float(value)
    return found


def total(found: dict[str, dict[str, float]], name: str) -> float:
    return sum(found[f"engine_client:{name}"].values())


@pytest.mark.parametrize("multiprocess", [True, False])
def test_the_field_s_names_and_ours(multiprocess: bool) -> None:
    """Both kinds of client tell what has become of requests; the prefix is the caller's to choose."""
    config = EngineConfig(model_config=ModelConfig(model="toy"))
    with EngineCoreClient.make_client(multiprocess, False, config, Recording, False) as client:
        client.metrics()
        for name in "ab":
            client.add_request(make_request(name, 3, [1, 2, 3, 4]))
        ended = 0
        while ended < 2:
            ended += sum(output.finished for output in client.get_output().outputs)
        found = parse(client.metrics())
        assert {f"engine_client:{name}" for name in REFERENCE + OURS} <= set(found)
        assert total(found, "prompt_tokens_total") == 8
        assert total(found, "generation_tokens_total") == 6
        assert total(found, "time_to_first_token_seconds_count") == 2
        assert total(found, "num_requests_running") == 0
        assert (total(found, "frame_latency_seconds_count") > 0) is multiprocess
        by_reason = found["engine_client:request_success_total"]
        assert [set(key.split(",")) for key, value in by_reason.items() if value] == [
            {'engine="0"', 'finished_reason="length"', 'model_name="toy"'}
        ]
        assert "vllm:generation_tokens_total" in client.metrics(prefix="vllm")
        with pytest.raises(ValueError, match="prefix"):
            client.metrics(prefix="a b")
    found = parse(client.metrics())
    assert total(found, "engine_up") == 0
    assert total(found, "generation_tokens_total") == 6


def test_clients_do_not_meet() -> None:
    """Each has a registry of its own, and the global one learns nothing."""
    from prometheus_client import REGISTRY, generate_latest  # optional

    config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=2))
    with (
        EngineCoreClient.make_client(True, True, config, Recording, False) as client,
        EngineCoreClient.make_client(False, False, EngineConfig(), Recording, False) as other,
    ):
        assert len(parse(client.metrics())["engine_client:engine_up"]) == 2
        assert len(parse(other.metrics())["engine_client:engine_up"]) == 1
    assert b"engine_client" not in generate_latest(REGISTRY)


def test_buffers_without_room_are_counted() -> None:
    """What found no room in shared memory is told."""
    with scripted_client(arena_limit=0) as client:
        client.call_utility("echo", bytearray(200_000))
        found = parse(client.metrics())["engine_client:arena_fallbacks_total"]
    assert [value for labels, value in found.items() if 'direction="requests"' in labels] == [1]


def test_restarts_are_counted() -> None:
    """A rank that was started again says how often."""
    config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=2), additional_config={"die_at_step": 1})
    options = ClientOptions(on_engine_death="restart", restart_delay=0.01)
    with EngineCoreClient.make_async_mp_client(config, DyingStep, False, options=options) as client:
        session_of(client).add(make_request("a", 5))
        eventually(lambda: total(parse(client.metrics()), "engine_restarts_total") == 1, DEADLOCK)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prometheus_client the error says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"engine_client\[metrics\]"):
        render(Measurements("", [EngineReading(EngineStatus(), Counters().read())]), "x")


def test_they_are_served_while_the_client_lives() -> None:
    """Whoever asks over HTTP gets the same text; the end of the client is the end of that."""
    with SyncMPClient(EngineConfig(), Recording, False) as client:
        server = client.serve_metrics()
        with urllib.request.urlopen(server.url, timeout=DEADLOCK) as answer:  # our own
            assert "engine_client:engine_up" in answer.read().decode()
        assert server.host == "127.0.0.1"
    assert "closed" in repr(server)


def test_a_client_that_is_dropped_takes_its_server_along() -> None:
    """The server does not keep its client alive."""
    client: Any = EngineCoreClient.make_client(False, False, EngineConfig(), Recording, False)
    server = client.serve_metrics()
    del client
    eventually(lambda: "closed" in repr(server), DEADLOCK)
