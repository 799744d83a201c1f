"""The client that runs the engine core in this process: no thread, no pipe, no serialisation.

Dropping the last reference does what ``shutdown`` does.  A ``KeyboardInterrupt`` that ends a call ends all requests, so
that the next call sees nothing of them; one that comes while that is done leaves it to the next call.

Threads: one at a time, as the engine core itself.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from engine_client.clients.base import EngineCoreClient
from engine_client.clients.card import CardRow, render_card
from engine_client.clients.interactive import release_older
from engine_client.clients.meter import TokenMeter
from engine_client.clients.metrics import EngineReading, Measured, Measurements
from engine_client.clients.utilities import SyncUtilities
from engine_client.config import ClientOptions
from engine_client.deadline import check_timeout
from engine_client.engine.core import EngineCore
from engine_client.engine.executor import progress_to, report_progress
from engine_client.errors import ClosedError
from engine_client.ipc.processes import vitals
from engine_client.ipc.stacks import own_stacks
from engine_client.ipc.status_page import EngineStatus
from engine_client.ipc.user_main import replay_guard
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, PauseMode
from engine_client.progress import READY
from engine_client.protocol.exception_fields import text_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["InprocClient", "InprocStream"]


class InprocClient(Measured, SyncUtilities, EngineCoreClient):
    """Builds an ``EngineCore`` with the arguments given, and steps it in ``get_output``.

    Args:
        args, kwargs: of ``EngineCore``: ``vllm_config, executor_class, log_stats, …``.
        options: of this library; only ``on_progress`` means something here.
    """

    def __init__(self, *args: Any, options: ClientOptions | None = None, **kwargs: Any) -> None:
        replay_guard()
        callback: Callable[[str, int, int], None] | None = options.on_progress if options else None
        with progress_to(callback or (lambda phase, done, total: None)):
            self.engine_core = EngineCore(*args, **kwargs)
            try:
                report_progress(READY, 1, 1)
            except BaseException:
                self.engine_core.shutdown()
                raise
        # For a client that is dropped, or left to the interpreter's end, without ``shutdown``.
        self._finalizer = weakref.finalize(self, _end, self.engine_core, os.getpid())
        self._utilities = self.engine_core.utilities()
        self._is_torn = False  # by an interrupt
        self._meter, self._began_at, self._last_error = TokenMeter(), time.monotonic(), ""
        self._streams: dict[str, deque[EngineCoreOutput]] = {}  # outputs that no stream has taken yet
        self._others: list[EngineCoreOutputs] = []  # what came while somebody waited for a stream
        self._dropped: list[tuple[str, deque[EngineCoreOutput]]] = []  # streams to end
        release_older(EngineCoreClient, self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'running' if self.is_alive else 'closed'} rank=0 {self.engine_core!r}>"

    def _repr_html_(self) -> str:
        """Return a table with how the engine is doing, for notebooks."""
        pid, state = os.getpid(), "ready" if self.is_alive else "closed"
        uptime = time.monotonic() - self._began_at if self.is_alive else None
        counts = self.engine_core.counts() if self.is_alive else (0, 0)
        row = CardRow(0, state, pid, vitals(pid)[0], uptime, *counts, self._meter.rate(), self._last_error)
        return render_card(f"{type(self).__name__} {state}, in this process", [row])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _start_over(self) -> None:
        self.engine_core.start_over()
        self._streams.clear()
        self._others.clear()
        self._is_torn = False

    def _ensure_open(self) -> None:
        if not self.is_alive:
            raise ClosedError("the engine client is closed")
        if self._is_torn:
            self._start_over()
        while self._dropped:
            self.end_stream(*self._dropped.pop())

    @property
    def is_alive(self) -> bool:
        """Tell whether the client is open."""
        return self._finalizer.alive

    def measure(self) -> Measurements:
        """Return how things are."""
        core = self.engine_core
        (waiting, running), counted = core.counts(), core.counters.read()
        is_sleeping, is_paused = core.pause_state()
        condition = "dead" if not self.is_alive else "sleeping" if is_sleeping else "paused" if is_paused else "ready"
        status = EngineStatus(
            steps=core.scheduler.num_steps,
            waiting=waiting,
            running=running,
            is_sleeping=is_sleeping,
            is_paused=is_paused,
            condition=condition,
        )
        model = str(getattr(getattr(core.vllm_config, "model_config", None), "model", ""))
        return Measurements(model, [EngineReading(status, counted)], None, waiting + running)

    def check_health(self, timeout: float | None = 10.0) -> None:
        """Raise ``ClosedError`` if the client is closed; there is nobody else to ask."""
        self._ensure_open()

    def dump_stacks(self, timeout: float | None = 10.0) -> dict[int, str]:
        """Return ``{0: stacks}``: the Python stacks of all threads of this process, from whichever thread.

        Raises:
            ClosedError: the client is closed.
        """
        check_timeout(timeout)
        if not self.is_alive:
            raise ClosedError("the engine client is closed")
        return {0: own_stacks()}

    def get_output(self) -> EngineCoreOutputs:
        """Do one step and return its outputs (none when there is nothing to do).

        Raises:
            ClosedError: the client is closed.
            Exception: whatever the executor raised.
        """
        try:
            self._ensure_open()
            return self._others.pop(0) if self._others else self._step()
        except Exception:
            raise
        except BaseException:  # an interrupt, in the middle of whatever the engine core was doing
            self._is_torn = True
            self._start_over()
            raise

    def _step(self) -> EngineCoreOutputs:
        """Do a step, give streams what is theirs, and return the rest."""
        try:
            outputs, model_executed = self.engine_core.step_fn()
        except Exception as error:
            self._last_error = f"{type(error).__name__}: {text_of(error)}"
            raise
        self.engine_core.post_step(model_executed)
        found = (outputs or {}).get(0) or EngineCoreOutputs()
        self._meter.add(sum(len(output.new_token_ids) for output in found.outputs))
        if self._streams:
            for output in found.outputs:
                if output.request_id in self._streams:
                    self._streams[output.request_id].append(output)
            found.outputs = [output for output in found.outputs if output.request_id not in self._streams]
        return found

    def stream(self, request: EngineCoreRequest) -> InprocStream:
        """Add a request and return an iterator over its outputs, which ``get_output`` does not return.

        The iterator steps the engine, so other requests go on meanwhile.  Closed or dropped before its end, it aborts
        the request.

        Raises:
            TypeError, ValueError: the request cannot be served as it is.
        """
        self.add_request(request)
        arrived: deque[EngineCoreOutput] = deque()
        self._streams[request.request_id] = arrived
        return InprocStream(self, request.request_id, arrived)

    def next_of(self, request_id: str, arrived: deque[EngineCoreOutput]) -> EngineCoreOutput | None:
        """Step until a stream has an output, and return that; None if there is no such stream any more."""
        self._ensure_open()
        while self._streams.get(request_id) is arrived:
            if arrived:
                output = arrived.popleft()
                if output.finished:
                    del self._streams[request_id]
                return output
            others = self._take_step()
            if others.outputs or others.scheduler_stats is not None:
                self._others.append(others)
        return None

    def end_stream(self, request_id: str, arrived: deque[EngineCoreOutput]) -> None:
        """Abort the request of a stream, unless it has ended."""
        if self._streams.get(request_id) is arrived:
            del self._streams[request_id]
            self.abort_requests([request_id])

    def drop_stream(self, request_id: str, arrived: deque[EngineCoreOutput]) -> None:
        """Have the next call end a stream; for finalizers, which may run in the middle of a step."""
        self._dropped.append((request_id, arrived))

    def _take_step(self) -> EngineCoreOutputs:
        try:
            return self._step()
        except Exception:
            raise
        except BaseException:  # as in get_output
            self._is_torn = True
            self._start_over()
            raise

    def add_request(self, request: EngineCoreRequest) -> None:
        """Give a request to the engine core.

        Raises:
            TypeError, ValueError: the request cannot be served as it is.
        """
        try:
            self._ensure_open()
            engine_request, wave = self.engine_core.preprocess_add_request(request)
            self.engine_core.add_request(engine_request, wave)
        except Exception:
            raise
        except BaseException:  # as in get_output
            self._is_torn = True
            self._start_over()
            raise

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests without further output; ids that are not in flight are ignored."""
        try:
            if request_ids and self.is_alive:
                self._ensure_open()
                self.engine_core.abort_requests(request_ids)
        except Exception:
            raise
        except BaseException:  # as in get_output
            self._is_torn = True
            self._start_over()
            raise

    def _utility(self, method: str) -> Callable[..., Any]:
        utility = self._utilities.get(method)
        if utility is None:
            raise AttributeError(f"the engine has no utility {method!r}; it has: {', '.join(sorted(self._utilities))}")
        return utility

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a registered utility of the engine core."""
        try:
            self._ensure_open()
            return self._utility(method)(*args)
        except Exception:
            raise
        except BaseException:  # as in get_output
            self._is_torn = True
            self._start_over()
            raise

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pause and free memory.

        Raises:
            ValueError: ``mode="wait"``: nothing could drain the requests while the caller waits.
        """
        if mode == "wait":
            raise ValueError("sleep(mode='wait') is not possible in-process: nothing drains requests while you wait")
        super().sleep(level, mode)

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pause.

        Raises:
            ValueError: ``mode="wait"``, as in ``sleep``.
        """
        if mode == "wait":
            raise ValueError("pause_scheduler(mode='wait') is not possible in-process: nothing drains requests")
        super().pause_scheduler(mode, clear_cache)

    def dp_engines_running(self) -> bool:
        """Return False: there is one engine."""
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Shut the engine core down; idempotent."""
        self.end_servers()
        if self._finalizer.detach() is not None:
            self.engine_core.shutdown()


class InprocStream:
    """Iterates over the outputs of one request; from ``InprocClient.stream(request)``."""

    def __init__(self, client: InprocClient, request_id: str, arrived: deque[EngineCoreOutput]) -> None:
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._client = client
        self._arrived = arrived

    def __repr__(self) -> str:
        return f"<InprocStream {self.request_id!r} {self.finish_reason or 'open'}>"

    def __iter__(self) -> InprocStream:
        return self

    def __next__(self) -> EngineCoreOutput:
        output = self._client.next_of(self.request_id, self._arrived)
        if output is None:
            raise StopIteration
        self.finish_reason = output.finish_reason
        return output

    def __enter__(self) -> InprocStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._client.drop_stream(self.request_id, self._arrived)

    def close(self) -> None:
        """Abort the request unless it has ended; idempotent."""
        self._client.end_stream(self.request_id, self._arrived)


def _end(engine_core: EngineCore, owner_pid: int) -> None:
    """Shut an engine core down, unless this is a forked copy of its process."""
    if os.getpid() == owner_pid:
        engine_core.shutdown()
