"""Sessions with engines that somebody else has launched."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest

from engine_client import ClosedError, DPAsyncMPClient, EngineDeadError, ForeignProcessError, LocalProtocolError
from engine_client.clients.endpoint import Endpoint
from engine_client.testing.scripted import Script
from helpers.clients import make_request, pids_of, session_of
from helpers.guests import config_of, finish, guest_client, launched
from helpers.interrupts import interrupt_at
from helpers.timing import DEADLOCK, MS, eventually, took_at_most


def external(ranks: int, rank: int) -> Any:
    """Return the configuration of a client of one rank, among which somebody else chooses."""
    config = config_of(ranks)
    config.parallel_config.data_parallel_external_lb = True
    config.parallel_config.data_parallel_rank = rank
    return config


def count_open() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_it_has_the_engines_and_ends_none() -> None:
    """Requests and calls go to all ranks; after its shutdown nothing of it is open, and the engines serve on."""
    with launched(2, 1) as engines:
        before = count_open()
        with guest_client(engines.endpoints[0]) as client:
            assert type(client).__name__ == "DPLBAsyncMPClient"
            assert pids_of(client) == pids_of(engines)
            assert (client.client_count, client.client_index) == (1, 0)
            assert finish(client, ["a", "b"], 3)[0] == {"a": 3, "b": 3}
            asyncio.run(client.check_health_async())
            assert len(client.engine_status()) == 2
        assert count_open() < before  # the endpoint's own descriptors are closed as well
        engines.check_health()


def test_big_buffers_go_through_memory_of_its_own() -> None:
    """Each front-end has an arena in either direction; neither gets what is the other's."""
    with launched(2, 2) as engines:
        clients = [guest_client(endpoint) for endpoint in engines.endpoints]
        with clients[0], clients[1]:
            for number, client in enumerate(clients):
                sent = bytes([number]) * (1 << 20)
                assert asyncio.run(client.call_utility_async("echo", sent)) == sent
                shared = client.allocate(1 << 20)
                shared[:] = sent
                assert asyncio.run(client.call_utility_async("echo", bytearray(shared))) == sent
                assert all(link.channel.in_memory for link in session_of(client).links.values())


def test_it_tells_what_becomes_of_the_engines() -> None:
    """States are read from the pages that all share."""
    with launched(2, 1) as engines, guest_client(engines.endpoints[0]) as client:
        with client.engine_events() as events:
            assert [next(events).rank for _ in range(2)] == [0, 1]
        with pytest.raises(LocalProtocolError, match="belong to the process that has launched them"):
            asyncio.run(client.scale_elastic_ep(3))


@pytest.mark.parametrize("which", ["the launcher's", "a fresh one", "a copy of the launcher's"])
def test_capacities_are_told_once(which: str) -> None:
    """The sum over the ranks is the same whether or not the configuration comes from the launcher."""
    with launched(2, 1) as engines:
        config = {"the launcher's": engines.vllm_config, "a fresh one": config_of(2)}.get(which)
        with guest_client(engines.endpoints[0], config or copy.deepcopy(engines.vllm_config)) as client:
            assert client.vllm_config.cache_config.num_gpu_blocks == 2048
            assert client.vllm_config.model_config.max_model_len == 4096


def test_a_client_of_one_rank_uses_that_alone() -> None:
    """For a balancer outside: an endpoint has all ranks, of which the client takes the one of its configuration."""
    with launched(3, 2) as engines:
        with guest_client(engines.endpoints[0], external(3, 2)) as client:
            assert type(client) is DPAsyncMPClient
            assert pids_of(client) == pids_of(engines)[2:]
            assert client.core_engines == [b"\x02\x00"]
            assert client.vllm_config.cache_config.num_gpu_blocks == 1024
            assert finish(client, ["a"], 3)[0] == {"a": 3}
            steps = [info["steps"] for info in engines.call_utility("info", ranks=range(3))]
            assert steps == [0, 0, 3]
            with pytest.raises(ValueError, match="data_parallel_rank 1"):
                asyncio.run(client.add_request_async(make_request("b", data_parallel_rank=1)))
        with pytest.raises(ValueError, match=r"the endpoint has the ranks \[0, 1, 2\], and the configuration asks for"):
            guest_client(engines.endpoints[1], external(5, 4))
        engines.check_health()


def test_what_is_no_endpoint_is_refused() -> None:
    """Addresses of sockets, and options that cannot be had here, are told before anything is taken."""
    with pytest.raises(TypeError, match="must be an endpoint of launch_core_engines, not dict"):
        guest_client_of({"input_address": "tcp://"})
    with launched(1, 1) as engines:
        with pytest.raises(ValueError, match='on_engine_death="restart" is not for engines with several front-ends'):
            guest_client(engines.endpoints[0], on_engine_death="restart")
        with guest_client(engines.endpoints[0]) as client:
            with pytest.raises(ValueError, match="endpoint 0 was used or closed already"):
                guest_client(engines.endpoints[0])
            assert finish(client, ["a"], 3)[0] == {"a": 3}


def guest_client_of(addresses: Any) -> Any:
    from engine_client import EngineCoreClient

    return EngineCoreClient.make_async_mp_client(config_of(1), None, False, addresses)  # type: ignore[arg-type]


def test_engines_that_are_gone_already_are_told() -> None:
    """The client can be made; whatever is done with it says that there is no engine."""
    with launched(1, 1, on_engine_death="continue") as engines:
        (endpoint,) = engines.endpoints
        os.kill(pids_of(engines)[0], signal.SIGKILL)
        eventually(lambda: not engines.is_alive, DEADLOCK)
        with guest_client(endpoint) as client:
            eventually(lambda: not client.is_alive, DEADLOCK)
            with pytest.raises(EngineDeadError, match="died; the process that has launched it knows how"):
                asyncio.run(client.add_request_async(make_request("a")))


