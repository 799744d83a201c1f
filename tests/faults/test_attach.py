"""Memory that cannot be mapped where it is to be read costs one call or request (BC-64)."""

from __future__ import annotations

import errno
import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_client import FinishReason, RemoteCallError, SyncMPClient
from helpers.clients import collect, make_request, scripted_client
from helpers.payloads import MIB, arena_figures, break_mapping, pattern, pool_request, take_one_output, writer_of
from helpers.scenes import Waiter
from helpers.timing import eventually, took_at_most

pytestmark = pytest.mark.crash


def used(client: SyncMPClient) -> int:
    """Return the bytes of request memory that are taken."""
    return writer_of(client).used


FAILURES = [
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError("no memory for the mapping"),
    OSError(errno.EMFILE, "Too many open files"),
    OSError(errno.EACCES, "Permission denied"),
]


PLACES = ("map_memory", "Table", "make_owner")
"""What a reader of the arena calls to attach: for the data, for the table, for a range."""

_CASES = [
    pytest.param(what, error, id=f"{what}-{errno.errorcode.get(getattr(error, 'errno', None), 'memory')}", marks=marks)
    for number, what in enumerate(PLACES)
    for other, error in enumerate(FAILURES)
    for marks in [() if other in (number, number + 1) else (pytest.mark.full,)]
]


def check_works(client: SyncMPClient, payload: Any) -> None:
    """Check that a call and a request with this payload are answered."""
    assert np.array_equal(client.call_utility("echo", payload), payload)
    client.add_request(pool_request("again", payload))
    assert np.array_equal(take_one_output(client, "again").pooling_output, payload)


@pytest.mark.parametrize(("what", "error"), _CASES)
def test_bc64_the_engine_cannot_attach_once(what: str, error: BaseException) -> None:
    """An attach that fails in the engine fails that call or request alone; the retry works, and nothing is leaked."""
    payload = pattern(9, MIB)
    text = str(error.args[-1])
    with scripted_client() as client:
        client.collective_rpc(_break_once, args=(what, error))
        with pytest.raises(type(error), match=text):
            client.call_utility("echo", payload)
        eventually(lambda: used(client) == 0)
        check_works(client, payload)
    with scripted_client() as client:
        client.collective_rpc(_break_once, args=(what, error))
        client.add_request(make_request("other", 5))
        client.add_request(pool_request("a", payload))
        found = collect(client, 2)
        assert found["a"][-1].finish_reason is FinishReason.ERROR
        assert text in found["a"][-1].stop_reason
        assert found["other"][-1].finish_reason is FinishReason.LENGTH
        eventually(lambda: used(client) == 0)
        check_works(client, payload)


def _break_once(core: Any, what: str, error: BaseException) -> Callable[[], None]:
    # A mapping that fails is tried once more, smaller.
    return break_mapping(core, what, error, (0, 1) if what == "map_memory" else (0,))


@pytest.mark.parametrize("kind", ["utility", "request"])
@pytest.mark.parametrize(("what", "error"), _CASES)
def test_bc64_the_client_cannot_attach_once(what: str, error: BaseException, kind: str) -> None:
    """An attach that fails in the client fails that call or request alone; what is kept of the error holds nothing."""
    payload = pattern(10, MIB)
    text = str(error.args[-1])
    with scripted_client() as client:
        undo = _break_once(None, what, error)
        try:
            if kind == "utility":
                with pytest.raises(RemoteCallError, match=text) as caught:
                    client.call_utility("echo", payload)
                assert isinstance(caught.value.__cause__, type(error))
            else:
                client.add_request(pool_request("a", payload))
                output = take_one_output(client, "a")
                assert output.finish_reason is FinishReason.ERROR
                assert text in output.stop_reason
            assert client.collective_rpc(arena_figures)[0][0] == 0
            check_works(client, payload)
        finally:
            undo()


def test_bc64_three_readers_of_one_block() -> None:
    """One block sent three times: the second attach fails, the first and the third have it, and so has the owner."""
    with scripted_client() as client:
        block = client.allocate(MIB)
        block[:] = pattern(11, MIB)
        client.collective_rpc(_break_second)
        client.call_utility("set_echo_tensor", True)
        for number in range(3):
            client.add_request(pool_request(str(number), block))
        found = collect(client, 3)
        assert found["1"][-1].finish_reason is FinishReason.ERROR
        for name in ("0", "2"):
            assert found[name][-1].pooling_output.tobytes() == bytes(block)
        assert client.call_utility("echo", block).tobytes() == pattern(11, MIB).tobytes()


def _break_second(core: Any) -> None:
    break_mapping(core, "make_owner", OSError(errno.ENOMEM, "Cannot allocate memory"), (1,))


def _limit_address_space(core: object, more: int | None) -> None:
    """Leave this process so much address space, or lift the limit."""
    import resource

    del core
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if more is None:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))


def test_bc64_the_engine_has_no_address_space() -> None:
    """Under RLIMIT_AS in the engine a 64 MiB payload fails with the reason; small ones and the retry work."""
    payload = pattern(12, 64 * MIB)
    with scripted_client() as client:
        client.collective_rpc(_limit_address_space, args=(16 * MIB,))
        with pytest.raises((MemoryError, OSError)):
            client.call_utility("echo", payload)
        assert client.call_utility("echo", b"small") == b"small"
        eventually(lambda: used(client) == 0)
        client.collective_rpc(_limit_address_space, args=(None,))
        assert np.array_equal(client.call_utility("echo", payload), payload)


def test_bc64_an_interrupt_between_open_and_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the result is being mapped ends that call only; the next one maps and gets its own result."""
    from engine_client.ipc import arena_reader

    real = arena_reader.map_memory
    interrupted = []

    def slow(fd: int, size: int) -> Any:
        if not interrupted:
            interrupted.append(size)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return real(fd, size)

    monkeypatch.setattr(arena_reader, "map_memory", slow)
    with scripted_client() as client:
        payload = pattern(13, MIB)
        with took_at_most(5), pytest.raises(KeyboardInterrupt):
            client.call_utility("echo", payload)
        assert interrupted
        assert np.array_equal(client.call_utility("echo", payload), payload)
        gc.collect()
        eventually(lambda: client.collective_rpc(arena_figures)[0][0] == 0)
        assert client.utility_results == {}


def test_bc64_an_interrupt_of_the_engine_while_it_maps() -> None:
    """SIGINT to an engine that is attaching is a request to end, not a broken attach: calls end, nothing is left."""
    client = scripted_client()
    client.collective_rpc(_interrupt_in_map)
    began = time.monotonic()
    waiter = Waiter(lambda: client.call_utility("echo", pattern(14, MIB)))
    waiter.join(5)
    assert time.monotonic() - began < 2.0
    assert waiter.error is not None
    client.shutdown()


def _interrupt_in_map(core: object) -> None:
    from engine_client.ipc import arena_reader

    del core
    real = arena_reader.map_memory

    def interrupted(fd: int, size: int) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return real(fd, size)

    arena_reader.map_memory = interrupted
