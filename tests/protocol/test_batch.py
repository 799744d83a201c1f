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
from engine_client.protocol.batch import (
    Columns,
    decode_columns,
    encode_outputs,
    failed_batch,
    split,
    with_values,
)
from engine_client.protocol.frames import Flag, Frame
from engine_client.protocol.outputs import outputs_from
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


def columns_from(rows: list[Any], **fields: Any) -> tuple[Columns, dict[int, str]]:
    """Return a batch of rows as it arrives, its values not decoded, and the ids of its keys."""
    outputs = EngineCoreOutputs(3, timestamp=1.5, **fields)
    for number, (tokens, reason, stop, nans) in enumerate(rows):
        output = EngineCoreOutput(f"r{number}", tokens, finish_reason=reason, stop_reason=stop)
        if nans:
            output.pooling_output = [float(nans)]
        outputs.outputs.append(output)
    keys = {output.request_id: 100 + number for number, output in enumerate(outputs.outputs)}
    frame, _ = encode_outputs(outputs, keys)
    assert frame is not None
    return decode_columns(frame), {key: name for name, key in keys.items()}


def turned(columns: Columns, ids: dict[int, str]) -> tuple[EngineCoreOutputs, list[int]]:
    """Return a batch as outputs, and the keys that it finishes."""
    decoded, failed = with_values(columns)
    assert failed == []
    assert (decoded.rest, decoded.rows) == (None, None)
    return outputs_from(decoded, ids)


@given(st.lists(OUTPUT, min_size=1, max_size=8), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_the_parts_of_a_batch_are_the_batch(rows: list[Any], first: set[int], second: set[int]) -> None:
    """Taken apart, even twice, a batch gives the same outputs and ends the same requests as undivided."""
    statistics = SchedulerStats(num_running_reqs=2)
    whole, ids = columns_from(rows, scheduler_stats=statistics)
    expected, finished = turned(whole, ids)
    singles, rest = split(whole, {row for row in first if row < len(rows)})
    more, rest = split(rest, {row for row in second if row < len(rest.keys)})
    found: dict[str, EngineCoreOutput] = {}
    ended: list[int] = []
    for part in (*singles, *more):
        assert len(part.keys) == 1
        outputs, keys = turned(part, ids)
        assert outputs.scheduler_stats is None
        assert (outputs.engine_index, outputs.timestamp) == (3, 1.5)
        found[outputs.outputs[0].request_id] = outputs.outputs[0]
        ended += keys
    outputs, keys = turned(rest, ids)
    assert outputs.scheduler_stats == statistics
    assert [o.request_id for o in outputs.outputs] == [
        o.request_id for o in expected.outputs if o.request_id not in found
    ]
    found |= {output.request_id: output for output in outputs.outputs}
    assert [found[output.request_id] for output in expected.outputs] == expected.outputs
    assert sorted(ended + keys) == sorted(finished)


def test_strays_stay_with_what_is_left() -> None:
    """What the engine says of no request in particular is told once, by the rest of the batch."""
    frame, _ = encode_outputs(EngineCoreOutputs(0, [EngineCoreOutput("a", [1]), EngineCoreOutput("?", [1])]), {"a": 1})
    assert frame is not None
    (single,), rest = split(decode_columns(frame), [0])
    assert (single.keys, single.strays) == ([1], [])
    assert (rest.keys, rest.strays) == ([], ["'?'"])


def test_parts_share_what_is_decoded() -> None:
    """The values are decoded once, by whoever wants them first; their size is what is left to do."""
    columns, ids = columns_from([([1], None, None, 1), ([2], None, None, 2)])
    (single,), rest = split(columns, [0])
    assert single.rest is rest.rest is columns.rest
    assert columns.rest is not None
    assert columns.rest.size > 0
    turned(single, ids)
    assert columns.rest.size == 0
    assert columns.rest.load() is columns.rest.load()
    assert turned(rest, ids)[0].outputs == [EngineCoreOutput("r1", [2], pooling_output=[2.0])]


def test_the_size_of_values_counts_what_is_beside_the_header() -> None:
    """A large value is as large before it is decoded."""
    outputs = EngineCoreOutputs(0, [EngineCoreOutput("a", [1], pooling_output=bytes(1 << 20))])
    frame, _ = encode_outputs(outputs, {"a": 1})
    assert frame is not None
    rest = decode_columns(frame).rest
    assert rest is not None
    assert rest.size >= 1 << 20


def test_only_the_parts_with_lost_values_fail() -> None:
    """Of a batch that was taken apart, the rows whose values cannot be decoded end, under their own keys."""
    outputs = EngineCoreOutputs(
        0,
        [
            EngineCoreOutput("a", [1]),
            EngineCoreOutput("b", [2], pooling_output=Undecodable()),
            EngineCoreOutput("c", [3], finish_reason=FinishReason.STOP),
            EngineCoreOutput("d", [4], pooling_output=[1.0], finish_reason=FinishReason.STOP),
        ],
    )
    keys = {"a": 1, "b": 2, "c": 3, "d": 4}
    frame, _ = encode_outputs(outputs, keys)
    assert frame is not None
    singles, rest = split(decode_columns(frame), [0, 1])
    found = {}
    for part in (*singles, rest):
        columns, failed = with_values(part)
        made, _ = outputs_from(columns, {key: name for name, key in keys.items()})
        found |= {output.request_id: (output.finish_reason, failed) for output in made.outputs}
    assert found == {
        "a": (None, []),
        "b": (FinishReason.ERROR, [2]),
        "c": (FinishReason.STOP, [4]),
        "d": (FinishReason.ERROR, [4]),
    }


def test_a_batch_can_be_made_that_ends_requests() -> None:
    """Each request of it ends with reason ERROR and the text, without a token; aborted ones are dropped as ever."""
    columns = failed_batch(2, [7, 8, 9], "the engine died", 1.5)
    assert with_values(columns) == (columns, [])
    outputs, finished = outputs_from(columns, {7: "a", 9: "c"})
    assert (outputs.engine_index, outputs.timestamp) == (2, 1.5)
    assert outputs.outputs == [
        EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason="the engine died") for name in "ac"
    ]
    assert finished == [7, 9]
    (single,), rest = split(columns, [1])
    assert outputs_from(single, {8: "b"})[1] == [8]
    assert outputs_from(rest, {7: "a", 9: "c"})[1] == [7, 9]
