"""Engines for several front-end processes.

::

    launcher: launch_core_engines ─▶ CoreEngines ── endpoints ──▶ front-end process 0 … n-1: AsyncMPClient(…, endpoint)
                     │ starts, watches, ends                             │
                     └──────────▶ engines ◀──── requests and outputs ────┘

The engines end with the launcher.  A front-end that ends has its requests aborted; the others notice nothing.

Threads: as ``SyncMPClient``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from engine_client.clients.endpoint import Endpoint
from engine_client.clients.front_ends import FrontEnds
from engine_client.clients.guest import refuse_restart
from engine_client.clients.mp import MPClient
from engine_client.clients.utilities import SyncUtilities
from engine_client.config import ClientOptions
from engine_client.deadline import Deadline, check_timeout
from engine_client.ipc.aside import run_aside

__all__ = ["CoreEngines", "launch_core_engines"]


class CoreEngines(SyncUtilities, MPClient):
    """Owns engines that front-ends in other processes use; ends them with ``shutdown``, or with this process.

    It has the utilities of a client (each goes to all ranks), ``engine_status`` and ``check_health``, and takes no
    requests of its own.

    Args:
        endpoints: one for each front-end, by client index; give them to the front-ends' processes.
    """

    def __init__(  # what it is built from
        self,
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        client_count: int,
        *,
        options: ClientOptions | None = None,
    ) -> None:
        if options is not None:
            refuse_restart(options)
        self.endpoints: list[Endpoint] = []
        try:
            run_aside(lambda: self._prepare(client_count))
            super().__init__(False, vllm_config, executor_class, log_stats, options=options)
            try:
                run_aside(self._make_endpoints)
            except BaseException:
                self.shutdown(0)
                raise
        finally:
            if self._front_ends is not None:
                self._front_ends.close()

    def _prepare(self, client_count: int) -> None:
        self._front_ends = FrontEnds(client_count)

    def _make_endpoints(self) -> None:
        session = self._session
        assert self._front_ends is not None
        self.endpoints = self._front_ends.endpoints(session.links, self.responses, session.lock_step)

    def _managed_ranks(self) -> list[int]:
        parallel = self.vllm_config.parallel_config
        # All of them, also where each is for a front-end of its own (``data_parallel_external_lb``).
        return list(range(parallel.data_parallel_size)) if parallel.data_parallel_size > 1 else super()._managed_ranks()

    def call_utility(
        self, method: str, *args: Any, timeout: float | None = None, ranks: Iterable[int] | None = None
    ) -> Any:
        """Call a utility of every engine and return the result of the first; see ``SyncMPClient.call_utility``."""
        deadline = Deadline(check_timeout(timeout))
        fan_out = self._caller.begin(method, ranks)
        try:
            self._caller.send(fan_out, method, args, deadline)
            values = fan_out.wait(deadline)
        finally:
            fan_out.discard()
        return values[0] if ranks is None else values

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engines and release everything, endpoints included; idempotent, from any thread.

        Args:
            timeout: seconds for the polite end before force; None: ``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``, or 5.
        """
        for endpoint in self.endpoints:
            endpoint.close()
        super().shutdown(timeout)


def launch_core_engines(
    vllm_config: Any,
    executor_class: Callable[..., Any],
    log_stats: bool,
    *,
    client_count: int = 1,
    options: ClientOptions | None = None,
) -> CoreEngines:
    """Start all ranks of a configuration for ``client_count`` front-ends; return when they are ready.

    Args:
        vllm_config: ``EngineConfig`` or any object with its attributes; the READY hand-over changes it.
        executor_class: called with ``vllm_config`` in each engine process; must be importable there.
        log_stats: attach scheduler statistics to outputs.
        client_count: how many front-ends there will be.
        options: of this library; None: ``ClientOptions()``.

    Raises:
        ValueError: ``client_count`` is below 1, or ``options.on_engine_death`` is ``"restart"``.
        StartupError: an engine did not come up; everything that was started is gone.
    """
    if isinstance(client_count, bool) or not isinstance(client_count, int):
        raise TypeError(f"client_count must be a number of front-ends, not {client_count!r}")
    if client_count < 1:
        raise ValueError(f"client_count must be at least 1, not {client_count}")
    return CoreEngines(vllm_config, executor_class, log_stats, client_count, options=options)