def test_an_interrupt_while_it_attaches_leaves_nothing() -> None:
    """Wherever it comes, what the endpoint held is closed once, and the engines serve on."""
    with launched(1, 12) as engines:
        before = count_open()
        for number, endpoint in enumerate(engines.endpoints):
            interrupt_at(1 + 11 * number, partial(guest_client, endpoint))
            endpoint.close()
        assert count_open() == before - 12 * 4
        engines.check_health()


def test_an_engine_that_lets_go_of_a_front_end_is_lost_alone() -> None:
    """The other ranks go on, where that is wanted; the memory that this one may still read is not used again."""
    options = {"on_engine_death": "continue"}
    with launched(2, 1, **options) as engines, guest_client(engines.endpoints[0], **options) as client:
        session = session_of(client)
        session.writer.reclaim = pytest.fail  # type: ignore[method-assign, union-attr]
        os.write(session.links[1].channel.fileno(), b"this is no frame" * 10)
        eventually(lambda: session.deaths, DEADLOCK)
        assert "engine core 1 " in session.deaths[1].message
        assert "serves this front-end no longer, though it runs" in session.deaths[1].message
        assert finish(client, ["a"], 3)[0] == {"a": 3}
        engines.check_health()


def test_a_forked_copy_of_a_front_end_changes_nothing() -> None:
    """It cannot use the client, lets go of what it has inherited, and its end is not the front-end's."""
    with launched(1, 1) as engines, guest_client(engines.endpoints[0]) as client:
        (link,) = session_of(client).links.values()
        inherited = [link.channel.fileno(), link.handle.sentinel]
        pid = os.fork()
        if not pid:
            code = 1
            try:
                gone = [not os.path.exists(f"/proc/self/fd/{fd}") for fd in inherited]
                client.shutdown()
                with pytest.raises(ForeignProcessError):
                    client.ensure_alive()
                code = 0 if all(gone) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert finish(client, ["a"], 3)[0] == {"a": 3}


def test_engines_that_have_left_already_are_told() -> None:
    """Whoever comes after their goodbye is told at once, though there is no process that could be watched."""
    with launched(1, 1) as engines:
        numbers = list(map(os.dup, engines.endpoints[0].pass_fds))
        late = Endpoint.from_text(str(engines.endpoints[0]), numbers)
        engines.shutdown()
        with guest_client(late) as client, took_at_most(1000 * MS):
            with pytest.raises(EngineDeadError, match="was shut down") as caught:
                asyncio.run(forever(client))
            assert not isinstance(caught.value, ClosedError)


async def forever(client: Any) -> None:
    """Send requests and read outputs until an error comes."""
    for number in range(1_000_000):
        await client.add_request_async(make_request(f"r{number}"))
        await client.get_output_async()


@pytest.mark.slow
def test_a_goodbye_is_enough() -> None:
    """How long an engine takes to end behind it is its launcher's to wait for."""
    with launched(1, 1) as engines:
        engines.collective_rpc(end_slowly)
        with guest_client(engines.endpoints[0]) as client:
            closing = threading.Thread(target=engines.shutdown)
            closing.start()
            with took_at_most(1500 * MS), pytest.raises(EngineDeadError, match="was shut down"):
                asyncio.run(client.get_output_async())
            assert closing.is_alive()
            closing.join()


def end_slowly(core: Any) -> None:
    """Have an engine take two seconds to end."""
    core.shutdown = lambda: time.sleep(2)


def test_ranks_in_lock_step_wake_up_for_any_front_end() -> None:
    """A request of one front-end has every rank make steps; all front-ends can see that a wave runs."""
    with launched(2, 3, Script(step_seconds=0.002), is_moe=True) as engines:
        first, second = (guest_client(endpoint, config_of(2, is_moe=True)) for endpoint in engines.endpoints[:2])
        with first, second:
            asyncio.run(wave(engines, first, second))
            eventually(lambda: not second.dp_engines_running(), DEADLOCK)
            assert finish(second, ["b"], 40)[0] == {"b": 40}
        # Nothing waits for the one that never came, nor for the launcher, who takes no outputs.
        assert session_of(engines).outputs.queue.empty()
        with guest_client(engines.endpoints[2], config_of(2, is_moe=True)) as late:
            assert all(link.channel.received == 0 for link in session_of(late).links.values())
            assert finish(late, ["c"], 3)[0] == {"c": 3}


async def wave(engines: Any, first: Any, second: Any) -> None:
    """Have one front-end begin a wave, the others look, and end it."""
    await first.add_request_async(make_request("a", 1_000_000, data_parallel_rank=0))
    ask = ("info",)
    eventually(lambda: engines.call_utility(*ask, ranks=[1])[0]["dummy_steps"] > 10, DEADLOCK)
    assert first.dp_engines_running()
    assert second.dp_engines_running()
    assert engines.dp_engines_running()
    await first.abort_requests_async(["a"])


def test_the_death_of_a_rank_in_lock_step_ends_all() -> None:
    """Whatever the options say: what goes on without one rank is no group."""
    with launched(2, 1, is_moe=True, on_engine_death="continue") as engines:
        client = guest_client(engines.endpoints[0], config_of(2, is_moe=True), on_engine_death="continue")
        with client:
            os.kill(pids_of(engines)[1], signal.SIGKILL)
            eventually(lambda: not client.is_alive and not engines.is_alive, DEADLOCK)
