"""The asyncio client behind blocking calls, for a command that does one thing at a time.

Threads: the main thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Awaited"]

T = TypeVar("T")


class Awaited:
    """Runs coroutines of an asyncio client in an event loop of its own; ends with ``shutdown``.

    Args:
        client: an ``AsyncMPClient``.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._loop = asyncio.new_event_loop()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(coroutine)

    def add_request(self, request: Any) -> None:
        """Send a request."""
        self._wait(self._client.add_request_async(request))

    def get_output(self) -> Any:
        """Wait for the next outputs."""
        return self._wait(self._client.get_output_async())

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of every worker."""
        return self._wait(self._client.collective_rpc_async(method, args=args))

    def shutdown(self) -> None:
        """End the engines and the loop."""
        self._client.shutdown()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
