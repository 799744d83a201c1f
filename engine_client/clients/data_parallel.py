"""The asyncio clients of several data-parallel ranks.

``DPLBAsyncMPClient`` starts all ranks and balances requests over them; a ``DPAsyncMPClient`` has one rank, and somebody
outside chooses among such clients.  Both are ``AsyncMPClient`` under names of the reference: the session's ``Router``
finds the rank for a request, and ``FanOut`` is a call to all of them.

Threads: as ``AsyncMPClient``.
"""

from __future__ import annotations

from typing import Any

from engine_client.clients.aio import AsyncMPClient
from engine_client.messages import EngineCoreOutputs

__all__ = ["DPAsyncMPClient", "DPLBAsyncMPClient"]


class DPAsyncMPClient(AsyncMPClient):
    """Serves one data-parallel rank, for a load balancer outside of it.

    Arguments and errors are those of ``AsyncMPClient``.
    """

    def get_core_engine_for_request(self, request: Any) -> bytes:
        """Return the engine for a request: its rank as two bytes, little endian.

        Raises:
            ValueError: the request asks for a rank that this client has not.
            EngineDeadError: no engine is left.
        """
        self._session.ensure_alive()
        return self._session.choose(request).rank.to_bytes(2, "little")


class DPLBAsyncMPClient(DPAsyncMPClient):
    """Serves all data-parallel ranks and balances requests over them.

    A request goes to the rank with the lowest score, 4 * waiting + running, or to its ``data_parallel_rank``; a utility
    goes to all ranks.  Arguments and errors are those of ``AsyncMPClient``.
    """

    @staticmethod
    async def process_engine_outputs(self: DPLBAsyncMPClient, outputs: EngineCoreOutputs) -> None:  # noqa: PLW0211  # as it is
        """Do nothing: the table of requests follows the outputs that callers get (the reference counts here)."""

    @staticmethod
    async def eep_process_engine_core_notification(
        self: DPLBAsyncMPClient,  # noqa: PLW0211  # as it is
        notification_data: tuple[str, int],
    ) -> None:
        """Do nothing: engines that join or leave say so by READY and GOODBYE (the reference has messages for it)."""
