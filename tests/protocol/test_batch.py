"""Output batches as columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from engine_client.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    SchedulerStats,
)
from engine_client.protocol.batch import encode_outputs, outputs_from
from engine_client.protocol.framing import Flag
from engine_client.protocol.wire import Frame
from helpers.transport import columns_of


def round_trip(
    outputs: EngineCoreOutputs, keys: dict[str, int], ids: dict[int, str] | None = None
) -> tuple[EngineCoreOutputs, list[str], list[int]]:
    frame, finished_ids = encode_outputs(outputs, keys)
    assert frame is not None
    columns, failed = columns_of(frame)
    assert failed == []
    result, finished_keys = outputs_from(columns, ids if ids is not None else {key: name for name, key in keys.items()})
    return result, finished_ids, finished_keys


OUTPUT = st.builds(
    lambda tokens, reason, stop, nans: (tokens, reason, stop if reason is not None else None, nans),
    st.lists(st.integers(0, 2**31), max_size=5),
    st.none() | st.sampled_from(list(FinishReason)),
    st.none() | st.integers(0, 100) | st.text(max_size=5),
    st.integers(0, 3),
)


@given(st.lists(OUTPUT, min_size=1, max_size=8))
def test_every_output_arrives_as_it_was(rows: list[Any]) -> None:
    """Whatever a step says of its requests arrives equal, in order."""
    outputs = EngineCoreOutputs(
        3,
        [
            EngineCoreOutput(f"r{i}", tokens, finish_reason=reason, stop_reason=stop, num_nans_in_logits=nans)
            for i, (tokens, reason, stop, nans) in enumerate(rows)
        ],
        timestamp=1.5,
    )
    keys = {f"r{i}": i + 100 for i in range(len(rows))}
    result, finished_ids, finished_keys = round_trip(outputs, keys)
    assert result == outputs
    assert finished_ids == [f"r{i}" for i, row in enumerate(rows) if row[1] is not None]
    assert finished_keys == [keys[name] for name in finished_ids]


def test_statistics_and_events_travel_along() -> None:
    """A batch carries statistics, events and a stop reason before the end."""
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, 2.0)
    outputs = EngineCoreOutputs(
        0,
        [EngineCoreOutput("a", [1], events=[event], stop_reason="x"), EngineCoreOutput("b", [2])],
        scheduler_stats=SchedulerStats(num_running_reqs=2),
        timestamp=1.0,
        finished_requests={"c"},
        wave_complete=4,
    )
    result, _, _ = round_trip(outputs, {"a": 1, "b": 2})
    assert result == outputs


def test_a_batch_of_statistics_alone_is_sent() -> None:
    """A step without outputs still reports its statistics."""
    outputs = EngineCoreOutputs(0, [], scheduler_stats=SchedulerStats(step_counter=9), timestamp=1.0)
    result, _, _ = round_trip(outputs, {})
    assert result == outputs


def test_nothing_to_say_makes_no_frame() -> None:
    """An empty batch is not sent."""
    assert encode_outputs(EngineCoreOutputs(), {}) == (None, [])


def test_rows_of_aborted_requests_are_dropped_by_the_client() -> None:
    """A key that the client no longer knows is dropped, the other rows stay."""
    outputs = EngineCoreOutputs(
        0,
        [
            EngineCoreOutput("a", [1, 2], finish_reason=FinishReason.STOP, num_nans_in_logits=1),
            EngineCoreOutput("b", [3]),
        ],
        timestamp=1.0,
    )
    result, _, finished = round_trip(outputs, {"a": 1, "b": 2}, ids={2: "b"})
    assert result.outputs == [EngineCoreOutput("b", [3])]
    assert finished == []


def test_rows_without_a_request_are_reported_as_strays() -> None:
    """An id that nobody asked for is told to the client, an aborted one is not."""
    outputs = EngineCoreOutputs(
        0,
        [EngineCoreOutput(name, [1]) for name in ("unknown", None, 7, ["list"], "aborted")],  # type: ignore[arg-type]
    )
    frame, _ = encode_outputs(outputs, {}, silent={"aborted"})
    assert frame is not None
    columns, _ = columns_of(frame)
    assert columns.strays == ["'unknown'", "None", "7", "['list']"]


def test_any_object_with_the_attributes_serves_as_output() -> None:
    """Outputs of another class are read by attribute."""
    outputs = EngineCoreOutputs(0, timestamp=1.0)
    outputs.outputs = [SimpleNamespace(request_id="a", new_token_ids=(5, 6), finish_reason=1)]  # type: ignore[list-item]
    result, finished, _ = round_trip(outputs, {"a": 1})
    assert result.outputs == [EngineCoreOutput("a", [5, 6], finish_reason=FinishReason.LENGTH)]
    assert finished == ["a"]


class Undecodable:
    """Raises when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_a_value_that_cannot_be_decoded_fails_its_request_only() -> None:
    """A request with an undecodable value ends with ERROR and the reason; the others of its batch go on."""
    outputs = EngineCoreOutputs(
        0,
        [
            EngineCoreOutput("a", [1], pooling_output=Undecodable(), finish_reason=FinishReason.STOP),
            EngineCoreOutput("b", [1]),
            EngineCoreOutput("c", [2], finish_reason=FinishReason.LENGTH),
        ],
    )
    frame, _ = encode_outputs(outputs, {"a": 1, "b": 2, "c": 3})
    assert frame is not None
    assert frame.flags & Flag.NESTED
    columns, failed = columns_of(frame)
    assert failed == [1]
    assert isinstance(columns.fault, ValueError)
    result, finished = outputs_from(columns, {1: "a", 2: "b", 3: "c"})
    assert [output.finish_reason for output in result.outputs] == [FinishReason.ERROR, None, FinishReason.LENGTH]
    assert "ValueError" in str(result.outputs[0].stop_reason)
    assert sorted(finished) == [1, 3]


