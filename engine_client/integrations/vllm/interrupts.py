"""Ctrl-C in a call of ``LLM`` takes its requests back, so that the next call returns its own outputs and nothing else.

vLLM leaves them in its output processor and in the engine: the next call would wait for them, or return them as well.
An interrupt may come anywhere, between ``add_request`` and ``step`` too, so the outermost calls are wrapped::

    LLM.generate ─▶ LLMEngine.add_request* ─▶ LLMEngine.step* ─▶ outputs
        └───────────────── KeyboardInterrupt ──▶ take back what the output processor knows ──▶ raised again

``AsyncLLM`` takes back what is cancelled once it has been sent.  Sending never waits with vLLM's client, but does with
ours, where much is queued or large; so what is cancelled meanwhile is taken back here.

Threads: as the calls that are wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, Final, NoReturn

from engine_client.integrations.vllm.after_import import wrap_once
from engine_client.integrations.vllm.refusals import unsupported

__all__ = ["patch_async_llm", "patch_llm", "patch_llm_engine"]

_CALLS: Final = (
    *("generate", "chat", "beam_search", "enqueue", "enqueue_chat", "wait_for_completion"),
    *("encode", "embed", "classify", "reward", "score"),
)
"""The methods of ``LLM`` that have requests in flight."""

_TRIES: Final = 3
"""How often taking back begins anew when it is interrupted itself."""


def patch_llm_engine(module: ModuleType) -> None:
    """Have interrupted calls of ``LLMEngine``, which may be used by itself, take all requests back.

    Args:
        module: ``vllm.v1.engine.llm_engine``.
    """
    _wrap(vars(module)["LLMEngine"], ("add_request", "step"), lambda engine: engine)


def patch_llm(module: ModuleType) -> None:
    """Have interrupted calls of ``LLM`` take all requests back.

    Args:
        module: ``vllm.entrypoints.llm``.
    """
    _wrap(vars(module)["LLM"], _CALLS, lambda llm: llm.llm_engine)


def patch_async_llm(module: ModuleType) -> None:
    """Have an ``AsyncLLM`` forget a request that could not be sent, as when it was cancelled meanwhile.

    Streaming input is refused at once: its first part would run alone, and the stream end with it.

    Args:
        module: ``vllm.v1.engine.async_llm``.
    """
    engine = vars(module)["AsyncLLM"]
    wrap_once(engine, "_add_request", _forgetting)  # what adds to the output processor, then sends
    refuse = functools.partial(_refuse_streaming_input, module)
    engine._add_streaming_input_request = refuse  # noqa: SLF001  # what add_request calls for a generator


def _forgetting(method: Any) -> Any:
    @functools.wraps(method)
    async def wrapper(self: Any, request: Any, prompt: Any, parent: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, request, prompt, parent, *args, **kwargs)
        except BaseException:
            if request.mm_features:
                self.renderer.clear_mm_cache()  # as below
            with suppress(Exception):  # safe because a dead engine runs nothing, and the first error says so
                await self.abort([request.request_id, *([parent.request_id] if parent else [])], internal=True)
            raise

    return wrapper


async def _refuse_streaming_input(module: Any, *args: Any, **kwargs: Any) -> NoReturn:
    error = unsupported(
        "streaming input",
        "its parts are requests with one id, and an id in flight is refused",
        "send the whole prompt, or use vLLM's own client (with pyzmq)",
    )
    raise module.InputStreamError(error) from error  # generate() raises what is in it, and hides all else


def _wrap(owner: Any, names: tuple[str, ...], engine_of: Callable[[Any], Any]) -> None:
    for name in names:
        if hasattr(owner, name):
            wrap_once(owner, name, functools.partial(_taking_back, engine_of))


def _taking_back(engine_of: Callable[[Any], Any], method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt:
            _take_back(engine_of(self))
            raise

    return wrapper


def _take_back(engine: Any) -> None:
    """Abort every request; an impatient second interrupt does not prevent that, and the first is raised anyway."""
    for _ in range(_TRIES):
        with suppress(KeyboardInterrupt):
            _abort_all(engine)
            return


def _abort_all(engine: Any) -> None:
    """Abort every request that the output processor knows, whatever step of adding or ending it was interrupted."""
    processor = engine.output_processor
    for request_id, state in processor.request_states.items():
        names = processor.external_req_ids[state.external_req_id]
        if request_id not in names:
            names.append(request_id)  # abort_request wants to find it there
    engine.abort_request([*processor.request_states, *processor.parent_requests], internal=True)
    processor.external_req_ids.clear()
    engine.renderer.clear_mm_cache()  # it may have inputs that the engine has not got, and would not be sent again
