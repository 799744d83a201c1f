"""Front-end processes that do what a test tells them.

Nothing here imports pytest: such a process is to start quickly.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from engine_client import (
    ClientOptions,
    EngineConfig,
    EngineCoreClient,
    EngineDeadError,
    FinishReason,
    launch_core_engines,
)
from engine_client.deadline import Deadline
from engine_client.testing.scripted import TARGET, Script
from helpers.clients import make_request
from helpers.timing import DEADLOCK

__all__ = [
    "Guest",
    "add",
    "await_death",
    "config_of",
    "finish",
    "guest_client",
    "launched",
    "options_of",
    "run",
    "shake",
]

T = TypeVar("T")


def config_of(ranks: int, script: Script | None = None, *, is_moe: bool = False) -> EngineConfig:
    """Return the configuration of so many scripted engines."""
    config = EngineConfig(additional_config={"script": script or Script()})
    config.parallel_config.data_parallel_size = ranks
    config.model_config.is_moe = is_moe
    return config


def options_of(**options: Any) -> ClientOptions:
    return ClientOptions(**{"engine_target": TARGET, **options})


@contextmanager
def launched(ranks: int = 1, count: int = 1, script: Script | None = None, **options: Any) -> Iterator[Any]:
    """Yield scripted engines for so many front-ends; ``options`` are ``ClientOptions``', and ``is_moe``."""
    config = config_of(ranks, script, is_moe=options.pop("is_moe", False))
    with launch_core_engines(config, None, False, client_count=count, options=options_of(**options)) as engines:  # type: ignore[arg-type]  # a scripted engine has no executor
        yield engines


def guest_client(endpoint: Any, config: EngineConfig | None = None, **options: Any) -> Any:
    """Return a client of engines that somebody else has launched."""
    config = config or config_of(len(endpoint.ranks))
    return EngineCoreClient.make_async_mp_client(config, None, False, endpoint, options=options_of(**options))  # type: ignore[arg-type]  # as above


