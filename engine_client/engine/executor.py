"""The model side of an engine: the ``Executor`` that you write, and how it reports progress while it starts.

::

    class Echo(Executor):
        def execute_model(self, batch: Batch) -> ModelOutput:
            return batch.sample(lambda request: request.token_ids[-1])

is complete.  Everything else is a hook with a default: override what your model has.

An executor is built, used and shut down on one thread, the engine's.  What ``execute_model`` raises ends the engine
(its clients get the exception as the cause); what ``check_request`` raises ends that request; what any other hook
raises goes to the caller of that hook.

Threads: the engine's thread only, but for a ``collective_rpc`` with a timeout (see there).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NoReturn

from engine_client.deadline import Deadline, check_timeout
from engine_client.engine.batch import Batch, IntView, ModelOutput, ScheduledRequest
from engine_client.interfaces import ProgressCallback

__all__ = [
    "Batch",
    "Executor",
    "IntView",
    "ModelOutput",
    "ScheduledRequest",
    "has_hook",
    "progress_to",
    "report_progress",
]

_reporter: ContextVar[ProgressCallback | None] = ContextVar("engine_client progress", default=None)

SLEEP_TAGS: Final = frozenset({"weights", "kv_cache"})
"""What falls asleep, and can be woken up one by one."""


def report_progress(phase: str, done: int, total: int = 0) -> None:
    """Tell whoever waits for the engine how far its start is; does nothing when nobody listens.

    Args:
        phase: what is being done, such as ``"loading weights"``.
        done: how much of it is done.
        total: how much there is; 0 if that is not known.
    """
    callback = _reporter.get()
    if callback is not None:
        callback(phase, done, total)


@contextmanager
def progress_to(callback: ProgressCallback | None) -> Iterator[None]:
    """Send what ``report_progress`` is told inside of the block to ``callback``."""
    token = _reporter.set(callback)
    try:
        yield
    finally:
        _reporter.reset(token)


def has_hook(executor: Executor, name: str) -> bool:
    """Tell whether an executor has its own version of an optional hook."""
    return getattr(type(executor), name) is not getattr(Executor, name)


class Executor(ABC):
    """Runs a model for an engine.  Subclass it; ``execute_model`` is the one method that you must write.

    The attributes may be set on the class, or on the instance in ``__init__``.

    Args:
        vllm_config: the engine's configuration, as the client gave it.
    """

    eos_token_id: int | None = None
    """The token that ends a text."""

    num_kv_blocks: int | None = None
    """How many KV blocks there is room for; None: enough for every request that may run at once."""

    max_model_len: int | None = None
    """The longest sequence in tokens, if the model's limit is below the configured one."""

    vocab_size: int | None = None
    """When known, prompts with other tokens than ``0 … vocab_size - 1`` are refused before they do harm."""

    supported_tasks: tuple[str, ...] = ("generate",)
    """``"generate"``, and pooling tasks such as ``"embed"``."""

    sleeping_tags: frozenset[str] = frozenset()
    """What is asleep; kept by ``sleep`` and ``wake_up``."""

    failure_callback: Callable[[], None] | None = None
    """Call it, from any thread, when workers of your own have failed between steps."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'asleep' if self.is_sleeping else 'awake'}>"

    # -- requests ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def execute_model(self, batch: Batch) -> ModelOutput:
        """Compute one step: every request's scheduled tokens, and a new token where a last chunk is among them."""

    def check_request(self, request: Any) -> None:  # noqa: B027  # a hook: nothing to do is the default
        """Refuse a request that this model cannot serve, before it is queued.

        Raises:
            ValueError, TypeError: why, and what to do; only this request ends.
        """

    def finish_requests(self, request_ids: Sequence[str]) -> None:  # noqa: B027  # a hook: nothing to do is the default
        """Drop what you keep for these requests: they have ended, and their ids may be used again."""

    def execute_dummy_batch(self) -> None:  # noqa: B027  # a hook: nothing to do is the default
        """Run a step without requests, so that other ranks of a lock-step group are not kept waiting."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        self._refuse("encode text")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; it makes stop strings work.

        Tokens may end in the middle of a character: replace what is incomplete, do not raise.
        """
        self._refuse("decode tokens")

    # -- adapters ------------------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter; return whether it is there now."""
        self._refuse("use LoRA adapters")

    def remove_lora(self, lora_id: int) -> bool:
        """Drop an adapter; return whether it was there."""
        self._refuse("use LoRA adapters")

    def list_loras(self) -> set[int]:
        """Return the numbers of the adapters that are loaded."""
        self._refuse("use LoRA adapters")

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter loaded."""
        self._refuse("use LoRA adapters")

    # -- memory --------------------------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Tell whether anything is asleep."""
        return bool(self.sleeping_tags)

    def sleep(self, level: int = 1) -> None:
        """Give memory back: at level 1 what the KV cache holds, at level 2 the weights too.

        Overriding methods call this one.  No step runs before ``wake_up`` has woken everything.
        """
        self.sleeping_tags = SLEEP_TAGS

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Bring back what ``tags`` name, or all; overriding methods call this one and rebuild what was given back.

        Raises:
            ValueError: an unknown tag.
        """
        unknown = set(tags or ()) - SLEEP_TAGS
        if unknown:
            raise ValueError(f"unknown tags {sorted(unknown)}; there are {sorted(SLEEP_TAGS)} and 'scheduling'")
        self.sleeping_tags = self.sleeping_tags.difference(SLEEP_TAGS if tags is None else tags)

    def reset_mm_cache(self) -> None:  # noqa: B027  # a hook: nothing to do is the default
        """Forget cached multi-modal inputs."""

    def reset_encoder_cache(self) -> None:  # noqa: B027  # a hook: nothing to do is the default
        """Forget cached encoder outputs."""

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights to ``path``."""
        self._refuse("save its state")

    # -- control -------------------------------------------------------------------------------------------------------

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> None:
        """Start or stop a profiler of your own; without this hook the engine uses ``cProfile``."""
        self._refuse("profile itself")

    def workers(self) -> Sequence[Any]:
        """Return what ``collective_rpc`` runs on, in the order of its results: this executor itself by default."""
        return (self,)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, by name, or a function that gets the worker as its first argument.

        Without a timeout the calls run right here.  With one each runs on a thread of its own, and one that is late is
        left behind there: its result is dropped, and it may run beside later steps.

        Returns:
            One result per worker.

        Raises:
            AttributeError, TypeError: there is no such method.
            TimeoutError: it took longer than ``timeout`` seconds in all.
        """
        deadline = Deadline(check_timeout(timeout))
        return [_call(_bind(worker, method), args, kwargs or {}, deadline, str(method)) for worker in self.workers()]

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        """Take what is to be called when workers of your own have failed between steps."""
        self.failure_callback = callback

    def shutdown(self) -> None:  # noqa: B027  # a hook: nothing to do is the default
        """Release everything; called once, last."""

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"not supported: {type(self).__name__} does not {what}")


def _bind(worker: Any, method: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(method, str):
        if not callable(method):
            raise TypeError(f"collective_rpc needs a method's name or a callable, not {method!r}")

        def bound(*args: Any, **kwargs: Any) -> Any:
            return method(worker, *args, **kwargs)

        return bound
    found = getattr(worker, method)
    if not callable(found):
        raise TypeError(f"{type(worker).__name__}.{method} is not a method but {type(found).__name__}")
    return found  # type: ignore[no-any-return]  # any callable will do


def _call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], deadline: Deadline, name: str
) -> Any:
    """Call here, or within the deadline on a thread that is left behind when it is late."""
    if deadline.timeout is None:
        return function(*args, **kwargs)
    from threading import Thread  # noqa: PLC0415  # only a call with a timeout needs it

    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # I10: whatever ends the call is its caller's to know
            errors.append(error)

    thread = Thread(target=run, name="engine_client.rpc", daemon=True)
    thread.start()
    thread.join(deadline.remaining())
    if thread.is_alive():
        raise TimeoutError(f"collective_rpc {name!r} took longer than {deadline.timeout} s")
    if errors:
        raise errors.pop()
    return results.pop()
