"""An engine without a model that does what a test tells it to.

::

    options = ClientOptions(engine_target=TARGET)
    config = EngineConfig(additional_config={"script": Script(start_seconds=5)})
    with SyncMPClient(config, None, False, options=options) as client:
        client.call_utility("die", "sigkill")

Every request is answered with one constant token per step until ``max_tokens``.  How the start goes is in ``Script``;
everything else is asked for by utilities: ``echo``, ``fail``, ``die``, ``wait``, ``deferred``, … (see ``utilities``).

Threads: as every engine core, one; ``deferred`` alone uses timer threads.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final

from engine_client.interfaces import EngineContext
from engine_client.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from engine_client.testing.faults import Death, die, hold_gil, start_grandchild

__all__ = ["TARGET", "Script", "ScriptedCore", "build_engine"]

TARGET: Final = "engine_client.testing.scripted:build_engine"
"""For ``ClientOptions(engine_target=TARGET)``."""

_DEFAULT_TOKENS: Final = 16
_log = logging.getLogger("engine_client.testing")


@dataclass(frozen=True)
class Script:
    """How a scripted engine starts and answers; ``EngineConfig(additional_config={"script": Script(…)})``.

    The start reports ``progress``, starts ``grandchildren``, takes ``start_seconds`` (holding the interpreter's lock if
    ``start_holds_gil``), then raises ``start_error`` or dies by ``start_death`` if there is one.

    Args:
        token: the one that every answer repeats.
        tokens_per_step: for each request.
        step_seconds: that each step takes.
        ready: fields of ``EngineCoreReadyResponse`` that differ from the defaults.
    """

    token: int = 1
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    progress: tuple[tuple[str, int, int], ...] = ()
    grandchildren: int = 0
    start_seconds: float = 0.0
    start_holds_gil: bool = False
    start_error: BaseException | None = None
    start_death: Death | None = None
    ready: Mapping[str, Any] = field(default_factory=dict)


def build_engine(vllm_config: Any, executor_class: Any, log_stats: bool, context: EngineContext) -> ScriptedCore:
    """Build the engine; the target that ``TARGET`` names.  ``executor_class`` is not used and may be None."""
    del executor_class
    return ScriptedCore(vllm_config, log_stats, context)


class _Running:
    """A request, and how many tokens it still gets."""

    __slots__ = ("remaining", "request")

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request = request
        limit = getattr(request.sampling_params, "max_tokens", None)
        self.remaining = _DEFAULT_TOKENS if limit is None else limit
        if request.pooling_params is not None:
            self.remaining = 1


class ScriptedCore:
    """The engine; satisfies ``interfaces.EngineCore``.

    As a rank in lock-step it counts its ``dummy_steps``, and completes a pause when the group is idle.

    ``collective_rpc`` with a function of your own may change what is public here, such as ``advance``, ``aborted``
    (what ``take_outputs`` reports) and ``step_error`` (what the next step raises).
    """

    def __init__(self, vllm_config: Any, log_stats: bool, context: EngineContext) -> None:
        self.script: Script = getattr(vllm_config, "additional_config", {}).get("script", None) or Script()
        self.rank = context.rank
        self.step_fn = self.step
        self.steps = 0
        self.dummy_steps = 0
        self.group_is_idle: Callable[[], bool] = lambda: True
        self._pauses: list[Future[None]] = []
        self._config = vllm_config
        self._log_stats = log_stats
        self._running: dict[str, _Running] = {}
        self.aborted: list[EngineCoreRequest] = []
        self._paused = False
        self._echo_tensor = False
        self.step_error: BaseException | None = None
        self._last_request: EngineCoreRequest | None = None
        self._timers: list[threading.Timer] = []
        self._grandchildren = self._start(context)

    def __repr__(self) -> str:
        state = "paused" if self._paused else "running"
        return f"<ScriptedCore {state} rank={self.rank} requests={len(self._running)} steps={self.steps}>"

    def _start(self, context: EngineContext) -> list[int]:
        script = self.script
        for phase, done, total in script.progress:
            context.progress(phase, done, total)
        pids = [start_grandchild() for _ in range(script.grandchildren)]
        (hold_gil if script.start_holds_gil else time.sleep)(script.start_seconds)
        if script.start_error is not None:
            raise script.start_error
        if script.start_death is not None:
            die(script.start_death)
        return pids

    # -- requests ------------------------------------------------------------------------------------------------------

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[EngineCoreRequest, int]:
        """Refuse a request without a prompt, or with an id that is in use."""
        if not request.prompt_token_ids and request.prompt_embeds is None:
            raise ValueError(f"request {request.request_id!r:.100} has no prompt")
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id!r:.100} is already running")
        return request, request.current_wave

    def add_request(self, request: EngineCoreRequest, request_wave: int = 0) -> None:
        """Take a request."""
        self._last_request = replace(request, current_wave=request_wave)
        self._running[request.request_id] = _Running(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Drop requests."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def abort_all(self) -> None:
        """End every request with reason ABORT."""
        self.aborted += [running.request for running in self._running.values()]
        self._running.clear()

    def has_work(self) -> bool:
        """Tell whether there are requests, and no pause."""
        return (bool(self._running) and not self._paused) or self.step_error is not None

    def pause_state(self) -> tuple[bool, bool]:
        """Return whether it sleeps, which it does not, and whether it is paused."""
        return False, self._paused

    def counts(self) -> tuple[int, int]:
        """Return that all requests run."""
        return 0, len(self._running)

    def step(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        """Give every request its next tokens."""
        if self.step_error is not None:
            raise self.step_error
        if not self._running or self._paused:
            return None, False
        if self.script.step_seconds:
            time.sleep(self.script.step_seconds)
        self.steps += 1
        return self._by_client([self.advance(running) for running in list(self._running.values())]), True

    def execute_dummy_batch(self) -> None:
        """Count, and take the time of a step."""
        time.sleep(self.script.step_seconds)
        self.dummy_steps += 1

    def post_step(self, model_executed: bool) -> None:
        """Answer pauses once the group is idle."""
        if self._pauses and self.group_is_idle():
            pauses, self._pauses = self._pauses, []
            for pause in pauses:
                pause.set_result(None)

    def advance(self, running: _Running) -> tuple[int, EngineCoreOutput]:
        """Return a request's client and what it gets in this step; replace it to get other outputs."""
        request = running.request
        count = min(self.script.tokens_per_step, running.remaining)
        running.remaining -= count
        output = EngineCoreOutput(request.request_id, [self.script.token] * count)
        if running.remaining <= 0:
            output.finish_reason = FinishReason.LENGTH
            del self._running[request.request_id]
        if self._echo_tensor or request.pooling_params is not None:
            output.pooling_output = request.prompt_embeds
        return request.client_index, output

    def _by_client(self, pairs: list[tuple[int, EngineCoreOutput]]) -> dict[int, EngineCoreOutputs]:
        found: dict[int, EngineCoreOutputs] = {}
        for index, output in pairs:
            if index not in found:
                stats = SchedulerStats(len(self._running), step_counter=self.steps) if self._log_stats else None
                found[index] = EngineCoreOutputs(self.rank, scheduler_stats=stats)
            found[index].outputs.append(output)
        return found

    def take_outputs(self) -> dict[int, EngineCoreOutputs]:
        """Return what ``abort_all`` ended."""
        aborted, self.aborted = self.aborted, []
        return self._by_client(
            [(r.client_index, EngineCoreOutput(r.request_id, [], finish_reason=FinishReason.ABORT)) for r in aborted]
        )

    def ready_response(self) -> EngineCoreReadyResponse:
        """Return small capacities, or what the script says."""
        response = EngineCoreReadyResponse(4096, 1024, 16, None, "auto", "scripted", 1, 1)
        return replace(response, **self.script.ready)

    def shutdown(self) -> None:
        """Stop the timers."""
        for timer in list(self._timers):
            timer.cancel()

    # -- utilities -----------------------------------------------------------------------------------------------------

    def utilities(self) -> Mapping[str, Callable[..., Any]]:
        """Return the clients' own utilities with plain answers, and those that tests ask for."""
        nothing = ("profile", "reset_mm_cache", "reset_encoder_cache", "save_sharded_state")
        return {
            **dict.fromkeys(nothing, lambda *args: None),
            "execute_dummy_batch": self.execute_dummy_batch,
            "add_lora": lambda request: True,
            "collective_rpc": self._collective_rpc,
            "get_supported_tasks": lambda: ("generate",),
            "is_scheduler_paused": lambda: self._paused,
            "is_sleeping": lambda: self._paused,
            "list_loras": set,
            "pause_scheduler": lambda mode="abort", clear_cache=True: self._pause(mode),
            "pin_lora": lambda lora_id: True,
            "remove_lora": lambda lora_id: True,
            "reset_prefix_cache": lambda reset_running_requests=False, reset_connector=False: True,
            "resume_scheduler": self._resume,
            "sleep": lambda level=1, mode="abort": self._pause(mode),
            "wake_up": lambda tags=None: self._resume(),
            "deferred": self._deferred,
            "die": die,
            "echo": lambda *args: args[0] if len(args) == 1 else args,
            "fail": _fail,
            "fail_step": self._fail_step,
            "hold_gil": hold_gil,
            "info": self._info,
            "last_request": lambda: self._last_request,
            "log": lambda text, level=logging.WARNING: _log.log(level, "%s", text),
            "set_echo_tensor": lambda value: setattr(self, "_echo_tensor", value),
            "set_script": lambda changes: setattr(self, "script", replace(self.script, **changes)),
            "start_grandchild": lambda new_session=False: start_grandchild(new_session=new_session),
            "unpicklable": threading.Lock,
            "wait": time.sleep,
            "write": lambda stream, text: print(text, file=getattr(sys, stream), flush=True),
        }

    def _collective_rpc(
        self,
        method: Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function with this engine as its first argument."""
        del timeout
        return [method(self, *args, **(kwargs or {}))]

    def _pause(self, mode: str) -> Future[None] | None:
        self._paused = True
        if mode == "abort":
            self.abort_all()
        if self.group_is_idle():
            return None
        self._pauses.append(Future())
        return self._pauses[-1]

    def _resume(self) -> None:
        self._paused = False

    def _deferred(self, value: Any = None, seconds: float | None = None) -> Future[Any]:
        """Answer later: after ``seconds`` with ``value`` (raised if it is an exception), or never."""
        future: Future[Any] = Future()
        if seconds is not None:
            finish = future.set_exception if isinstance(value, BaseException) else future.set_result
            timer = threading.Timer(seconds, self._answer, (finish, value))
            timer.daemon = True
            self._timers.append(timer)
            timer.start()
        return future

    def _answer(self, finish: Callable[[Any], None], value: Any) -> None:
        """End a deferred call, on its timer's thread, and let go of the timer, which keeps the value."""
        self._timers.remove(threading.current_thread())  # type: ignore[arg-type]  # it is the timer
        finish(value)

    def _fail_step(self, error: BaseException) -> None:
        """Have the next step raise this."""
        self.step_error = error

    def _info(self) -> dict[str, Any]:
        """Return facts of this process."""
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "group": os.getpgid(0),
            "session": os.getsid(0),
            "cwd": os.getcwd(),
            "path": list(sys.path),
            "argv": list(sys.argv),
            "modules": sorted(sys.modules),
            "threads": [thread.name for thread in threading.enumerate()],
            "grandchildren": list(self._grandchildren),
            "requests": list(self._running),
            "steps": self.steps,
            "dummy_steps": self.dummy_steps,
        }


def _fail(error: BaseException) -> None:
    """Raise what is given."""
    raise error