class Guest:
    """A front-end process, and a pipe for what it is told."""

    def __init__(
        self, endpoint: Any, config: EngineConfig | None = None, *, method: str = "spawn", **options: Any
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(endpoint, config, options, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def ask(self, function: Callable[..., Any], *args: Any) -> None:
        """Have it call ``function(client, *args)``."""
        self.pipe.send((function, args))

    def answer(self) -> Any:
        """Return what the call has returned, or raise that it failed."""
        assert self.pipe.poll(DEADLOCK), "the front-end does not answer"
        failed, value = self.pipe.recv()
        assert not failed, value
        return value

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.ask(function, *args)
        return self.answer()

    def kill(self) -> None:
        """End it at once; it is reaped."""
        self.process.kill()
        self.process.join(DEADLOCK)

    def end(self) -> int | None:
        """Have it shut its client down and end; return its exit code."""
        with suppress(OSError):  # it has ended
            self.pipe.send(None)
        self.process.join(DEADLOCK)
        code = self.process.exitcode
        self.process.close()
        self.pipe.close()
        return code

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.kill()
        self.end()


_loops: list[asyncio.AbstractEventLoop] = []
"""The one of a front-end process: what was asked for in a loop that is closed is aborted."""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, in a front-end process in the loop that lasts as long as that."""
    return _loops[0].run_until_complete(coroutine) if _loops else asyncio.run(coroutine)


def _serve(endpoint: Any, config: EngineConfig | None, options: dict[str, Any], pipe: Any) -> None:
    _loops.append(asyncio.new_event_loop())
    client = guest_client(endpoint, config, **options)
    try:
        while (work := pipe.recv()) is not None:
            function, args = work
            try:
                answer = False, function(client, *args)
            except Exception as error:  # noqa: BLE001  # it is the test's to judge
                answer = True, f"{type(error).__name__}: {error}"
            pipe.send_bytes(pickle.dumps(answer))
    except (EOFError, BrokenPipeError):
        pass  # the test is over
    finally:
        client.shutdown()


def add(client: Any, names: Iterable[str], tokens: int) -> None:
    """Send requests."""

    async def main() -> None:
        for name in names:
            await client.add_request_async(make_request(name, tokens))

    run(main())


def finish(client: Any, names: list[str], tokens: int) -> tuple[dict[str, int], float]:
    """Send requests and read until they have ended; return the tokens of each, and the longest silence in between."""

    async def main() -> tuple[dict[str, int], float]:
        found = dict.fromkeys(names, 0)
        for name in names:
            await client.add_request_async(make_request(name, tokens))
        left, longest, last = len(names), 0.0, time.monotonic()
        while left:
            for output in (await client.get_output_async(timeout=DEADLOCK)).outputs:
                if output.request_id in found:  # it may have others, too
                    found[output.request_id] += len(output.new_token_ids)
                    left -= output.finished
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        return found, longest

    return run(main())


def await_death(client: Any) -> tuple[float, str]:
    """Read outputs until there are none any more; return when, on the clock of the machine, and why."""

    async def main() -> tuple[float, str]:
        try:
            while True:
                await client.get_output_async(timeout=DEADLOCK)
        except EngineDeadError as error:
            return time.monotonic(), str(error)

    return run(main())


class Shaker:
    """Requests of one front-end that are aborted at random, each accounted for."""

    def __init__(self, client: Any, count: int, tokens: int, seed: int) -> None:
        self.client = client
        self.tokens = tokens
        self.random = random.Random(seed)
        self.counts = {f"r{number}": 0 for number in range(count)}  # tokens of each request
        self.left = set(self.counts)  # neither complete nor aborted
        self.aborted = 0
        self.complete = 0

    async def run(self) -> None:
        await asyncio.gather(self.send(), self.receive())
        await self.client.call_utility_async("echo", 1)  # behind all that there was
        with suppress(TimeoutError):
            while True:  # what is left may say that waves are complete
                late = (await self.client.get_output_async(timeout=0.05)).outputs
                assert not late, f"late: {late}"

    async def send(self) -> None:
        sent: list[str] = []
        for name in self.counts:
            await self.client.add_request_async(make_request(name, self.tokens))
            sent.append(name)
            if self.random.random() < 0.3:
                await self.abort(self.random.sample(sent[-20:], min(len(sent), 2)))
            if self.random.random() < 0.02:
                await asyncio.sleep(0.001)

    async def abort(self, victims: list[str]) -> None:
        victims = [name for name in victims if name in self.left]
        self.aborted += len(victims)
        self.left.difference_update(victims)
        await self.client.abort_requests_async(victims)

    async def receive(self) -> None:
        deadline = Deadline(DEADLOCK + len(self.counts) / 20)
        while self.left:
            assert not deadline.expired(), f"missing: {sorted(self.left)}"
            with suppress(TimeoutError):  # the last of them may have been aborted
                for output in (await self.client.get_output_async(timeout=0.2)).outputs:
                    self.take(output)

    def take(self, output: Any) -> None:
        name = output.request_id
        assert name in self.left, f"an output after the end of {name}: {output}"
        self.counts[name] += len(output.new_token_ids)
        if output.finished:
            assert (output.finish_reason, self.counts[name]) == (FinishReason.LENGTH, self.tokens), output
            self.left.remove(name)
            self.complete += 1


def shake(client: Any, count: int, tokens: int, seed: int) -> tuple[int, int]:
    """Send requests, abort some of them at any moment, and account for each.

    Returns:
        How many are complete, and how many were aborted.

    Raises:
        AssertionError: an output came twice, too late, or of nobody; tokens are missing, or a request's end is.
    """
    shaker = Shaker(client, count, tokens, seed)
    run(shaker.run())
    assert len(client._session.in_flight) == 0
    return shaker.complete, shaker.aborted
