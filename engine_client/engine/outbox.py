"""What a step has to tell: outputs by client, and who has ended.

Threads: the engine's thread only.
"""

from __future__ import annotations

from typing import Any, Final

from engine_client.engine.batch import ModelOutput
from engine_client.engine.request import Request
from engine_client.engine.stop import End
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, LogprobsLists, SchedulerStats

__all__ = ["Outbox", "add_columns"]

_new_object: Final = object.__new__


class Outbox:
    """Collects outputs until they are taken, once.

    Args:
        include_finished_set: name the requests that ended in ``finished_requests``, whatever ended them.
    """

    def __init__(self, *, include_finished_set: bool = False) -> None:
        self._include_finished_set = include_finished_set
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._finished: dict[int, set[str]] = {}
        self._ended: list[str] = []

    def tell(self, request: Request, new_token_ids: list[int], end: End | None = None) -> EngineCoreOutput:
        """Add an output for a request's client, with what else is new about it; return it."""
        # Half the time of the constructor, for every request in every step: fields at their default are not set.
        output: EngineCoreOutput = _new_object(EngineCoreOutput)
        output.request_id = request.request_id
        output.new_token_ids = new_token_ids
        if end is not None:
            output.finish_reason = end.finish_reason
            if end.stop_reason is not None:
                output.stop_reason = end.stop_reason
        if request.has_news:
            _tell_news(request, output)
        outputs = self._outputs.get(request.client_index)
        if outputs is None:
            outputs = self._outputs[request.client_index] = []
        outputs.append(output)
        return output

    def note_end(self, request: Request) -> None:
        """Note that a request is over, with or without an output."""
        self._ended.append(request.request_id)
        if self._include_finished_set:
            self._finished.setdefault(request.client_index, set()).add(request.request_id)

    def drop_outputs(self) -> None:
        """Forget the outputs that nobody has taken; who has ended stays noted."""
        self._outputs = {}
        self._finished = {}

    def take_ended(self) -> list[str]:
        """Return, once, the ids of the requests that are over."""
        ended, self._ended = self._ended, []
        return ended

    def take_outputs(self, stats: SchedulerStats | None = None) -> dict[int, EngineCoreOutputs]:
        """Return, once, the outputs by client; ``stats`` go to the first of them, or to client 0 if there is none."""
        taken = {index: EngineCoreOutputs(outputs=outputs) for index, outputs in self._outputs.items()}
        self._outputs = {}
        for index, finished in self._finished.items():
            taken.setdefault(index, EngineCoreOutputs()).finished_requests = finished
        self._finished = {}
        if stats is not None:
            if not taken:
                taken[0] = EngineCoreOutputs()
            next(iter(taken.values())).scheduler_stats = stats
        return taken


def _tell_news(request: Request, output: EngineCoreOutput) -> None:
    if request.events:
        output.events = request.events
        request.events = []
    if request.prefill_stats is not None:
        output.prefill_stats = request.prefill_stats
        request.prefill_stats = None
    if request.trace_headers is not None:
        output.trace_headers = request.trace_headers
    request.has_news = request.trace_headers is not None


def add_columns(output: EngineCoreOutput, index: int, result: ModelOutput) -> None:
    """Add what else an executor has made of request number ``index``."""
    number = len(output.new_token_ids)
    if result.logprobs is not None and result.logprobs[index] is not None:
        output.new_logprobs = _first_rows(result.logprobs[index], number)
    if result.prompt_logprobs is not None and result.prompt_logprobs[index] is not None:
        output.new_prompt_logprobs_tensors = result.prompt_logprobs[index]
    if result.pooling is not None and result.pooling[index] is not None:
        output.pooling_output = result.pooling[index]


def _first_rows(logprobs: Any, number: int) -> Any:
    """Drop the rows of tokens behind the one that ended the text."""
    if len(logprobs.logprob_token_ids) <= number:
        return logprobs
    return LogprobsLists(*(column[:number] for column in logprobs[:3]))
