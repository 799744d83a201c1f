"""What the multi-process clients share: start, the READY hand-over, and the end.

Invariants: I6 (the finalizer holds ``BackgroundResources``, which holds the session; neither knows the client), I9 (the
caller's config changes only by ``_apply_ready_response``), I11 (the finalizer is registered before anything is
acquired).

Threads: constructed by one thread; everything else from any.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine_client.clients.base import EngineCoreClient
from engine_client.clients.caller import Caller
from engine_client.clients.card import render_card
from engine_client.clients.conditions import card_rows, conditions
from engine_client.clients.elastic import Elastic
from engine_client.clients.endpoint import Endpoint, RankEnd
from engine_client.clients.events import EventStream
from engine_client.clients.front_ends import FrontEnds
from engine_client.clients.guest import announce, attach, check_endpoint
from engine_client.clients.interactive import release_older
from engine_client.clients.measuring import measure_session
from engine_client.clients.metrics import Measured, Measurements
from engine_client.clients.restart import Restarter
from engine_client.clients.session import Session
from engine_client.clients.stacks import dump_stacks
from engine_client.clients.starter import Starter
from engine_client.config import ClientOptions, ready_timeout, shutdown_grace
from engine_client.deadline import Deadline, check_timeout
from engine_client.errors import EngineDeadError
from engine_client.ipc.aside import run_aside
from engine_client.ipc.status_page import EngineStatus
from engine_client.ipc.user_main import replay_guard
from engine_client.messages import EngineCoreReadyResponse
from engine_client.protocol.wire import PING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BackgroundResources", "MPClient"]


@dataclass
class BackgroundResources:
    """What the finalizer releases.  The fields are the reference's; those that only ZMQ needs stay None.

    ``engine_manager`` is the process group.  Owned by the client and its finalizer; ends by being called.
    """

    ctx: Any
    engine_manager: Any = None
    coordinator: Any = None
    output_socket: Any = None
    input_socket: Any = None
    first_req_send_socket: Any = None
    first_req_rcv_socket: Any = None
    stats_update_socket: Any = None
    output_queue_task: Any = None
    stats_update_task: Any = None
    shutdown_path: str | None = None
    engine_dead: bool = False
    session: Session | None = field(default=None, kw_only=True, repr=False)

    def __call__(self) -> None:
        """End the engines and release everything; idempotent."""
        self.engine_dead = True
        if self.session is not None:
            self.session.close(self.session.grace, quiet=True)

    def validate_alive(self, frames: Any) -> None:
        """Raise ``EngineDeadError`` if ``frames`` is the reference's single ENGINE_CORE_DEAD frame."""
        if len(frames) == 1 and bytes(getattr(frames[0], "buffer", frames[0])) == b"ENGINE_CORE_DEAD":
            self.engine_dead = True
            raise EngineDeadError


