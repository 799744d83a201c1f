"""What a project on top of the library may look like: answers, also when an engine dies, and no longer than allowed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from engine_client import EngineCoreRequest, EngineDeadError, SamplingParams


class Answerer:
    """Answers prompts; an engine that dies is replaced once for each answer.

    Args:
        make_client: makes a client, which is the answerer's from then on.
    """

    def __init__(self, make_client: Callable[[], Any]) -> None:
        self._make_client = make_client
        self.client = make_client()
        self._number = 0

    def __enter__(self) -> Answerer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.shutdown()

    def answer(self, prompt: list[int], max_tokens: int = 10, timeout: float = 30.0) -> list[int]:
        """Return the tokens that follow a prompt.

        Raises:
            EngineDeadError: the engine has died twice.
            TimeoutError: nothing came for ``timeout`` seconds; the request is aborted.
        """
        try:
            return self._ask(prompt, max_tokens, timeout)
        except EngineDeadError:
            self.client.shutdown()
            self.client = self._make_client()
            return self._ask(prompt, max_tokens, timeout)

    def _ask(self, prompt: list[int], max_tokens: int, timeout: float) -> list[int]:
        self._number += 1
        name = f"answer-{self._number}"
        params = SamplingParams(max_tokens=max_tokens)
        self.client.add_request(EngineCoreRequest(name, prompt, None, params, None, 0.0, None, None, None))
        tokens: list[int] = []
        finished = False
        try:
            while not finished:
                for output in self.client.get_output(timeout=timeout).outputs:
                    tokens += output.new_token_ids
                    finished = output.finished
        except TimeoutError:
            self.client.abort_requests([name])
            raise
        return tokens
