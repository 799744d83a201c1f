"""Messages: plain data with a few conveniences (names, order and defaults are in test_surface)."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time

import pytest

from engine_client.messages import (
    FINISH_REASON_STRINGS,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
    UtilityOutput,
    UtilityResult,
)
from engine_client.params import PoolingParams, SamplingParams


def request(sampling=None, pooling=None):
    return EngineCoreRequest("r", [1], None, sampling, pooling, 0.0, None, None, None)


def test_params_of_a_request():
    """``params`` are the sampling parameters, or else the pooling parameters, or an error that names the request."""
    sampling, pooling = SamplingParams(), PoolingParams()
    assert request(sampling, pooling).params is sampling
    assert request(pooling=pooling).params is pooling
    with pytest.raises(ValueError, match="'r' has neither"):
        _ = request().params


def test_finish_reasons_have_names():
    """A finish reason prints as the word that clients show."""
    assert [str(reason) for reason in FinishReason] == list(FINISH_REASON_STRINGS)


def test_events_have_a_time():
    """An event is stamped now, on the monotonic clock, unless a time is given."""
    before = time.monotonic()
    event = EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)
    assert before <= event.timestamp <= time.monotonic()
    assert EngineCoreEvent.new_event(EngineCoreEventType.QUEUED, 1.5).timestamp == 1.5


def test_outputs_have_a_time():
    """Outputs are stamped when they are made, unless they carry a time already."""
    before = time.monotonic()
    assert before <= EngineCoreOutputs().timestamp <= time.monotonic()
    assert EngineCoreOutputs(timestamp=1.5).timestamp == 1.5


def test_outputs_do_not_share_lists():
    """Every batch of outputs has a list of its own."""
    assert EngineCoreOutputs().outputs is not EngineCoreOutputs().outputs


FULL = {
    "new_logprobs": LogprobsLists([[1]], [[0.5]], [1]),
    "new_prompt_logprobs_tensors": [1],
    "pooling_output": [0.5],
    "finish_reason": FinishReason.STOP,
    "stop_reason": 3,
    "events": [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)],
    "kv_transfer_params": {"a": 1},
    "trace_headers": {"b": "c"},
    "prefill_stats": PrefillStats(3),
    "routed_experts": [1],
    "num_nans_in_logits": 2,
}


def test_output_with_every_field():
    """Every field that is given is there, and survives copying, pickling and ``dataclasses.replace``."""
    output = EngineCoreOutput("r", [1], **FULL)
    assert dataclasses.asdict(output).keys() == {"request_id", "new_token_ids", *FULL}
    assert {name: getattr(output, name) for name in FULL} == FULL
    for twin in (copy.deepcopy(output), pickle.loads(pickle.dumps(output)), dataclasses.replace(output)):
        assert twin == output


def test_output_with_defaults():
    """Fields that are not given have their defaults, though the instance does not store them."""
    output = EngineCoreOutput("r", [1])
    assert output == EngineCoreOutput("r", [1], **{f.name: f.default for f in dataclasses.fields(output)[2:]})
    assert vars(output) == {"request_id": "r", "new_token_ids": [1]}
    assert not output.finished
    output.finish_reason = FinishReason.LENGTH
    assert output.finished
    assert "finish_reason=<FinishReason.LENGTH: 1>" in repr(output)


@pytest.mark.parametrize("message", [SchedulerStats(1, 2), UtilityOutput(3, None, UtilityResult({4})), request()])
def test_messages_are_plain_data(message):
    """Messages compare by content and survive pickling."""
    assert pickle.loads(pickle.dumps(message)) == message
