"""Payloads in shared memory: what is kept outlives everything, and what is sent is what was there at the call.

BC-25, BC-32, BC-36.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
import zlib
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from engine_client import EngineDeadError, FinishReason, RemoteCallError, SyncMPClient
from engine_client.testing.faults import frozen
from engine_client.testing.inventory import Inventory
from helpers.clients import collect, pid_of, scripted_client
from helpers.payloads import (
    MIB,
    Poison,
    answer_with_checksum,
    arena_figures,
    channel_of,
    pattern,
    pool_request,
    results_used,
    stop_collecting,
    take_one_output,
    writer_of,
)
from helpers.procs import run_script, wait_gone
from helpers.scenes import Waiter, methods
from helpers.timing import eventually

pytestmark = pytest.mark.crash

CONSUMERS: dict[str, Callable[[Any], Any]] = {
    "ndarray": lambda data: data,
    "memoryview": memoryview,
    "bytes": lambda data: data.tobytes(),
    "array": lambda data: array("B", data.tobytes()),
    "structured": lambda data: data[: len(data) // 12 * 12].view([("a", ">u4"), ("b", "<f8")]),
    "fortran": lambda data: np.asfortranarray(data.reshape(4, -1)),
}


def content(value: Any) -> bytes:
    """Return the bytes of whatever kind of payload."""
    return value.tobytes("A") if isinstance(value, np.ndarray) else bytes(value)


def used(client: SyncMPClient) -> int:
    """Return the bytes of request memory that are taken."""
    return writer_of(client).used


# -- BC-25 -------------------------------------------------------------------------------------------------------------


@methods("spawn")
@pytest.mark.parametrize("end", ["shutdown", "sigkill", "exit0"])
def test_bc25_a_block_outlives_those_who_attached(end: str, method: str) -> None:
    """The owner reads and sends its block on after the engine that attached to it has ended, in whatever way."""
    client = scripted_client(start_method=method)
    block = client.allocate(MIB)
    block[:] = pattern(1, MIB)
    expected = bytes(block)
    for _ in range(3):
        assert client.call_utility("echo", block).tobytes() == expected
    result = client.call_utility("echo", block)
    pid = pid_of(client)
    if end == "shutdown":
        client.shutdown()
    else:
        with pytest.raises(EngineDeadError):
            client.call_utility("die", end)
        client.shutdown()
    wait_gone(pid)
    assert bytes(block) == expected
    assert result.tobytes() == expected, "a result outlives the engine that made it"
    block[0] ^= 1  # it is still the owner's to write
    with scripted_client(start_method=method) as other:
        assert other.call_utility("echo", block).tobytes() == bytes(block)
        assert other.call_utility("echo", result).tobytes() == expected


def test_bc25_a_third_process_attaches_and_goes() -> None:
    """A process that maps the owner's memory and exits, or is killed, takes nothing with it."""
    with scripted_client() as client:
        block = client.allocate(MIB)
        block[:] = pattern(2, MIB)
        expected = bytes(block)
        kept = client.call_utility("echo", block)
        for end in ("exit", "sigkill"):
            assert client.collective_rpc(_attach_elsewhere, args=(end,)) == [True]
            assert client.call_utility("echo", block).tobytes() == expected
        assert kept.tobytes() == bytes(block) == expected


