"""What a client can tell Prometheus, as text, when somebody asks.

::

    status pages, counters of engines ─┐
    arena, calls, restarts of the session ┴─▶ Measurements ─▶ a registry of its own ─▶ text

What the reference has too has its name, labels, type and buckets, behind a prefix of ours; what only this layer knows
stands beside it.  What takes counts or times of each request is left to the front-end above, which has them.  The
engines count anyhow and are not asked.  How long frames are under way is measured from the first call of ``metrics``
on: before it costs nothing.

``prometheus_client`` (``pip install engine_client[metrics]``) writes the text.  Nothing is registered globally, so
clients of one process do not meet.

Threads: any.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from engine_client.clients.frame_latency import LATENCY_LIMITS
from engine_client.clients.metrics_server import MetricsServer
from engine_client.ipc.counters import END_TO_END, FIRST_TOKEN, Distribution, Reading
from engine_client.ipc.status_page import EngineStatus
from engine_client.messages import FINISH_REASON_STRINGS

__all__ = ["EngineReading", "Measured", "Measurements", "render"]

_PREFIX: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


@dataclass(frozen=True)
class EngineReading:
    """One engine at one moment.

    Args:
        counted: None where the engine does not count.
        latency: of its frames, as ``FrameLatency.read``.
        restarts: how often it was started again.
    """

    status: EngineStatus
    counted: Reading | None = None
    latency: tuple[tuple[int, ...], float] = ((), 0.0)
    restarts: int = 0


@dataclass(frozen=True)
class Measurements:
    """A client at one moment.

    Args:
        model: name or path of the model.
        arena: bytes used, bytes there are, and buffers without room, of the memory that requests go through; None for
            a client that has none.
        in_flight: requests that were sent and have not ended.
        pending_calls: utility calls that wait for their answer.
    """

    model: str
    engines: Sequence[EngineReading]
    arena: tuple[int, int, int] | None = None
    in_flight: int = 0
    pending_calls: int = 0


class Measured(ABC):
    """What clients of every kind have for those who watch them; the subclass says how it is measured."""

    _servers: tuple[MetricsServer, ...] = ()

    @abstractmethod
    def measure(self) -> Measurements:
        """Return how things are, without asking an engine; from the first call on, frames are timed."""

    def metrics(self, prefix: str = "engine_client") -> str:
        """Return everything that is measured, in Prometheus's text format.

        It can be called at any time, from any thread, also when an engine is dead or the client closed.

        Args:
            prefix: of the names; ``"vllm"`` gives those that the reference has too the names that its dashboards
                expect.  That is what an engine counts as a whole, and the times to a request's first token and to its
                end; not its other histograms (``docs/monitoring.md`` has the list).

        Raises:
            ImportError: ``prometheus_client`` is not installed; says what to install.
            ValueError: no metric can have this prefix.
        """
        if not _PREFIX.fullmatch(str(prefix)):
            raise ValueError(f"prefix must be letters, digits and underscores, such as 'vllm', not {prefix!r}")
        return render(self.measure(), prefix)

    def serve_metrics(self, port: int = 0, host: str = "127.0.0.1", prefix: str = "engine_client") -> MetricsServer:
        """Answer Prometheus over HTTP, from a thread of its own, until ``close`` or the end of the client.

        Nobody is asked for a password: beyond this machine, put something in front of it that does.

        Args:
            port: to listen on; 0: any that is free (``MetricsServer.url`` tells which).
            host: address to listen on; other machines cannot reach the default.
            prefix: as in ``metrics``.

        Raises:
            ImportError, ValueError: as ``metrics``.
            OSError: the address cannot be listened on.
        """
        self.metrics(prefix)  # what is wrong with it is to be told here
        server = MetricsServer(self, prefix, host, port)
        self._servers = (*self._servers, server)
        return server

    def end_servers(self) -> None:
        """End what ``serve_metrics`` has started; for the end of the client."""
        servers, self._servers = self._servers, ()
        for server in servers:
            server.close()


def render(measurements: Measurements, prefix: str) -> str:
    """Return measurements as text.

    Raises:
        ImportError: ``prometheus_client`` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest  # noqa: PLC0415  # optional, and for this alone
    except ImportError as error:
        raise ImportError("metrics need prometheus_client: pip install engine_client[metrics]") from error
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(measurements, prefix))
    return str(generate_latest(registry).decode())


