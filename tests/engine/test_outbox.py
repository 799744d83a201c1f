"""What a step tells its clients."""

from __future__ import annotations

import numpy as np

from engine_client.engine.batch import ModelOutput
from engine_client.engine.outbox import Outbox, add_columns
from engine_client.engine.request import Request
from engine_client.engine.stop import End
from engine_client.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
)
from helpers.engines import make_request


def request(name="a", **settings):
    return Request(make_request(name, **settings), [1], None)


def test_outputs_by_client_once():
    """Outputs are taken once, each client's in the order in which they came about."""
    outbox = Outbox()
    outbox.tell(request("a"), [1])
    outbox.tell(request("b", client_index=3), [2])
    outbox.tell(request("c"), [3], End(FinishReason.STOP, "x"))
    taken = outbox.take_outputs()
    assert taken[0].outputs == [
        EngineCoreOutput("a", [1]),
        EngineCoreOutput("c", [3], finish_reason=FinishReason.STOP, stop_reason="x"),
    ]
    assert taken[3].outputs == [EngineCoreOutput("b", [2])]
    assert outbox.take_outputs() == {}


def test_news_are_told_once():
    """Events and prefill statistics come with the next output only, trace headers with each."""
    member = request(trace_headers={"traceparent": "00"})
    event = EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)
    member.events, member.prefill_stats, member.has_news = [event], PrefillStats(1, 1), True
    outbox = Outbox()
    first, second = outbox.tell(member, [1]), outbox.tell(member, [2])
    assert (first.events, first.prefill_stats) == ([event], PrefillStats(1, 1))
    assert (second.events, second.prefill_stats) == (None, None)
    assert first.trace_headers == second.trace_headers == {"traceparent": "00"}


def test_events_may_come_alone():
    """A request that was preempted has events to tell, and no statistics of a prompt."""
    member = request()
    member.events, member.has_news = [EngineCoreEvent.new_event(EngineCoreEventType.PREEMPTED)], True
    output = Outbox().tell(member, [1], End(FinishReason.LENGTH))
    assert [event.type for event in output.events] == [EngineCoreEventType.PREEMPTED]
    assert output.prefill_stats is None
    assert not member.has_news


def test_fields_at_their_default_are_not_set():
    """The codec sends what an output's ``__dict__`` has, so that a plain token is two fields."""
    output = Outbox().tell(request(), [1])
    assert output.__dict__.keys() == {"request_id", "new_token_ids"}
    add_columns(output, 0, ModelOutput([[1]], logprobs=[None], prompt_logprobs=[None], pooling=[None]))
    assert output.__dict__.keys() == {"request_id", "new_token_ids"}


def test_ends_are_noted():
    """Ids of requests that are over are taken once; clients get them as a set if they are to."""
    for included in (False, True):
        outbox = Outbox(include_finished_set=included)
        outbox.note_end(request("a"))
        outbox.note_end(request("b", client_index=1))
        assert outbox.take_ended() == ["a", "b"]
        assert outbox.take_ended() == []
        finished = {index: outputs.finished_requests for index, outputs in outbox.take_outputs().items()}
        assert finished == ({0: {"a"}, 1: {"b"}} if included else {})
        assert outbox.take_outputs() == {}


def test_outputs_can_be_dropped():
    """Nobody gets them any more; who has ended is still told to whoever asks for that."""
    outbox = Outbox(include_finished_set=True)
    outbox.tell(request("a"), [1], End(FinishReason.LENGTH))
    outbox.note_end(request("a"))
    outbox.drop_outputs()
    assert outbox.take_outputs() == {}
    assert outbox.take_ended() == ["a"]


def test_statistics_go_to_one_client():
    """Statistics come with the first client's outputs, or alone to client 0."""
    outbox, stats = Outbox(), SchedulerStats(num_running_reqs=3)
    assert outbox.take_outputs(stats)[0].scheduler_stats is stats
    outbox.tell(request("b", client_index=2), [1])
    outbox.tell(request("a"), [1])
    taken = outbox.take_outputs(stats)
    assert taken[2].scheduler_stats is stats
    assert taken[0].scheduler_stats is None


class TestColumns:
    def test_are_the_requests_own(self):
        """Log-probabilities and pooled values are those at the request's place."""
        rows = LogprobsLists([[1, 2]], [[-0.1, -3.0]], [1])
        output = Outbox().tell(request(), [1])
        add_columns(output, 1, ModelOutput([[], [1]], [None, rows], [None, "prompt"], [None, "pooled"]))
        assert output.new_logprobs is rows
        assert output.new_prompt_logprobs_tensors == "prompt"
        assert output.pooling_output == "pooled"

    def test_have_no_rows_behind_the_end(self):
        """Rows of tokens that were dropped behind the one that ended the text are dropped too."""
        for column in (list, np.array):
            rows = LogprobsLists(column([[1], [2], [3]]), column([[0.0]] * 3), column([1, 1, 1]))
            output = Outbox().tell(request(), [1, 2])
            add_columns(output, 0, ModelOutput([[1, 2, 3]], [rows]))
            assert [len(part) for part in output.new_logprobs[:3]] == [2, 2, 2]
