"""A client tells Prometheus what it knows, under the field's names, and keeps it to itself until somebody asks."""

from __future__ import annotations

import math
import re
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, ModelConfig, ParallelConfig, SyncMPClient
from engine_client.clients.metrics import EngineReading, Measurements, render
from engine_client.ipc.counters import Counters, Reading
from engine_client.ipc.status_page import EngineStatus
from engine_client.testing.executors import DyingStep
from helpers.clients import make_request, scripted_client, session_of
from helpers.engines import Recording
from helpers.timing import DEADLOCK, eventually

pytest.importorskip("prometheus_client")

LABELS = {"model_name", "engine"}
REFERENCE = {
    "num_requests_running": ("gauge", LABELS),
    "num_requests_waiting": ("gauge", LABELS),
    "engine_sleep_state": ("gauge", LABELS | {"sleep_state"}),
    "kv_cache_usage_perc": ("gauge", LABELS),
    "prefix_cache_queries": ("counter", LABELS),
    "prefix_cache_hits": ("counter", LABELS),
    "num_preemptions": ("counter", LABELS),
    "prompt_tokens": ("counter", LABELS),
    "prompt_tokens_cached": ("counter", LABELS),
    "generation_tokens": ("counter", LABELS),
    "request_success": ("counter", LABELS | {"finished_reason"}),
    "time_to_first_token_seconds": ("histogram", LABELS | {"le"}),
    "e2e_request_latency_seconds": ("histogram", LABELS | {"le"}),
}
"""What vLLM 0.25.1 has (``vllm/v1/metrics/loggers.py``) and this library, too: type and labels."""

VALUES = {
    "sleep_state": {"awake", "weights_offloaded", "discard_all"},
    "finished_reason": {"stop", "length", "abort", "error", "repetition"},
}
"""The values of vLLM's labels."""

BUCKETS = {
    "time_to_first_token_seconds": (
        *("0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25", "0.5", "0.75", "1.0", "2.5"),
        *("5.0", "7.5", "10.0", "20.0", "40.0", "80.0", "160.0", "640.0", "2560.0", "+Inf"),
    ),
    "e2e_request_latency_seconds": (
        *("0.3", "0.5", "0.8", "1.0", "1.5", "2.0", "2.5", "5.0", "10.0", "15.0", "20.0", "30.0", "40.0", "50.0"),
        *("60.0", "120.0", "240.0", "480.0", "960.0", "1920.0", "7680.0", "+Inf"),
    ),
}

NOT_HERE = {
    *("num_requests_waiting_by_reason", "prompt_tokens_by_source"),
    *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
    *("request_params_n", "request_params_max_tokens", "iteration_tokens_total", "request_prefill_kv_computed_tokens"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"),
    *("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds"),
    *("corrupted_requests", "lora_requests_info", "cache_config_info"),
}
"""What else vLLM 0.25.1 has there."""

OURS = {
    *("engine_up", "engine_steps", "engine_restarts", "frame_latency_seconds", "arena_used_bytes"),
    *("arena_capacity_bytes", "arena_fallbacks", "num_requests_in_flight", "num_calls_pending"),
}


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
        assert total(found, "prompt_tokens_total") == 8
        assert total(found, "prompt_tokens_cached_total") == 0
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


def test_names_types_and_labels_are_the_reference_s() -> None:
    """What the reference has too is what its dashboards expect, to the buckets; nothing else has a name of its."""
    from prometheus_client.parser import text_string_to_metric_families  # optional

    with SyncMPClient(EngineConfig(), Recording, False) as client:
        families = {each.name: each for each in text_string_to_metric_families(client.metrics(prefix="vllm"))}
    assert set(families) == {f"vllm:{name}" for name in {*REFERENCE, *OURS}}
    assert not OURS & {*REFERENCE, *NOT_HERE}
    for name, (kind, labels) in REFERENCE.items():
        family = families[f"vllm:{name}"]
        assert (name, family.type, {label for sample in family.samples for label in sample.labels}) == (
            (name, kind, labels)
        )
        for label in labels & set(VALUES):
            assert {sample.labels[label] for sample in family.samples} == VALUES[label]
        if name in BUCKETS:
            found = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
            assert tuple(found) == BUCKETS[name]
    for name in ("num_requests_in_flight", "num_calls_pending"):
        [sample] = families[f"vllm:{name}"].samples
        assert set(sample.labels) == {"model_name"}
        assert "all its engines together" in families[f"vllm:{name}"].documentation


def test_cached_prompt_tokens_are_the_prefix_cache_s() -> None:
    """There is no other cache, so what was found there is all that was cached."""
    reading = EngineReading(EngineStatus(), Reading(prompt_tokens=9, prefix_queries=8, prefix_hits=4))
    found = parse(render(Measurements("toy", [reading]), "engine_client"))
    assert total(found, "prompt_tokens_cached_total") == total(found, "prefix_cache_hits_total") == 4


def test_the_page_tells_what_is_here_and_what_is_not() -> None:
    """The documentation names all that there is, and all of the reference's that there is not."""
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    named = {re.sub("_total$", "", name) for name in re.findall(r"`(\w+)`", page)}
    expected = {re.sub("_total$", "", name) for name in {*REFERENCE, *OURS, *NOT_HERE}}
    assert expected <= named


@pytest.mark.skipif(find_spec("vllm") is None, reason="compares with the files of an installed vLLM")
def test_what_is_recorded_here_is_vllm_s() -> None:
    """The lists above are complete: together they are the names in vLLM's own file."""
    [folder] = find_spec("vllm").submodule_search_locations
    text = Path(folder, "v1", "metrics", "loggers.py").read_text(encoding="utf-8")
    assert set(re.findall(r'name ?= ?"vllm:(\w+)"', text)) == {*REFERENCE, *NOT_HERE}


def test_an_engine_that_sleeps_is_not_awake() -> None:
    """Of its two levels neither is claimed: the engine does not tell which it is."""
    with SyncMPClient(EngineConfig(), Recording, False) as client:
        client.sleep(1)
        asleep = sleep_states(client.metrics())
        client.wake_up()
        awake = sleep_states(client.metrics())
    assert asleep.pop("awake") == 0
    assert [math.isnan(value) for value in asleep.values()] == [True, True]
    assert awake == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}


def sleep_states(text: str) -> dict[str, float]:
    found = parse(text)["engine_client:engine_sleep_state"]
    return {re.search(r'sleep_state="(\w+)"', labels)[1]: value for labels, value in found.items()}


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
