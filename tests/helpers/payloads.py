"""What tests of payloads share: requests that carry arrays, what engines do with them, and who holds what memory."""

from __future__ import annotations

import gc
import os
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from engine_client import EngineCoreRequest, PoolingParams, SyncMPClient
from engine_client.engine.front_end import FrontEnd
from engine_client.ipc import arena_reader
from engine_client.ipc.arena import ArenaWriter
from engine_client.ipc.channel import Channel
from engine_client.protocol.frames import Segment
from helpers.clients import make_request

__all__ = [
    "BAD_SEGMENTS",
    "MIB",
    "Poison",
    "answer_with_checksum",
    "arena_figures",
    "arenas_of",
    "break_mapping",
    "channel_of",
    "lie",
    "lie_here",
    "pattern",
    "pool_request",
    "refuse_poison",
    "results_used",
    "stop_collecting",
    "take_one_output",
    "writer_of",
]

MIB = 1 << 20


def pattern(seed: int, nbytes: int) -> Any:
    """Return an array of this many bytes that is like no other seed's."""
    numbers = np.arange(nbytes, dtype=np.uint32)
    numbers *= np.uint32(2654435761)
    numbers += np.uint32(seed * 2654435761 & 0xFFFFFFFF)
    return (numbers >> np.uint32(13)).astype(np.uint8)


def pool_request(request_id: str, payload: Any, **fields: Any) -> EngineCoreRequest:
    """Return a request whose one output is its payload."""
    return make_request(
        request_id,
        1,
        None,
        prompt_embeds=payload,
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        **fields,
    )


def take_one_output(client: Any, request_id: str, timeout: float = 30.0) -> Any:
    """Read on until a request has ended; return its last output."""
    for _ in range(10_000):
        outputs = client.get_output(timeout=timeout) if hasattr(client, "resources") else client.get_output()
        for output in outputs.outputs:
            if output.request_id == request_id and output.finished:
                return output
    raise AssertionError(f"no output of {request_id}")


class Poison:
    """Raises ``error`` where it is unpickled, once it has left the process that made it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _poison, (self.error, os.getpid())


def _poison(error: BaseException, maker: int) -> Any:
    if os.getpid() != maker:
        raise error
    return Poison(error)


def answer_with_checksum(core: Any) -> None:
    """Have a scripted engine pool a request to the checksum of its payload, and to the payload."""
    real = core.advance

    def advance(running: Any) -> Any:
        index, output = real(running)
        payload = output.pooling_output
        output.pooling_output = zlib.crc32(payload), payload
        return index, output

    core.advance = advance


def refuse_poison(core: Any) -> None:
    """Have a scripted engine refuse requests whose id ends in ``bad``."""
    real = core.preprocess_add_request

    def preprocess(request: Any) -> Any:
        if request.request_id.endswith("bad"):
            raise ValueError(f"{request.request_id} is refused")
        return real(request)

    core.preprocess_add_request = preprocess


def arena_figures(core: Any = None) -> tuple[int, int, int]:
    """Return used, capacity and limit of the memory for results; in the engine, by ``collective_rpc``."""
    del core
    gc.collect()
    [front_end] = [value for value in gc.get_objects() if type(value) is FrontEnd]
    writer = front_end.channel._writer
    return writer.used, writer.capacity, writer._room.limit


def writer_of(client: SyncMPClient) -> ArenaWriter:
    """Return the memory that requests go through."""
    assert client._session.writer is not None
    return client._session.writer


def channel_of(client: SyncMPClient) -> Channel:
    """Return the pipe to the engine."""
    return client._session.links[0].channel


def arenas_of(client: SyncMPClient) -> tuple[int, int]:
    """Return the descriptors of the memory for requests and for results."""
    return writer_of(client)._room.fd, client._session.links[0].arena._fd


def stop_collecting(core: object) -> None:
    """Have the engine collect no garbage any more."""
    del core
    gc.disable()


def results_used(core: object) -> int:
    """Return, in the engine, how much of the memory for results is taken; collects no garbage."""
    del core
    [front_end] = [value for value in gc.get_objects() if type(value) is FrontEnd]
    return front_end.channel._writer.used


BAD_SEGMENTS: dict[str, Callable[[Segment], Segment]] = {
    "beyond the end": lambda s: s._replace(offset=1 << 40),
    "longer than the memory": lambda s: s._replace(length=1 << 35),
    "in the table": lambda s: s._replace(offset=0),
    "negative length": lambda s: s._replace(length=-5),
    "no such stamp": lambda s: s._replace(stamp=s.stamp + (1 << 24)),
    "for another reader": lambda s: s._replace(stamp=s.stamp ^ (1 << 14)),
    "sum overflows": lambda s: s._replace(offset=(1 << 63) - 1),
}


def lie(core: object, how: str) -> None:
    """Have the engine send one segment that is not true."""
    del core
    [front_end] = [value for value in gc.get_objects() if type(value) is FrontEnd]
    _lie_once(front_end.channel._writer, how)


def lie_here(client: SyncMPClient, how: str) -> None:
    """Have the client send one."""
    _lie_once(writer_of(client), how)


def _lie_once(writer: Any, how: str) -> None:
    real = writer.put

    def put(data: memoryview, party: int, into: list[Segment]) -> Segment:
        writer.put = real
        into.append(BAD_SEGMENTS[how](real(data, party)))
        return into[-1]

    writer.put = put


def break_mapping(core: Any, name: str, error: BaseException, numbers: Iterable[int] = (0,)) -> Callable[[], None]:
    """Have these calls of a function that leases go through (``map_memory``, ``make_owner``, …) raise, in this process.

    By ``collective_rpc`` in the engine; returns what undoes it (there, nothing that can be sent: it lasts).
    """
    real = getattr(arena_reader, name)
    numbers = set(numbers)
    lock = threading.Lock()
    calls = iter(range(1 << 62))

    def broken(*args: Any, **kwargs: Any) -> Any:
        with lock:
            number = next(calls)
        if number in numbers:
            raise error
        return real(*args, **kwargs)

    def undo() -> None:
        setattr(arena_reader, name, real)

    setattr(arena_reader, name, broken)
    return undo if core is None else None  # type: ignore[return-value]
