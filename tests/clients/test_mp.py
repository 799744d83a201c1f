"""What all multi-process clients share."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client import (
    BackgroundResources,
    ClientOptions,
    EngineConfig,
    EngineCoreReadyResponse,
    EngineDeadError,
    EngineStalledError,
    SerializationError,
    SyncMPClient,
)
from engine_client.clients.mp import MPClient, managed_ranks, needs_lock_step
from engine_client.config import ModelConfig, ParallelConfig
from engine_client.ipc.status_page import EngineState
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.faults import frozen
from engine_client.testing.scripted import Script
from helpers.clients import pid_of, scripted_client
from helpers.timing import took_at_most


def test_health_tells_frozen_from_busy_from_dead() -> None:
    """A frozen engine and one in a long step do not respond, a busy one does in time, a dead one is dead."""
    with scripted_client(Script(step_seconds=0.5)) as client:
        client.check_health(10)
        with frozen(pid_of(client)), took_at_most(1.0), pytest.raises(EngineStalledError, match="not responding"):
            client.check_health(0.2)
        client.check_health(10)
        from helpers.clients import make_request

        client.add_request(make_request("a", 3))
        deadline = time.monotonic() + 10
        while not client.engine_status()[0].is_in_step and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises(EngineStalledError, match="in one step"):
            client.check_health(0.1)
        client.check_health(10)
        assert client.utility_results == {}
        with pytest.raises(EngineDeadError):
            client.call_utility("die", "sigkill")
        with pytest.raises(EngineDeadError):
            client.check_health(1)
        assert not client.is_alive


def test_the_status_is_read_without_asking() -> None:
    """``engine_status`` works while the engine is frozen."""
    with scripted_client() as client, frozen(pid_of(client)):
        (status,) = client.engine_status()
        assert status.state is EngineState.READY
        assert (status.waiting, status.running) == (0, 0)


def test_the_hand_over_of_several_ranks() -> None:
    """The smallest length, the sum of blocks, the last block size, the first cache size."""
    client = SimpleNamespace(vllm_config=EngineConfig(), stats_update_address=None)
    client.vllm_config.model_config.max_model_len = None  # type: ignore[assignment]
    for response in (
        EngineCoreReadyResponse(200, 10, 16, None, "auto", "v", 1, 2, 160, 1.5),
        EngineCoreReadyResponse(100, 20, 32, "address", "auto", "v", 1, 2, 640, 2.5),
        EngineCoreReadyResponse(150, 30, 32, "other", "auto", "v", 1, 2),
    ):
        MPClient._apply_ready_response(client, response)  # type: ignore[arg-type]  # noqa: SLF001  # the reference's
    cache = client.vllm_config.cache_config
    assert client.vllm_config.model_config.max_model_len == 100
    assert (cache.num_gpu_blocks, cache.block_size) == (60, 32)
    assert (cache.kv_cache_size_tokens, cache.kv_cache_max_concurrency) == (160, 1.5)
    assert client.stats_update_address == "address"


def test_the_reference_s_attributes_are_there() -> None:
    """Code written for the reference finds the names that it uses; what only ZMQ needs stays None."""
    with scripted_client() as client:
        assert client.core_engines == [b"\x00\x00"]
        assert client.core_engine == b"\x00\x00"
        assert client.engine_ranks_managed == [0]
        assert client.resources.ctx is None
        assert client.resources.output_socket is None
        assert client.resources.engine_manager is not None
        assert not client.resources.engine_dead
        assert not client.dp_engines_running()
        assert not client.is_dp
        client.start_engine_core_monitor()
        client.add_pending_message(None, None)
        client.free_pending_messages()
        client.ensure_alive()
        client.resources.validate_alive([b"one", b"two"])
        client.resources()
        with pytest.raises(EngineDeadError):
            client.ensure_alive()


def test_the_reference_s_dead_frame_is_understood() -> None:
    """``validate_alive`` raises for the single ENGINE_CORE_DEAD frame, as bytes or with a ``buffer``."""
    for frame in (b"ENGINE_CORE_DEAD", SimpleNamespace(buffer=b"ENGINE_CORE_DEAD")):
        resources = BackgroundResources(None)
        resources.validate_alive([b"something else"])
        with pytest.raises(EngineDeadError):
            resources.validate_alive([frame])
        assert resources.engine_dead
        resources()


def test_the_ranks_that_a_client_starts() -> None:
    """All of them; only its own where somebody else balances; and one that is alone has the number it was given."""
    for settings, ranks in (
        ({}, [0]),
        ({"data_parallel_index": 2}, [2]),
        ({"data_parallel_size": 3}, [0, 1, 2]),
        ({"data_parallel_size": 3, "data_parallel_external_lb": True, "data_parallel_rank": 1}, [1]),
        ({"data_parallel_size": 3, "data_parallel_rank_local": 0, "data_parallel_rank": 2}, [2]),
    ):
        assert managed_ranks(ParallelConfig(**settings)) == ranks


def test_ranks_step_together_for_a_mixture_of_experts_only() -> None:
    """Several ranks of another model are independent, and one rank always is."""
    for ranks, is_moe, expected in ((1, True, False), (2, False, False), (2, True, True)):
        config = EngineConfig(
            model_config=ModelConfig(is_moe=is_moe), parallel_config=ParallelConfig(data_parallel_size=ranks)
        )
        assert needs_lock_step(config) is expected


def test_a_failed_start_leaves_nothing_and_the_next_one_works() -> None:
    """Whatever fails in the constructor, nothing is left (the leak guard), and the error keeps nothing alive."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match="marker"):
            scripted_client(Script(start_error=ValueError("marker")))
    with scripted_client() as client:
        assert client.is_alive


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start_method": "thread"}, ValueError),
        ({"ready_timeout": -1}, ValueError),
        ({"ready_timeout": float("nan")}, ValueError),
        ({"ready_timeout": "soon"}, TypeError),
        ({"arena_limit": 1.5}, TypeError),
        ({"arena_limit": -1}, ValueError),
        ({"on_progress": 5}, TypeError),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    """Each wrong option raises with its name."""
    with pytest.raises(error, match=next(iter(options))):
        ClientOptions(**options)


def test_a_config_that_cannot_be_sent_is_refused_before_anything_starts() -> None:
    """The constructor raises, and no process was started."""
    config = EngineConfig(additional_config={"lock": threading.Lock()})
    with took_at_most(1.0), pytest.raises(TypeError, match="lock"):
        SyncMPClient(config, None, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "named"),
    [("executor", "the executor class EchoExecutor"), ("configuration", "the configuration EngineConfig")],
)
def test_what_cannot_be_pickled_is_named(part: str, named: str) -> None:
    """The error tells which part of what an engine is built from cannot be sent, and why; nothing was started."""
    lock = threading.Lock()
    executor = partial(EchoExecutor, lock) if part == "executor" else EchoExecutor
    config = EngineConfig(additional_config={"lock": lock} if part == "configuration" else {})
    with pytest.raises(SerializationError, match=f"{named} cannot be sent to an engine: TypeError.*lock"):
        SyncMPClient(config, executor, False)


def test_the_card_of_a_client() -> None:
    """A notebook can show a client in every state, without asking its engine: here, while that is stopped."""
    with scripted_client(Script()) as client:
        with frozen(pid_of(client)), took_at_most(5.0):
            assert f">{pid_of(client)}<" in client._repr_html_()
        client.shutdown()
        assert ">closed<" in client._repr_html_()