def _attach_elsewhere(core: object, end: str) -> bool:
    """Have a child of the engine map every memory that the engine has, with a resource tracker of its own, and end."""
    import subprocess
    import sys

    del core
    script = (
        "import mmap, os, sys\n"
        "from multiprocessing import resource_tracker; resource_tracker.ensure_running()\n"
        "maps = []\n"
        "for name in os.listdir(f'/proc/{os.getppid()}/fd'):\n"
        "    path = f'/proc/{os.getppid()}/fd/{name}'\n"
        "    if 'memfd' in os.readlink(path) and os.stat(path).st_size:\n"
        "        maps.append(mmap.mmap(os.open(path, os.O_RDWR), 0))\n"
        "        maps[-1][:10]\n"
        "assert len(maps) >= 3, maps\n"
        "if sys.argv[1] == 'sigkill': os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script, end], capture_output=True, check=False)
    return done.returncode == (-9 if end == "sigkill" else 0) and not done.stderr


# -- BC-32 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arena_limit", [0, 1 << 30])
@pytest.mark.parametrize("end", ["shutdown", "drop", "sigkill"])
def test_bc32_what_was_received_outlives_client_and_engine(end: str, arena_limit: int) -> None:
    """Kept results of every kind are whole after 1000 more, the end of the client and of the engine, and read-only."""
    client = scripted_client(arena_limit=arena_limit)
    sent = {name: make(pattern(index, 384 * 1024)) for index, (name, make) in enumerate(CONSUMERS.items())}
    expected = {name: content(value) for name, value in sent.items()}
    kept = {name: client.call_utility("echo", value) for name, value in sent.items()}
    client.add_request(pool_request("kept", pattern(77, 300_000)))
    kept["output"], expected["output"] = take_one_output(client, "kept").pooling_output, content(pattern(77, 300_000))
    for number in range(1000 if end == "shutdown" and arena_limit else 60):
        payload = number.to_bytes(2, "little") * 40_000
        assert client.call_utility("echo", payload) == payload
    pid = pid_of(client)
    if end == "sigkill":
        with pytest.raises(EngineDeadError):
            client.call_utility("die", "sigkill")
    if end != "drop":
        client.shutdown()
    del client
    gc.collect()
    wait_gone(pid)
    assert {name: content(value) for name, value in kept.items()} == expected
    for name in ("ndarray", "memoryview", "structured", "fortran", "output"):
        with pytest.raises((ValueError, TypeError)):
            kept[name][0] = 0  # read-only: both sides may share it
    kept["array"][0] ^= 1  # a copy by nature


@pytest.mark.parametrize("how", ["last", "slice", "cycle", "thread"])
def test_bc32_memory_is_given_back_with_the_last_view(how: str) -> None:
    """The engine's block is free once the last view of a view is dropped, also in a cycle or by another thread."""
    with scripted_client() as client:
        result = client.call_utility("echo", pattern(3, MIB))
        figures = client.collective_rpc(arena_figures)
        assert figures[0][0] >= MIB
        view: Any = memoryview(result)[100:200].cast("B")[1:50]
        expected = bytes(view)
        del result
        if how == "slice":
            view = np.frombuffer(view, np.uint8)[::7]
            expected = expected[::7]
        assert client.collective_rpc(arena_figures)[0][0] >= MIB
        assert bytes(view) == expected
        if how == "cycle":
            cycle: list[Any] = [view]
            cycle.append(cycle)
            del cycle
        elif how == "thread":
            box = [view]
            thread = threading.Thread(target=box.clear)
            del view
            thread.start()
            thread.join()
            view = None
        del view
        gc.collect()
        assert client.collective_rpc(arena_figures)[0][0] == 0


def test_bc32_nothing_is_mapped_when_all_is_dropped() -> None:
    """After the end of the client its memory stays mapped for the views there are, and is gone with the last one."""
    before = Inventory.take().mappings
    client = scripted_client()
    views = [client.call_utility("echo", pattern(number, MIB)) for number in range(3)]
    block = client.allocate(MIB)
    client.shutdown()
    del client
    gc.collect()
    assert len(Inventory.take().mappings - before) == 2, "one memory of requests, one of results"
    views.clear()
    del block
    gc.collect()
    assert Inventory.take().mappings - before == frozenset()


@pytest.mark.parametrize("error", [ValueError("decode fails"), SystemExit("decode exits"), MemoryError("decode ends")])
def test_bc32_a_decode_that_fails_half_way(error: BaseException) -> None:
    """A message of two tensors that cannot be decoded raises its own error, either way, and releases both."""
    first, second = pattern(4, MIB), pattern(5, MIB)
    with scripted_client() as client:
        client.collective_rpc(stop_collecting)
        kept = []
        for _ in range(3):
            with pytest.raises(RemoteCallError, match="decode") as caught:  # here
                client.collective_rpc(_send_poison, args=(error,))
            assert isinstance(caught.value.__cause__, type(error))
            kept.append(caught)
            with pytest.raises(Exception, match="decode") as caught:  # there
                client.call_utility("echo", (first, Poison(error), second))
            assert isinstance(caught.value, type(error)) or type(error).__name__ in str(caught.value)
            kept.append(caught)
            client.add_request(pool_request("there", (first, Poison(error), second)))
            output = take_one_output(client, "there")
            assert output.finish_reason is FinishReason.ERROR
            assert str(error) in output.stop_reason
        eventually(lambda: used(client) == 0, 2.0)  # though the errors are kept, and no collection is forced over there
        assert client.collective_rpc(results_used) == [0]
        assert np.array_equal(client.call_utility("echo", first), first)


def _send_poison(core: object, error: BaseException) -> Any:
    del core
    return pattern(6, MIB), Poison(error), pattern(7, MIB)


def test_bc32_views_that_go_at_interpreter_exit() -> None:
    """Results that are globals, in cycles, thread-locals or other threads' at exit are quiet, client open or not."""
    script = """
        import sys, threading, time
        from helpers.clients import scripted_client
        from helpers.payloads import MIB, pattern
        client = scripted_client()
        kept = [client.call_utility("echo", pattern(number, MIB)) for number in range(5)]
        local = threading.local()
        local.kept = memoryview(kept[0])[5:]
        class Holder:
            def __del__(self):
                assert bytes(self.view[:3]) == self.expected
        holder = Holder()
        holder.view, holder.expected, holder.itself = memoryview(kept[1]), bytes(kept[1][:3]), holder
        block = client.allocate(MIB)
        cycle = [block[1:], kept[2]]
        cycle.append(cycle)
        def hold(view):
            time.sleep(60)
        threading.Thread(target=hold, args=(kept[3],), daemon=True).start()
        if sys.argv[1] == "closed":
            client.shutdown()
        print("done")
    """
    for state in ("open", "closed"):
        assert run_script(script, state).check(0).stdout == "done\n"


def test_bc32_a_block_dies_with_its_last_holder() -> None:
    """A view that is the only thing left of client and engine keeps its memory, and frees it when it goes."""
    client = scripted_client()
    result = client.call_utility("echo", pattern(15, 4 * MIB))
    base = result
    while isinstance(base.base, np.ndarray):
        base = base.base
    client.shutdown()
    gone = threading.Event()
    weakref.finalize(base, gone.set)
    assert np.array_equal(result, pattern(15, 4 * MIB))
    del result, base
    assert gone.is_set()


# -- BC-36 -------------------------------------------------------------------------------------------------------------


def _stream(client: SyncMPClient, number: int, count: int, most: int, sent: dict[str, int]) -> None:
    """Send requests from one buffer, which is overwritten the moment that each call returns."""
    dice = random.Random(number)
    buffer = np.empty(most, np.uint8)
    source = pattern(number, most + 4096)
    for index in range(count):
        size = int(1024 * (most / 1024) ** (dice.random() ** 2))
        start = dice.randrange(4096)
        view = buffer[:size]
        view[:] = source[start : start + size]
        if index % 50 == 49:  # the way without a copy: a block of its own, which is not touched again
            with suppress(MemoryError):
                own = client.allocate(size)
                own[:] = view
                view = np.frombuffer(own, np.uint8)
        name = f"{number}-{index}"
        sent[name] = zlib.crc32(view)
        client.add_request(pool_request(name, view))
        buffer[:size] = 0xFF


def check_stream(client: SyncMPClient, threads: int, count: int, most: int) -> None:
    """Send from some threads at once and check all that comes back, holding results for a random time."""
    sent: dict[str, int] = {}
    held: list[tuple[str, Any]] = []
    dice = random.Random(99)
    senders = [
        Waiter(lambda number=number: _stream(client, number, count, most, sent), again=False)  # type: ignore[misc]
        for number in range(threads)
    ]
    limit = client.options.arena_limit
    writer = writer_of(client)
    ended = 0
    while ended < threads * count:
        for output in client.get_output(timeout=10).outputs:
            checksum, echo = output.pooling_output
            assert checksum == sent[output.request_id], "the engine read something else than was sent"
            held.append((output.request_id, echo))
            del echo
            ended += 1
        del output
        assert writer.capacity <= limit
        dice.shuffle(held)
        while len(held) > 40 or (held and ended == threads * count):
            name, echo = held.pop()
            assert zlib.crc32(echo) == sent[name], "a result was changed while it was held"
            del echo
    for sender in senders:
        sender.join(60)
        assert sender.error is None, sender.error
    del senders
    _, capacity, engine_limit = client.collective_rpc(arena_figures)[0]
    assert capacity <= engine_limit == limit
    gc.collect()
    eventually(lambda: used(client) <= MIB * 4)  # the scripted engine remembers its last request
    eventually(lambda: client.collective_rpc(arena_figures)[0][0] == 0)


@pytest.mark.parametrize(
    ("count", "most", "limit"),
    [
        pytest.param(400, 4 * MIB, 64 * MIB, id="1200"),
        pytest.param(2000, MIB, 64 * MIB, id="6000", marks=[pytest.mark.full, pytest.mark.slow]),
        pytest.param(6667, 4 * MIB, 64 * MIB, id="20000", marks=pytest.mark.stress),
    ],
)
def test_bc36_a_buffer_may_be_overwritten_when_the_call_returns(count: int, most: int, limit: int) -> None:
    """Three threads overwrite each buffer at once: each checksum and echo is of the content at the time of the call."""
    with scripted_client(arena_limit=limit) as client:
        client.call_utility("set_echo_tensor", True)
        client.collective_rpc(answer_with_checksum)
        check_stream(client, 3, count, most)


def test_bc36_an_arena_that_is_always_full() -> None:
    """With room for a few blocks only, memory and pipe take turns, and nothing is mixed up."""
    with scripted_client(arena_limit=2 * MIB) as client:
        client.call_utility("set_echo_tensor", True)
        client.collective_rpc(answer_with_checksum)
        check_stream(client, 3, 150, 2 * MIB)
        channel = channel_of(client)
        assert channel.in_memory > 0
        assert channel.in_pipe > 0


@pytest.mark.parametrize("seconds", [0.5, pytest.param(5.0, marks=[pytest.mark.full, pytest.mark.slow])])
def test_bc36_a_slow_reader(seconds: float) -> None:
    """What an engine that stands still has not read yet is not overwritten by what is sent meanwhile."""
    with scripted_client(arena_limit=32 * MIB) as client:
        client.call_utility("set_echo_tensor", True)
        client.collective_rpc(answer_with_checksum)
        buffer = np.empty(MIB, np.uint8)
        sent = {}
        with frozen(pid_of(client)):
            for number in range(50):
                buffer[:] = pattern(number, MIB)
                sent[str(number)] = zlib.crc32(buffer)
                client.add_request(pool_request(str(number), buffer))
            time.sleep(seconds)
        found = collect(client, 50)
        for name, [output] in found.items():
            checksum, echo = output.pooling_output
            assert checksum == sent[name] == zlib.crc32(echo)


def test_bc36_a_reader_that_dies_with_a_segment() -> None:
    """What a dead engine held is given back once, with all the rest; blocks of the owner are still the owner's."""
    before = Inventory.take().mappings
    client = scripted_client()
    client.collective_rpc(_hold_requests)
    block = client.allocate(MIB)
    block[:] = pattern(8, MIB)
    for number in range(5):
        client.add_request(pool_request(str(number), pattern(number, MIB)))
    client.add_request(pool_request("block", block))
    assert len(collect(client, 6)) == 6
    assert used(client) >= 6 * MIB
    os.kill(pid_of(client), signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        client.get_output()
    eventually(lambda: used(client) == 0)
    with pytest.raises(EngineDeadError):
        client.call_utility("echo", block)
    assert bytes(block) == pattern(8, MIB).tobytes()
    del block
    client.shutdown()
    gc.collect()
    assert Inventory.take().mappings - before == frozenset()


def _hold_requests(core: Any) -> None:
    """Have the engine keep every request that it was sent."""
    real = core.preprocess_add_request
    core.held = []

    def preprocess(request: Any) -> Any:
        core.held.append(request)
        return real(request)

    core.preprocess_add_request = preprocess