class MPClient(Measured, EngineCoreClient):
    """Base of the clients whose engine core lives in a process of its own.

    Args:
        asyncio_mode: the subclass offers coroutines.
        vllm_config: ``EngineConfig`` or any object with its attributes; the READY hand-over changes it.
        executor_class: called with ``vllm_config`` in the engine process; must be importable there.
        log_stats: attach scheduler statistics to outputs.
        client_addresses: endpoint of engines that another process has launched (``launch_core_engines``); None: launch
            some.
        options: of this library.

    Raises:
        StartupError: an engine did not come up; everything that was started is gone.
        HandshakeTimeout: (also a TimeoutError) not within the ready timeout.
        SerializationError: the configuration or the executor class cannot be sent; nothing was started.
    """

    _front_ends: FrontEnds | None = None
    """Those in other processes, for a launcher."""

    def __init__(
        self,
        asyncio_mode: bool,  # the reference's parameter; the colours are subclasses here
        vllm_config: Any,
        executor_class: Callable[..., Any],
        log_stats: bool,
        client_addresses: Any = None,
        *,
        options: ClientOptions | None = None,
    ) -> None:
        replay_guard()
        self.vllm_config = vllm_config
        self.options = options or ClientOptions()
        shutdown_grace(self.options)  # wrong in the environment, it is to be told here and not by a finalizer
        self.resources = BackgroundResources(ctx=None)
        self._finalizer = weakref.finalize(self, self.resources)
        try:
            self.engines_running = False
            self.stats_update_address: str | None = None
            self.engine_ranks_managed = self._managed_ranks()
            self.core_engines = [rank.to_bytes(2, "little") for rank in self.engine_ranks_managed]
            self.core_engine = self.core_engines[0]
            if client_addresses is None:
                self._session = self._start(executor_class, log_stats)
            else:
                self._session = self._attach(client_addresses)
            self._caller = Caller(self._session)
        except BaseException:
            if self.resources.session is not None:
                run_aside(self.resources.session.abandon)  # a second interrupt waits until nothing is left
            self._finalizer.detach()
            raise
        release_older(EngineCoreClient, self)

    def _managed_ranks(self) -> list[int]:
        """Return the ranks of the engines that are this client's."""
        return managed_ranks(self.vllm_config.parallel_config)

    def __repr__(self) -> str:
        session = self._session
        engines = ", ".join(f"rank={link.rank} pid={link.pid}" for link in session.links.values())
        return f"<{type(self).__name__} {session.state} {engines}>"

    def _repr_html_(self) -> str:
        """Return a table with how each engine is doing, for notebooks; without asking the engines."""
        session = self._session
        return render_card(f"{type(self).__name__} {session.state}", card_rows(session))

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled: it owns processes; make another client over there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- start ---------------------------------------------------------------------------------------------------------

    def _start(self, executor_class: Callable[..., Any], log_stats: bool) -> Session:
        """Start the engines; everything is registered with the finalizer before it can fail."""
        deadline = Deadline(ready_timeout(self.options))
        self._starter = Starter(self.options, self.vllm_config, executor_class, log_stats=log_stats)
        session = self._starter.undisturbed(self._acquire)
        session.main_importable = self._starter.main_importable
        links = self._starter.launch(session, self.engine_ranks_managed, self._front_ends)
        self.responses = self._starter.make_ready(links, deadline)
        session.group.record_descendants()
        self._elastic = Elastic(session, self._starter)
        if self.options.on_engine_death == "restart":
            session.on_loss = Restarter(session, self._elastic).lost
        self._serve(session, self.responses)
        return session

    def _serve(self, session: Session, responses: Mapping[int, EngineCoreReadyResponse]) -> None:
        for _, response in sorted(responses.items()):
            self._apply_ready_response(response)
        session.max_model_len = self.vllm_config.model_config.max_model_len
        session.serve()

    def _attach(self, addresses: Any) -> Session:
        """Use engines that another process has launched."""
        endpoint = check_endpoint(addresses)
        session, ends = run_aside(lambda: self._take(endpoint))
        self.client_count, self.client_index = endpoint.count, endpoint.index
        self.engine_ranks_managed = [end.rank for end in ends]
        self.core_engines = [rank.to_bytes(2, "little") for rank in self.engine_ranks_managed]
        self.core_engine = self.core_engines[0]
        self.vllm_config.cache_config.num_gpu_blocks = None  # the launcher, whose copy it may be, has added them up
        self._serve(session, {end.rank: end.ready_response() for end in ends})
        announce(session)
        return session

    def _take(self, endpoint: Endpoint) -> tuple[Session, Sequence[RankEnd]]:
        """Take an endpoint; as ``_acquire``."""
        session = Session(self.options, _dead_flag(self.resources), start=endpoint.index)
        self.resources.session = session
        one_only = is_balanced_outside(self.vllm_config.parallel_config)
        return session, attach(session, endpoint, self.engine_ranks_managed if one_only else None)

    def _acquire(self) -> Session:
        """Acquire what all engines share; an interrupt may come before it has an owner."""
        session = Session(self.options, _dead_flag(self.resources))
        self.resources.session = session
        self.resources.engine_manager = session.group
        if self.options.start_method != "exec":
            from engine_client.ipc.multiproc import before_multiprocessing_exit  # noqa: PLC0415  # as the launcher does

            session.cancel_exit_hook = before_multiprocessing_exit(self._finalizer)
        session.acquire(self.engine_ranks_managed, lock_step=needs_lock_step(self.vllm_config))
        return session

    def _apply_ready_response(self, payload: EngineCoreReadyResponse) -> None:
        """Take over an engine's real capacities into the caller's config, as the reference does."""
        model, cache = self.vllm_config.model_config, self.vllm_config.cache_config
        if model.max_model_len is None or payload.max_model_len < model.max_model_len:
            model.max_model_len = payload.max_model_len
        cache.num_gpu_blocks = (cache.num_gpu_blocks or 0) + payload.num_gpu_blocks
        cache.block_size = payload.block_size
        for name in ("kv_cache_size_tokens", "kv_cache_max_concurrency"):
            if getattr(cache, name, None) is None:
                setattr(cache, name, getattr(payload, name))
        if self.stats_update_address is None:
            self.stats_update_address = payload.dp_stats_address

    # -- what every colour has -----------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Tell, without asking the engine, whether it can still be used."""
        return self._session.state == "running"

    @property
    def utility_results(self) -> dict[int, Any]:
        """Return the pending utility calls: call id to what becomes of the call (``Reply``, much like a future)."""
        return self._session.calls.replies

    def ensure_alive(self) -> None:
        """Raise ``EngineDeadError`` if the engine is dead or the client closed."""
        self._session.ensure_alive()

    def check_health(self, timeout: float | None = 10.0) -> None:
        """Make sure that the engine answers.

        Raises:
            EngineDeadError: it is dead, or the client is closed; or it did not answer, and
                ``ClientOptions.kill_unresponsive`` is set.
            EngineStalledError: it lives but did not answer within ``timeout`` seconds; says what it was doing.
        """
        deadline = Deadline(check_timeout(timeout))
        ping = self._caller.begin(PING)
        try:
            self._caller.send(ping, PING, (), deadline)
            ping.wait(deadline)
        except TimeoutError:
            late, error = ping.late, ping.stalled_error(deadline)
            for link in self._session.give_up_on(late, error):
                self._session.wait_over(link)
            verdict = self._session.verdict_on(late, error)
            raise verdict from verdict.__cause__
        finally:
            ping.discard()

    def engine_status(self) -> list[EngineStatus]:
        """Return what each engine's status page says, without asking the engines."""
        self._session.refuse_copies()
        return [status for status, _ in conditions(self._session)]

    def dump_stacks(self, timeout: float | None = 10.0) -> dict[int, str]:
        """Return, by rank, the Python stacks of all threads of each engine, whatever the engines are doing.

        Nothing of the engine's own has to work for that, neither its loop nor the interpreter: it is for one that is
        stuck.  It goes on as before.

        Args:
            timeout: seconds.

        Raises:
            EngineDeadError: an engine is dead, or the client is closed.
            EngineStalledError: an engine lives but wrote nothing within ``timeout`` seconds: it is stopped.
            RuntimeError: the engines are another process's, whose client can ask them; or an engine's own code has
                taken the signal that asks.
        """
        return dump_stacks(self._session, check_timeout(timeout))

    def measure(self) -> Measurements:
        """Return how things are, without asking an engine; from the first call on, frames are timed."""
        return measure_session(self._session, str(getattr(self.vllm_config.model_config, "model", "")))

    def engine_events(self) -> EventStream:
        """Return an iterator over what becomes of the engines: first the state of each, then every change."""
        self._session.refuse_copies()
        session = self._session
        return EventStream(
            session.events,
            lambda: [(status.rank, status.condition, detail) for status, detail in conditions(session)],
        )

    def allocate(self, nbytes: int) -> memoryview:
        """Return writable shared memory, to be filled in place and sent without a copy.

        The memory is the library's again once the request that carries it was sent and all views of it are dropped.

        Args:
            nbytes: size in bytes.

        Raises:
            EngineDeadError: there is no engine.
            MemoryError: there is no room.
        """
        self._session.ensure_alive()
        assert self._session.writer is not None  # from the start to the end of a session
        return self._session.writer.allocate(nbytes)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engines and release everything; idempotent, from any thread.

        Calls that wait in other threads end with ``ClosedError`` within the same bound.

        Args:
            timeout: seconds for the polite end before force; None: ``VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS``, or 5.
        """
        grace = shutdown_grace(self.options, timeout)
        self.end_servers()
        self._session.close(grace)
        self.resources.engine_dead = True
        self._finalizer.detach()

    def dp_engines_running(self) -> bool:
        """Tell whether ranks in lock-step are in a wave; independent engines have none."""
        group = self._session.lock_step
        return self.engines_running if group is None else group.page.is_running()

    def start_engine_core_monitor(self) -> None:
        """Do nothing: the reader thread watches the engines from the start (the reference has a thread for it)."""

    def add_pending_message(self, tracker: Any, msg: Any) -> None:
        """Do nothing: a message is sent or copied when ``add_request`` returns (the reference keeps it until sent)."""

    def free_pending_messages(self) -> None:
        """Do nothing, as ``add_pending_message``."""


def managed_ranks(parallel_config: Any) -> list[int]:
    """Return the ranks of the engines that a client of its own has: all of them, or one if somebody else balances."""
    size = parallel_config.data_parallel_size
    if size == 1:
        return [getattr(parallel_config, "data_parallel_index", 0)]
    return [parallel_config.data_parallel_rank] if is_balanced_outside(parallel_config) else list(range(size))


def is_balanced_outside(parallel_config: Any) -> bool:
    """Tell whether somebody else chooses among ranks, each of which has a client of its own."""
    return parallel_config.data_parallel_size > 1 and (
        getattr(parallel_config, "data_parallel_external_lb", False)
        or getattr(parallel_config, "data_parallel_rank_local", None) is not None
    )


def needs_lock_step(vllm_config: Any) -> bool:
    """Tell whether the ranks step together: those of a mixture of experts do."""
    size = vllm_config.parallel_config.data_parallel_size
    return size > 1 and bool(getattr(vllm_config.model_config, "is_moe", False))


def _dead_flag(resources: BackgroundResources) -> Callable[[], None]:
    """Return what sets ``engine_dead`` without keeping the resources (and so the session) in a cycle of its own."""
    reference = weakref.ref(resources)

    def set_flag() -> None:
        with suppress(AttributeError):  # the resources are collected already
            reference().engine_dead = True  # type: ignore[union-attr]  # see the line above

    return set_flag
