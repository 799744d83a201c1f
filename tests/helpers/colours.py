"""Clients of every colour with the same methods, so that one scenario can be told of all of them.

An asyncio client is driven by an event loop on a thread of its own: ``get_output`` is ``get_output_async`` there, and
so on.  Nothing here imports pytest: scripts use it, too.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from engine_client import ClientOptions, EngineCoreClient, SyncMPClient
from helpers.timing import DEADLOCK

__all__ = ["COLOURS", "Driven", "make_coloured"]

COLOURS = ("sync", "async", "dp", "external")
"""Blocking; asyncio; asyncio with two data-parallel ranks; with one of two, for a load balancer outside."""


def make_coloured(colour: str, config: Any, executor: Any, log_stats: bool, options: ClientOptions) -> Any:
    """Return a client of this colour, which has the methods of ``SyncMPClient``."""
    if colour == "sync":
        return SyncMPClient(config, executor, log_stats, options=options)
    if colour in ("dp", "external") and config.parallel_config.data_parallel_size == 1:
        config.parallel_config.data_parallel_size = 2
    if colour == "external":
        config.parallel_config.data_parallel_external_lb = True
    return Driven(EngineCoreClient.make_client(True, True, config, executor, log_stats, options=options))


class Driven:
    """An asyncio client; its coroutines run in one loop, whichever thread calls.

    The loop ends with ``shutdown``, or when this is collected; calls that come later have a loop for themselves.  An
    interrupt cancels the coroutine that it interrupts.
    """

    def __init__(self, client: Any) -> None:
        self.asynchronous = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), daemon=True)
        self._lock = threading.Lock()  # guards _active and _is_over
        self._active = 0
        self._is_over = False
        self._pid = os.getpid()
        weakref.finalize(self, _stop, self._loop)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        coroutine = getattr(self.asynchronous, f"{name}_async", None)
        return getattr(self.asynchronous, name) if coroutine is None else partial(self._call, coroutine)

    def __repr__(self) -> str:
        return repr(self.asynchronous)

    def __enter__(self) -> Driven:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._pid != os.getpid():
            return asyncio.run(function(*args, **kwargs))
        with self._lock:
            is_over = self._is_over
            self._active += not is_over
        if is_over:
            return asyncio.run(function(*args, **kwargs))
        try:
            future = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)
            try:
                return future.result()
            finally:
                future.cancel()  # if this was an interrupt
        finally:
            with self._lock:
                self._active -= 1

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the client down, then end the loop, once those that still wait in it have been told."""
        try:
            self.asynchronous.shutdown(timeout)
        finally:
            with suppress(RuntimeError):  # it is closed
                if self._pid == os.getpid():
                    self._loop.call_soon_threadsafe(self._end)
                    self._thread.join(DEADLOCK)

    def _end(self) -> None:
        with self._lock:
            self._is_over = self._active == 0
        if self._is_over:
            self._loop.stop()
        else:
            self._loop.call_later(0.002, self._end)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)
