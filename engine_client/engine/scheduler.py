"""Who runs in the next step: continuous batching within a token budget, a number of sequences and a pool of KV blocks.

::

    add ─▶ waiting ──admit──▶ running ──▶ Batch ──executor──▶ ModelOutput ──update──▶ outputs, by client
      └▶ held (while paused)    │  ▲ a prompt may take several steps (chunks)
           └─ resume ─▶ waiting ◀┘ preempted: blocks given back, computed anew later

A step serves the running requests first, in their order, then admits waiting ones as budget, sequences and blocks
allow.  When blocks run out, the last of the running requests gives its blocks back; the first one always gets on, so
every step that has work makes progress.  Tokens count as computed, and blocks as stored, only when the executor has
returned: a step that raised has changed nothing that the next one does not repair.

The cost of a step depends on the requests in it, never on those that wait.

Invariants: I9 (a batch is not changed once it is handed over).

Threads: the engine's thread only.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, Final

from engine_client.engine.batch import Batch, ModelOutput, ScheduledRequest
from engine_client.engine.kv_cache import KvCache
from engine_client.engine.limits import Limits
from engine_client.engine.outbox import Outbox, add_columns
from engine_client.engine.queues import make_queue
from engine_client.engine.request import Request, RequestState
from engine_client.engine.stop import End
from engine_client.ipc.counters import END_TO_END, FIRST_TOKEN, Count, Counters
from engine_client.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    FinishReason,
    PauseMode,
    PrefillStats,
    SchedulerStats,
)

__all__ = ["Scheduler"]

_RUNNING: Final = RequestState.RUNNING
_POOLED: Final = End(FinishReason.STOP)
_by_rank: Final = attrgetter("rank")


class Scheduler:
    """Owns every request from ``add`` to its end, and the KV blocks.

    Args:
        limits: what fits into a step and into memory.
        log_stats: record events of requests and statistics of steps.
        include_finished_set: name the requests that ended in the outputs, whatever ended them.
        counters: where what is done is counted; None: memory of its own.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        log_stats: bool = False,
        include_finished_set: bool = False,
        counters: Counters | None = None,
    ) -> None:
        self.counters = Counters() if counters is None else counters
        self.counters.words[Count.IS_KEPT] = 1
        self.counters.words[Count.KV_BLOCKS] = limits.num_blocks
        self.limits = limits
        self.pause_mode: PauseMode | None = None
        self.outbox = Outbox(include_finished_set=include_finished_set)
        self._log_stats = log_stats
        self._num_steps = 0
        self._begin()

    def _begin(self) -> None:
        """Have no requests."""
        self.cache = KvCache(self.limits)
        self._requests: dict[str, Request] = {}  # all that live
        self._waiting = make_queue(self.limits.policy)
        self._held: dict[str, Request] = {}  # added while paused
        self._running: list[Request] = []  # the one to preempt last
        self._in_step: list[Request] = []  # of the last batch, in its order
        self._preempted: list[str] = []  # since the last batch
        self._has_ended = False  # some of the running have ended

    def __repr__(self) -> str:
        waiting, running = self.counts()
        paused = f" paused={self.pause_mode}" if self.pause_mode else ""
        return f"<Scheduler waiting={waiting} running={running}{paused} {self.cache!r}>"

    # -- requests come and go ------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: a request of this id is in flight.
        """
        name = request.request_id
        if name in self._requests:
            raise ValueError(f"request {name!r:.100} is already running; choose another id or wait for its end")
        self._requests[name] = request
        request.arrived_at = time.monotonic()
        self._note(request, EngineCoreEventType.QUEUED)
        if self.pause_mode is None:
            self._waiting.push(request)
        else:
            self._held[name] = request

    def abort(self, request_ids: Iterable[Any]) -> None:
        """End requests without output; what is unknown, finished or no id at all is ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id) if isinstance(request_id, str) else None
            if request is not None:
                self._end(request, FinishReason.ABORT)
        self._drop_ended()

    def abort_all(self) -> None:
        """End every request with reason ABORT; the outbox has the outputs that say so."""
        for request in list(self._requests.values()):
            self._end_with_output(request, End(FinishReason.ABORT))
        self._drop_ended()

    def start_over(self) -> None:
        """End all requests without output and forget the prefix cache, whatever disorder an interrupt has left."""
        for request in self._requests.values():
            self.outbox.note_end(request)
        self.outbox.drop_outputs()
        self._begin()

    def _end_with_output(self, request: Request, end: End) -> None:
        self.outbox.tell(request, [], end)
        self._end(request, end.finish_reason)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Let go of a request; one that was running stays in the list until ``_drop_ended``."""
        self.counters.add(Count.FINISHED + reason)
        self.counters.observe(END_TO_END, time.monotonic() - request.arrived_at)
        if request.state is RequestState.WAITING:
            self._waiting.remove(request)
            self._held.pop(request.request_id, None)
        else:
            self._has_ended = True
        request.state = RequestState.FINISHED
        self.cache.release(request)
        del self._requests[request.request_id]
        self.outbox.note_end(request)

    def _drop_ended(self) -> None:
        if self._has_ended:
            self._running = [request for request in self._running if request.state is _RUNNING]
            self._has_ended = False
            self.counters.words[Count.KV_BLOCKS_HELD] = self.cache.pool.num_held

    # -- pause ---------------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Hold new requests back; with ``"abort"`` end the others, with ``"keep"`` freeze them."""
        self.pause_mode = mode
        if mode == "abort":
            self.abort_all()

    def resume(self) -> None:
        """Go on, with those that were held back at the end of the queue."""
        self.pause_mode = None
        for request in self._held.values():
            self._waiting.push(request)
        self._held.clear()

    @property
    def num_steps(self) -> int:
        """Return how many batches there were."""
        return self._num_steps

    def has_work(self) -> bool:
        """Tell whether a step would do anything."""
        return self.pause_mode != "keep" and self.has_in_flight()

    def has_in_flight(self) -> bool:
        """Tell whether there are requests that are not held back by a pause."""
        return bool(self._running or self._waiting)

    def counts(self) -> tuple[int, int]:
        """Return how many requests are waiting (or held back) and running."""
        return len(self._waiting) + len(self._held), len(self._running)

    def reset_prefix_cache(self, *, preempt: bool = False) -> bool:
        """Forget all cached prefixes, if no request holds blocks, or after preempting those that do."""
        while preempt and self._running:
            self._preempt()
        return self.cache.reset()

    # -- before the model ----------------------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Choose what the next step computes.

        The batch may be empty although there was work: a request that can never fit has been ended instead.
        """
        self._in_step = []
        scheduled: list[ScheduledRequest] = []
        budget = self._admit(scheduled, self._schedule_running(scheduled))
        self._drop_ended()
        preempted, self._preempted = self._preempted, []
        batch = Batch(tuple(scheduled), self.limits.max_num_batched_tokens - budget, preempted, self._num_steps)
        self._num_steps += bool(scheduled)
        return batch

    def _schedule_running(self, scheduled: list[ScheduledRequest]) -> int:
        """Give running requests their share; return what is left of the budget."""
        running, in_step = self._running, self._in_step
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.num_computed_tokens
            number = len(request.tokens) - computed
            if number > 1:
                number = self.limits.chunk(number, budget)
            upto = computed + number
            if upto > request.capacity and not self._grow(request, upto):
                continue  # it gave up its place: another request is at this index now, or none
            scheduled.append(request.scheduled(number))
            in_step.append(request)
            budget -= number
            index += 1
        return budget

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Get blocks for a running request, preempting others from the end; return whether it runs in this step."""
        if not self.cache.fits(num_tokens):
            self._fail(request)
            self._running.remove(request)
            return False
        while not self.cache.grow(request, num_tokens):
            if self._preempt() is request:
                return False
        return True

    def _fail(self, request: Request) -> None:
        """End a request that can never fit, whatever else is given up for it."""
        number, limits = len(request.tokens), self.limits
        text = (
            f"the request has grown to {number} tokens, which need {self.cache.blocks_for(number)} KV blocks, and the "
            f"engine has {limits.num_blocks}: lower max_tokens or give it more (cache_config.num_gpu_blocks_override)"
        )
        self._end_with_output(request, End(FinishReason.ERROR, text))

    def _preempt(self) -> Request:
        """Take the blocks of the last running request, and put it back into the queue."""
        request = self._running.pop()
        self.cache.release(request)
        request.restart()
        self._waiting.push_back(request)
        self._preempted.append(request.request_id)
        self._note(request, EngineCoreEventType.PREEMPTED)
        self.counters.add(Count.PREEMPTIONS)
        return request

    def _admit(self, scheduled: list[ScheduledRequest], budget: int) -> int:
        """Start waiting requests in their order, until one does not fit; return what is left of the budget."""
        while budget > 0 and self._waiting and len(self._running) < self.limits.max_num_seqs:
            request = self._waiting.peek()
            if not self.cache.fits(len(request.tokens)):
                self._fail(request)
                continue
            number = self.cache.start(request, budget)
            if number == 0:
                break
            self._waiting.pop()
            self._note_start(request)
            if self.limits.policy == "priority":
                insort(self._running, request, key=_by_rank)
            else:
                self._running.append(request)
            scheduled.append(request.scheduled(number))
            self._in_step.append(request)
            budget -= number
        return budget

    def _note_start(self, request: Request) -> None:
        request.state = _RUNNING
        cached = request.num_computed_tokens
        if not request.was_preempted:
            self.counters.add(Count.PROMPT_TOKENS, request.num_prompt_tokens)
            if request.reads_cache:
                self.counters.add(Count.PREFIX_QUERIES, request.num_prompt_tokens)
                self.counters.add(Count.PREFIX_HITS, cached)
        if request.prefill_stats is not None or not request.was_preempted:
            prompt = request.num_prompt_tokens
            request.prefill_stats = PrefillStats(prompt, prompt - min(cached, prompt), min(cached, prompt))
            request.prefill_stats.num_local_cached_tokens = request.prefill_stats.num_cached_tokens
            request.has_news = True
        self._note(request, EngineCoreEventType.SCHEDULED)

    def _note(self, request: Request, kind: EngineCoreEventType) -> None:
        if self._log_stats:
            request.events.append(EngineCoreEvent.new_event(kind))
            request.has_news = True

    # -- after the model -----------------------------------------------------------------------------------------------

    def update(self, output: ModelOutput) -> None:
        """Take what the executor made of the last batch; the outbox has what becomes of it.

        Requests that have ended since they were scheduled are passed over.
        """
        tell = self.outbox.tell
        produced = 0
        plain = output.logprobs is None and output.prompt_logprobs is None and output.pooling is None
        for index, (request, new) in enumerate(zip(self._in_step, output.tokens, strict=True)):
            if request.state is not _RUNNING:
                continue
            request.num_computed_tokens = computed = request.num_computed_tokens + request.num_scheduled_tokens
            if computed >= request.next_stored:
                self.cache.store(request)
            end: End | None = None
            taken: list[int] = []
            if len(new):
                taken, end = request.accept(new)
                if request.prefill_stats is not None:  # which goes out with its first output
                    self.counters.observe(FIRST_TOKEN, time.monotonic() - request.arrived_at)
                produced += len(taken)
            elif not request.is_pooling or computed < len(request.tokens):
                continue  # a chunk of a prompt, with more to come
            else:
                end = _POOLED
            told = tell(request, taken, end)
            if not plain:
                add_columns(told, index, output)
            if end is not None:
                self._end(request, end.finish_reason)
        self._in_step = []
        self._drop_ended()
        words = self.counters.words
        words[Count.GENERATION_TOKENS] += produced
        words[Count.KV_BLOCKS_HELD] = self.cache.pool.num_held

    def make_stats(self) -> SchedulerStats | None:
        """Return the state after a step, and what the prefix cache did since the last call; None without statistics."""
        if not self._log_stats:
            return None
        waiting, running = self.counts()
        return SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            step_counter=self._num_steps,
            kv_cache_usage=self.cache.usage,
            prefix_cache_stats=self.cache.take_stats(),
        )
