"""Small executors, importable by engine processes: one that works, and one for each way of not working.

What they need to know stands in ``EngineConfig.additional_config``: ``init_seconds``, ``fail_at_step``, ``die_at_step``
and ``how`` (see ``faults.die``), ``step_seconds``, ``new_session``.

Threads: as every executor, the engine's thread only.
"""

from __future__ import annotations

import time
from typing import Any

from engine_client.engine.executor import Batch, Executor, ModelOutput, ScheduledRequest, report_progress
from engine_client.testing.faults import die, start_grandchild

__all__ = [
    "DyingStep",
    "EchoExecutor",
    "FailingInit",
    "FailingStep",
    "Grandchild",
    "PoolingExecutor",
    "SlowInit",
    "SlowStep",
]


def _setting(vllm_config: Any, name: str, default: Any) -> Any:
    return getattr(vllm_config, "additional_config", {}).get(name, default)


def _last_prompt_token(request: ScheduledRequest) -> int:
    return request.token_ids[request.num_prompt_tokens - 1]


class EchoExecutor(Executor):
    """Answers with the last token of the prompt, again and again."""

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Return one token for each request."""
        return batch.sample(_last_prompt_token)

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes."""
        return list(text.encode())

    def decode(self, token_ids: Any) -> str:
        """Return the text of UTF-8 bytes."""
        return bytes(token_ids).decode(errors="replace")


class PoolingExecutor(Executor):
    """Pools a prompt to its embeddings, if it has them, or to its tokens."""

    supported_tasks: tuple[str, ...] = ("embed",)

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Return the pooled values."""
        return batch.pool(_pool)


def _pool(request: ScheduledRequest) -> Any:
    if request.prompt_embeds is not None:
        return request.prompt_embeds
    return list(request.token_ids[: request.num_prompt_tokens])


class FailingInit(EchoExecutor):
    """Raises ``ValueError`` from ``KeyError`` while it is built; ``additional_config["marker"]`` is in the text."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        marker = _setting(vllm_config, "marker", "no marker")
        raise ValueError(f"outer {marker}") from KeyError(f"inner {marker}")


class SlowInit(EchoExecutor):
    """Takes ``init_seconds`` (20) to be built, and reports progress."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        seconds = _setting(vllm_config, "init_seconds", 20.0)
        for done in range(10):
            report_progress("loading weights", done, 10)
            time.sleep(seconds / 10)
        report_progress("loading weights", 10, 10)


class _CountingSteps(EchoExecutor):
    """Knows the number of the step that it is in, from 1."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.steps = 0

    def execute_model(self, batch: Batch) -> ModelOutput:
        """Count, let the subclass have its way, and answer."""
        self.steps += 1
        self.before_step()
        return super().execute_model(batch)

    def before_step(self) -> None:
        """Do what makes this executor special."""


class FailingStep(_CountingSteps):
    """Raises ``ZeroDivisionError`` in step ``fail_at_step`` (1)."""

    def before_step(self) -> None:
        """Fail when it is time."""
        if self.steps == _setting(self.vllm_config, "fail_at_step", 1):
            raise ZeroDivisionError(f"step {self.steps} fails on purpose")


class DyingStep(_CountingSteps):
    """Ends the process in step ``die_at_step`` (1), by ``how`` ("sigkill")."""

    def before_step(self) -> None:
        """Die when it is time."""
        if self.steps == _setting(self.vllm_config, "die_at_step", 1):
            die(_setting(self.vllm_config, "how", "sigkill"))


class SlowStep(_CountingSteps):
    """Takes ``step_seconds`` (0.1) for each step."""

    def before_step(self) -> None:
        """Take the time."""
        time.sleep(_setting(self.vllm_config, "step_seconds", 0.1))


class Grandchild(EchoExecutor):
    """Starts a process of its own that ignores SIGTERM; with ``new_session`` one that left the engine's group."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.pid = start_grandchild(new_session=_setting(vllm_config, "new_session", False))

    def grandchild_pid(self) -> int:
        """Return the pid; call it by ``collective_rpc("grandchild_pid")``."""
        return self.pid
