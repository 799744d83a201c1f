"""The asyncio clients of several data-parallel ranks.

``DPLBAsyncMPClient`` starts all ranks and balances requests over them; a ``DPAsyncMPClient`` has one rank, and somebody
outside chooses among such clients.  Both are ``AsyncMPClient`` under names of the reference: the session's ``Router``
finds the rank for a request, and ``FanOut`` is a call to all of them.

Threads: as ``AsyncMPClient``.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from engine_client.clients.aio import AsyncMPClient
from engine_client.clients.calls import Reply
from engine_client.clients.elastic import Elastic
from engine_client.errors import LocalProtocolError
from engine_client.ipc.group_page import MOST_RANKS
from engine_client.messages import EngineCoreOutputs, EngineCoreReadyResponse

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

    async def scale_elastic_ep(self, new_data_parallel_size: int) -> None:
        """Change the number of ranks while requests are served; none is lost.

        New ranks get requests as soon as they are ready; they are paused if the others are.  Dead ones that others have
        survived are started again.  Ranks that leave, which are those with the highest numbers, get no more and finish
        what they have first; their outputs may be taken later.  Cancelling the await does not undo the change.

        Args:
            new_data_parallel_size: how many ranks there are to be.

        Raises:
            TypeError, ValueError: that is no number of ranks.
            LocalProtocolError: the engines are another process's.
            RuntimeError: another change is under way.
            StartupError: a new rank did not come up; everything is as it was.
            EngineDeadError: the client ended meanwhile.
        """
        size = new_data_parallel_size
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"new_data_parallel_size must be a number of ranks, not {size!r}")
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(f"new_data_parallel_size must be 1 to {MOST_RANKS}, not {size}")
        if self._session.is_guest:
            raise LocalProtocolError("the engines belong to the process that has launched them, which alone can scale")
        reply = Reply()
        # A thread of its own, which neither the end of the loop waits for, nor the client's: it may take long.
        arguments = (weakref.ref(self), self._elastic, size, reply)
        threading.Thread(target=_scale, args=arguments, name=f"engine-client-scale-{os.getpid()}", daemon=True).start()
        await self._mailboxes.wait(reply)
        reply.result()

    def _scaled(self, size: int, joined: dict[int, EngineCoreReadyResponse], left: list[int]) -> None:
        """Tell in the configuration what there is now."""
        gone = [self.responses.pop(rank) for rank in (*joined, *left) if rank in self.responses]
        self.responses.update(joined)
        change = sum(ready.num_gpu_blocks for ready in joined.values()) - sum(ready.num_gpu_blocks for ready in gone)
        self.vllm_config.cache_config.num_gpu_blocks += change
        self.vllm_config.parallel_config.data_parallel_size = size
        self.engine_ranks_managed = sorted(self._session.links)
        self.core_engines = [rank.to_bytes(2, "little") for rank in self.engine_ranks_managed]


def _scale(client: weakref.ref[DPLBAsyncMPClient], elastic: Elastic, size: int, reply: Reply) -> None:
    """Change the number of ranks of a client that may be dropped meanwhile; tell how that went."""
    try:
        joined, left = elastic.scale(size)
        owner = client()
        if owner is not None:
            owner._scaled(size, joined, left)  # noqa: SLF001  # its own part
        del owner  # perhaps the last reference: whoever waits for the reply has another
    except BaseException as error:  # noqa: BLE001  # raised by whoever waits
        reply.set_exception(error)
    else:
        reply.set_result(None)
