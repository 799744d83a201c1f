"""What an executor gets for one step, and what it gives back.

::

    Scheduler ─▶ Batch (a ScheduledRequest per request) ─▶ Executor.execute_model ─▶ ModelOutput ─▶ Scheduler
                 requests[i]                                                         tokens[i]

Everything here is read-only for the executor.  The scalars of a ``ScheduledRequest`` are of this step and stay as they
are; its sequences (``token_ids``, ``block_ids``) are views of the scheduler's own lists: nothing is copied per step,
and they grow as the request goes on.  Take a slice to keep what they hold now.

Invariants: I9 (nobody changes a batch after it was handed over).

Threads: plain data; built and read on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Union, overload

from engine_client.messages import LogprobsLists

__all__ = ["Batch", "IntView", "ModelOutput", "ScheduledRequest", "check_output"]

_COLUMNS: Final = ("tokens", "logprobs", "prompt_logprobs", "pooling")


class IntView(Sequence[int]):
    """A read-only view of a list of integers that its owner appends to; a slice of it is a new list."""

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: Union[int, slice]) -> Union[int, list[int]]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __contains__(self, value: object) -> bool:
        return value in self._items

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IntView):
            return self._items == other._items
        return self._items == list(other) if isinstance(other, (list, tuple)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # what is compared by content and grows has no hash

    def __reduce__(self) -> tuple[type[IntView], tuple[list[int]]]:
        """Pickle the content as it is now."""
        return IntView, (self._items,)

    def __repr__(self) -> str:
        return repr(self._items)


class ScheduledRequest(NamedTuple):
    """One request's part of a step: compute ``num_scheduled_tokens`` tokens from index ``num_computed_tokens`` on.

    What was computed before is in the KV cache, in ``block_ids``: the token at position ``p`` belongs into block
    ``block_ids[p // block_size]``.  An executor without a KV cache of its own may just look at ``token_ids``.

    Args:
        request_id: unique among the requests in flight.
        token_ids: the prompt and everything generated so far; zeros where the prompt is given as embeddings.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: how many were computed by earlier steps, or found in the prefix cache.  It starts again
            (usually at 0) when the request was preempted.
        num_scheduled_tokens: how many to compute now, at least 1.
        is_last_chunk: all tokens so far are computed after this step, so a token (or the pooled value) is needed.
        block_ids: the KV blocks, enough for this step.
        sampling_params: how to choose the token; None for pooling requests.
        pooling_params: how to pool; None for generation.
        lora_request: the adapter to use.
        prompt_embeds: the prompt as embeddings, one row per prompt token, or None.
        mm_features: multi-modal inputs as the client gave them, or None.
        trace_headers: by which the request's trace goes on, such as ``traceparent``, or None.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_scheduled_tokens: int
    is_last_chunk: bool
    block_ids: Sequence[int]
    sampling_params: Any = None
    pooling_params: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None
    mm_features: Any = None
    trace_headers: Any = None

    @property
    def new_token_ids(self) -> Sequence[int]:
        """Return the tokens to compute in this step."""
        return self.token_ids[self.num_computed_tokens : self.num_computed_tokens + self.num_scheduled_tokens]


@dataclass(frozen=True)
class ModelOutput:
    """What came of a batch; every sequence has one entry for each of ``batch.requests``, in their order.

    ``Batch.sample`` builds one from a function that looks at a single request.

    Args:
        tokens: the new tokens of each request (usually one; more are allowed); empty for a chunk that is not the last,
            and for pooling.
        logprobs: for requests that asked for them, a row per new token; None for the others.
        prompt_logprobs: handed through to the client as they are, or None.
        pooling: the pooled value of each pooling request whose last chunk this was; None for the others.
    """

    tokens: Sequence[Sequence[int]]
    logprobs: Sequence[LogprobsLists | None] | None = None
    prompt_logprobs: Sequence[Any] | None = None
    pooling: Sequence[Any] | None = None


@dataclass(frozen=True)
class Batch:
    """One step's work: requests that run on, and chunks of prompts.  Iterates over its requests.

    Args:
        requests: in the order in which the outputs are expected.
        total_num_scheduled_tokens: the sum over the requests, within ``max_num_batched_tokens``.
        preempted_request_ids: requests that lost their KV blocks since the last batch; they come back, now or later,
            and are computed anew.
        step: counts the batches of this engine, from 0.
    """

    requests: Sequence[ScheduledRequest]
    total_num_scheduled_tokens: int
    preempted_request_ids: Sequence[str] = field(default=())
    step: int = 0

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def sample(self, choose: Callable[[ScheduledRequest], int]) -> ModelOutput:
        """Return the output that has the token ``choose(request)`` wherever one is due."""
        return ModelOutput(
            [
                [choose(request)] if request.is_last_chunk and request.pooling_params is None else []
                for request in self.requests
            ]
        )

    def pool(self, compute: Callable[[ScheduledRequest], Any]) -> ModelOutput:
        """Return the output of a batch of pooling requests: ``compute(request)`` wherever a value is due."""
        return ModelOutput(
            [[]] * len(self.requests),
            pooling=[compute(request) if request.is_last_chunk else None for request in self.requests],
        )


def check_output(batch: Batch, output: Any) -> None:
    """Make sure that an executor's answer fits the batch.

    Raises:
        TypeError, ValueError: it does not; the message names the request and says what was expected.
    """
    if not isinstance(output, ModelOutput):
        raise TypeError(f"execute_model must return a ModelOutput, not {type(output).__name__}")
    for name in _COLUMNS:
        column = getattr(output, name)
        if column is not None or name == "tokens":
            _check_column(name, column, len(batch.requests))
    for index, (request, tokens) in enumerate(zip(batch.requests, output.tokens, strict=True)):
        due = request.is_last_chunk
        if request.pooling_params is not None:
            _check_pooling(request, output, index)
            due = False
        try:
            if (len(tokens) > 0) is not due:
                raise ValueError(_misfit(request, tokens))
            for token in tokens:
                if type(token) is not int or token < 0:
                    _check_token(request, token)
        except TypeError as error:
            name = f"{request.request_id!r:.100}"
            raise TypeError(f"ModelOutput.tokens for request {name} must be a list: {error}") from error


def _check_column(name: str, column: Any, number: int) -> None:
    try:
        length = len(column)
    except TypeError:
        raise TypeError(f"ModelOutput.{name} must be a sequence, not {type(column).__name__}") from None
    if length != number:
        raise ValueError(f"ModelOutput.{name} has {length} entries for a batch of {number} requests")


def _misfit(request: ScheduledRequest, tokens: Sequence[int]) -> str:
    if not len(tokens):
        return f"ModelOutput.tokens has no token for request {request.request_id!r:.100}, whose last chunk this was"
    why = "it is a pooling request" if request.pooling_params is not None else "this was not its last chunk"
    return f"ModelOutput.tokens must be empty for request {request.request_id!r:.100}: {why}"


def _check_token(request: ScheduledRequest, token: Any) -> None:
    """Accept what counts as an integer, such as numpy's; refuse the rest."""
    index = getattr(token, "__index__", None)
    if index is None or isinstance(token, bool) or index() < 0:
        raise ValueError(
            f"ModelOutput.tokens for request {request.request_id!r:.100} must be non-negative integers, not {token!r}"
        )


def _check_pooling(request: ScheduledRequest, output: ModelOutput, index: int) -> None:
    if request.is_last_chunk and (output.pooling is None or output.pooling[index] is None):
        raise ValueError(f"ModelOutput.pooling has no value for pooling request {request.request_id!r:.100}")
