"""Engines for several front-end processes, from the launcher's side."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import pytest

from engine_client import ClosedError, CoreEngines, StartupError, launch_core_engines
from engine_client.clients.front_ends import FrontEnds
from engine_client.testing.scripted import Script
from helpers.clients import make_request, pids_of
from helpers.guests import config_of, finish, guest_client, launched, options_of
from helpers.procs import wait_gone


def test_the_launcher_has_utilities_and_takes_no_requests() -> None:
    """It can ask all ranks, and tells how they are; requests are the front-ends'."""
    with launched(2, 1) as engines:
        assert isinstance(engines, CoreEngines)
        assert [end.index for end in engines.endpoints] == [0]
        engines.check_health()
        assert engines.call_utility("echo", 5) == 5
        assert engines.call_utility("echo", 5, ranks=[1, 0]) == [5, 5]
        assert engines.get_supported_tasks() == ("generate",)
        assert len(engines.engine_status()) == 2
        with pytest.raises(ValueError, match="boom"):
            engines.call_utility("fail", ValueError("boom"))
        for refused in (lambda: engines.add_request(make_request("a")), engines.get_output):
            with pytest.raises(NotImplementedError):
                refused()


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)])
def test_a_wrong_number_of_front_ends_is_refused(count: Any, error: type[Exception]) -> None:
    """Before anything is started."""
    with pytest.raises(error, match="client_count"):
        launch_core_engines(config_of(1), None, False, client_count=count)  # type: ignore[arg-type]


def test_a_restarted_engine_would_have_no_front_ends() -> None:
    """So that policy is refused, with what to do instead."""
    with pytest.raises(ValueError, match=r'use "continue" or "shutdown"'):
        launch_core_engines(config_of(1), None, False, options=options_of(on_engine_death="restart"))  # type: ignore[arg-type]


def test_shutdown_ends_the_engines_and_closes_the_endpoints() -> None:
    """Idempotent; what comes later is told that the launcher is closed."""
    with launched(2, 2) as engines:
        pids = pids_of(engines)
        engines.shutdown()
        engines.shutdown()
        for pid in pids:
            wait_gone(pid)
        for endpoint in engines.endpoints:
            with pytest.raises(ValueError, match="used or closed"):
                _ = endpoint.pass_fds
        with pytest.raises(ClosedError):
            engines.call_utility("echo", 1)


def test_engines_that_do_not_come_up_leave_nothing() -> None:
    """The cause is the error, and no endpoint, process or descriptor is left."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match="boom"), launched(2, 3, Script(start_error=ValueError("boom"))):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_endpoints_that_cannot_be_made_end_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where descriptors run out last, too, nothing is left."""

    def refuse(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(FrontEnds, "endpoints", refuse)
    with pytest.raises(OSError, match="Too many open files"), launched(2, 3):
        pass


def test_all_ranks_are_launched_where_each_has_a_front_end_of_its_own() -> None:
    """A balancer outside chooses among the front-ends; the configuration of the first may be the launcher's."""
    config = config_of(3)
    config.parallel_config.data_parallel_external_lb = True
    with launch_core_engines(config, None, False, client_count=3, options=options_of()) as engines:  # type: ignore[arg-type]
        assert engines.engine_ranks_managed == [0, 1, 2]
        for rank, endpoint in enumerate(engines.endpoints):
            config.parallel_config.data_parallel_rank = rank
            with guest_client(endpoint, config) as client:
                assert pids_of(client) == [pids_of(engines)[rank]]
                assert finish(client, ["a"], 3)[0] == {"a": 3}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("method", ["exec", "spawn", "fork", "forkserver"])
def test_engines_hold_their_own_ends_alone(method: Any) -> None:
    """However they are started, none has a front-end's end of a channel, or another rank's."""
    with launched(2, 2, start_method=method) as engines:
        held = [
            {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")} for pid in pids_of(engines)
        ]
        mine = {os.readlink(f"/proc/self/fd/{end.channel}") for e in engines.endpoints for end in e.ranks}
        assert not mine.intersection(*held[:1])
        assert not mine.intersection(*held[1:])
        assert not [name for name in held[0] & held[1] if name.startswith("socket:")]
        with guest_client(engines.endpoints[1]) as client:
            assert finish(client, ["a"], 3)[0] == {"a": 3}


def test_statistics_go_to_front_ends() -> None:
    """With outputs, and not to the launcher, where nobody would take them."""

    async def first_output(client: Any) -> Any:
        await client.add_request_async(make_request("a", 3))
        return await client.get_output_async(timeout=20)

    engines = launch_core_engines(config_of(1), None, True, options=options_of())  # type: ignore[arg-type]
    with engines, guest_client(engines.endpoints[0]) as client:
        assert asyncio.run(first_output(client)).scheduler_stats is not None