def test_statistics_that_cannot_be_decoded_cost_nobody_a_token() -> None:
    """Without its statistics a batch still has its tokens."""
    outputs = EngineCoreOutputs(0, [EngineCoreOutput("a", [1])], scheduler_stats=Undecodable())  # type: ignore[arg-type]
    frame, _ = encode_outputs(outputs, {"a": 1})
    assert frame is not None
    columns, failed = columns_of(frame)
    assert failed == []
    assert outputs_from(columns, {1: "a"})[0].outputs == [EngineCoreOutput("a", [1])]


def test_large_values_travel_beside_the_plain_part() -> None:
    """Values of any size arrive equal, and so does a stop reason as long as an error's text may be."""
    outputs = EngineCoreOutputs(
        0,
        [
            EngineCoreOutput("a", [1], pooling_output=list(range(100_000))),
            EngineCoreOutput("b", [], finish_reason=FinishReason.ERROR, stop_reason="x" * 200_000),
            EngineCoreOutput("c", [], pooling_output=bytes(range(256)) * 1000),
        ],
        timestamp=1.0,
    )
    result, _, _ = round_trip(outputs, {"a": 1, "b": 2, "c": 3})
    assert result == outputs


def test_a_batch_whose_buffers_could_not_be_mapped_fails_alone() -> None:
    """A frame that arrives with an error in place of its buffers still tells whose it was."""
    outputs = EngineCoreOutputs(0, [EngineCoreOutput("a", [1], pooling_output=[1.5])])
    frame, _ = encode_outputs(outputs, {"a": 1})
    assert frame is not None
    broken = Frame(frame.kind, frame.flags, frame.ref, frame.header, (), OSError("no memory"))
    columns, failed = columns_of(broken)
    assert failed == [1]
    assert "no memory" in columns.finishes[0][2]


def interrupt() -> None:
    """Raise as Ctrl-C does."""
    raise KeyboardInterrupt


class Interrupted:
    """Is interrupted when it is unpickled."""

    def __reduce__(self) -> Any:
        return interrupt, ()


def test_an_interrupt_of_decoding_is_no_fault_of_the_values() -> None:
    """Ctrl-C passes through, and the batch can be decoded again."""
    frame, _ = encode_outputs(
        EngineCoreOutputs(0, [EngineCoreOutput("a", [1], pooling_output=Interrupted())]), {"a": 1}
    )
    assert frame is not None
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            columns_of(frame)
