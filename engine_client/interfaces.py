"""What the rooms expect of each other where one side must not know the other's class.

``EngineCore`` is what the engine process drives; ``engine_client.engine.core.EngineCore`` is one implementation, a
test's scripted engine or an adapter of another server are others.  ``ProcessHandle`` is one engine process, however it
was started; it has the interface of ``multiprocessing.Process``.

Threads: declarations only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Union, runtime_checkable

from engine_client.messages import EngineCoreOutputs, EngineCoreReadyResponse, EngineCoreRequest

__all__ = ["Buffer", "EngineContext", "EngineCore", "LockStepCore", "PausableCore", "ProcessHandle", "ProgressCallback"]

Buffer = Union[bytes, bytearray, memoryview]
ProgressCallback = Callable[[str, int, int], None]
"""Called as ``callback(phase, done, total)``; ``total`` is 0 where it is unknown."""


@dataclass(frozen=True)
class EngineContext:
    """What an engine is told beside its configuration.

    Args:
        rank: data-parallel rank.
        progress: reports start-up progress to the client.
        options: ``ClientOptions.for_engine()``.
        executor_failed: ends the engine; called, from any thread, when an executor's own workers have failed.
        counters: where the engine counts what it does (``ipc.counters.Counters``); None: nobody looks.
    """

    rank: int = 0
    progress: ProgressCallback = lambda phase, done, total: None
    options: Mapping[str, Any] = field(default_factory=dict)
    executor_failed: Callable[[], None] = lambda: None
    counters: Any = None


class EngineCore(Protocol):
    """What the busy loop needs of an engine.  All calls come from one thread."""

    step_fn: Callable[[], tuple[dict[int, EngineCoreOutputs] | None, bool]]
    """Do one step; return outputs by client index (or None) and whether the model ran."""

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Any, int]:
        """Check a request; return the engine's own form of it, and its wave.  An exception ends only that request."""

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        """Take a preprocessed request.  An exception ends only that request."""

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests without further output; unknown and finished ids are ignored."""

    def abort_all(self) -> None:
        """End every request with reason ABORT; the outputs that say so come from ``take_outputs``."""

    def post_step(self, model_executed: bool) -> None:
        """Follow up on a step, before its outputs are sent; or on a wave of lock-step ranks that is complete."""

    def has_work(self) -> bool:
        """Tell whether ``step_fn`` has anything to do now."""

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """Return, once, the outputs that came about outside of a step, by client index."""

    def counts(self) -> tuple[int, int]:
        """Return how many requests are waiting and running."""

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods that clients may call by name; a ``Future`` as result is answered when it is done."""

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return the engine's real capacities."""

    def shutdown(self) -> None:
        """Release everything; called once, last."""


class LockStepCore(EngineCore, Protocol):
    """What the busy loop needs of an engine beside, when it is a rank of a lock-step group."""

    group_is_idle: Callable[[], bool]
    """Set by the loop: tells whether no wave runs.  A pause is complete when this is true, and not before."""

    def execute_dummy_batch(self) -> None:
        """Run a step without requests, for the sake of other ranks."""


@runtime_checkable
class PausableCore(Protocol):
    """An engine that can tell whether it is paused; the loop shows that on the status page."""

    def pause_state(self) -> tuple[bool, bool]:
        """Return whether the engine sleeps, and whether its scheduler is paused."""


class ProcessHandle(Protocol):
    """One child process, with the interface of ``multiprocessing.Process``."""

    @property
    def name(self) -> str:
        """Return the name for messages."""

    @property
    def pid(self) -> int:
        """Return the process id."""

    @property
    def sentinel(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""

    @property
    def exitcode(self) -> int | None:
        """Return the exit code, minus the signal number, or None while it runs or when it is unknown."""

    def is_alive(self) -> bool:
        """Tell whether the process still runs."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most ``timeout`` seconds."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""