@dataclass(eq=False)
class _Collector:
    """Turns measurements into the families that ``prometheus_client`` writes."""

    measurements: Measurements
    prefix: str
    families: dict[str, Any] = field(default_factory=dict)

    def collect(self) -> Iterator[Any]:
        """Return all families."""
        self.families = {}
        model = self.measurements.model
        for engine in self.measurements.engines:
            labels = {"model_name": model, "engine": str(engine.status.rank)}
            self._status(engine, labels)
            if engine.counted is not None:
                self._counted(engine.counted, labels)
        self._client({"model_name": model})
        yield from self.families.values()

    def _status(self, engine: EngineReading, labels: dict[str, str]) -> None:
        status = engine.status
        self._gauge("num_requests_running", "Requests in the engine that run.", labels, status.running)
        self._gauge("num_requests_waiting", "Requests in the engine that wait.", labels, status.waiting)
        for state, value in _sleep_states(status).items():
            self._gauge("engine_sleep_state", _SLEEP_TEXT, {**labels, "sleep_state": state}, value)
        self._gauge("engine_up", "1: the engine lives and is ready.", labels, status.condition not in _DOWN)
        self._counter("engine_steps", "Steps that the engine has made.", labels, status.steps)
        self._counter("engine_restarts", "How often the engine was started again.", labels, engine.restarts)
        text = "Seconds from the end of a step in the engine to its outputs in the client's reader."
        self._histogram("frame_latency_seconds", text, labels, LATENCY_LIMITS, engine.latency)

    def _counted(self, counted: Reading, labels: dict[str, str]) -> None:
        self._gauge("kv_cache_usage_perc", "KV blocks that are in use; 1 is all.", labels, counted.kv_usage)
        self._counter("num_preemptions", "How often a request lost its KV blocks.", labels, counted.preemptions)
        self._counter("prompt_tokens", "Prompt tokens taken.", labels, counted.prompt_tokens)
        text = "Prompt tokens that were in the prefix cache."
        self._counter("prompt_tokens_cached", text, labels, counted.prefix_hits)  # no other cache has any
        self._counter("generation_tokens", "Tokens generated.", labels, counted.generation_tokens)
        self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", labels, counted.prefix_queries)
        self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", labels, counted.prefix_hits)
        for reason, number in zip(FINISH_REASON_STRINGS, counted.finished, strict=True):
            with_reason = {**labels, "finished_reason": reason}
            self._counter("request_success", "Requests that have ended, by reason.", with_reason, number)
        self._distribution("time_to_first_token_seconds", "first token", labels, FIRST_TOKEN, counted.first_token)
        self._distribution("e2e_request_latency_seconds", "end", labels, END_TO_END, counted.end_to_end)
        arena = counted.arena_used, counted.arena_capacity, counted.arena_fallbacks
        self._arena({**labels, "direction": "results"}, arena)

    def _client(self, labels: dict[str, str]) -> None:
        measured = self.measurements
        # Which engine has each is not kept apart, so there is no label ``engine``.
        text = "Requests that this client has sent and that have not ended, of all its engines together."
        self._gauge("num_requests_in_flight", text, labels, measured.in_flight)
        text = "Utility calls of this client that wait for an answer, of all its engines together."
        self._gauge("num_calls_pending", text, labels, measured.pending_calls)
        if measured.arena is not None:
            self._arena({**labels, "engine": "", "direction": "requests"}, measured.arena)

    def _arena(self, labels: dict[str, str], arena: tuple[int, int, int]) -> None:
        used, capacity, fallbacks = arena
        self._gauge("arena_used_bytes", "Shared memory in use.", labels, used)
        self._gauge("arena_capacity_bytes", "Shared memory that exists.", labels, capacity)
        self._counter("arena_fallbacks", "Buffers without room there, sent by the pipe.", labels, fallbacks)

    def _distribution(
        self, name: str, end: str, labels: dict[str, str], kind: Distribution, found: tuple[tuple[int, ...], float]
    ) -> None:
        text = f"Seconds from a request's arrival in the engine to its {end}."
        self._histogram(name, text, labels, kind.limits, found)

    def _family(self, make: Callable[..., Any], name: str, text: str, labels: dict[str, str]) -> Any:
        if name not in self.families:
            self.families[name] = make(f"{self.prefix}:{name}", text, labels=list(labels))
        return self.families[name]

    def _gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        from prometheus_client.core import GaugeMetricFamily  # noqa: PLC0415  # as in ``render``

        self._family(GaugeMetricFamily, name, text, labels).add_metric(list(labels.values()), value)

    def _counter(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        from prometheus_client.core import CounterMetricFamily  # noqa: PLC0415  # as in ``render``

        self._family(CounterMetricFamily, name, text, labels).add_metric(list(labels.values()), value)

    def _histogram(
        self,
        name: str,
        text: str,
        labels: dict[str, str],
        limits: tuple[float, ...],
        found: tuple[tuple[int, ...], float],
    ) -> None:
        from prometheus_client.core import HistogramMetricFamily  # noqa: PLC0415  # as in ``render``
        from prometheus_client.utils import floatToGoString  # noqa: PLC0415  # as in ``render``

        counts = found[0] or (0,) * (len(limits) + 1)
        ends = [*map(floatToGoString, limits), "+Inf"]
        family = self._family(HistogramMetricFamily, name, text, labels)
        family.add_metric(list(labels.values()), list(zip(ends, accumulate(counts), strict=True)), found[1])


def _sleep_states(status: EngineStatus) -> dict[str, float]:
    """Return the reference's states of sleep; of a sleeping engine it is not known which of the two it is."""
    asleep = math.nan if status.is_sleeping else 0.0
    return {"awake": float(not status.is_sleeping), "weights_offloaded": asleep, "discard_all": asleep}


_DOWN: Final = frozenset({"starting", "dead"})
_SLEEP_TEXT: Final = "awake is 1, or 0 while the engine sleeps; the others, its level, are then NaN: it is not known."
