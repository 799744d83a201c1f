"""From columns to outputs; the whole way there and back is in ``test_batch``."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given, strategies as st

from engine_client.errors import RemoteProtocolError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.protocol.batch import Columns, decode_columns
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.outputs import outputs_from


def columns(keys: list[int], tokens: list[int], counts: list[int] | None = None, **fields: object) -> Columns:
    return Columns(3, 1.5, keys, tokens, counts, [], [])._replace(**fields)


def test_each_row_becomes_an_output_of_its_request() -> None:
    """In order, with its own tokens; a key that is unknown belongs to an aborted request, and its row is dropped."""
    outputs, finished = outputs_from(columns([1, 2, 3], [7, 8, 9]), {1: "a", 3: "c"})
    assert outputs.outputs == [EngineCoreOutput("a", [7]), EngineCoreOutput("c", [9])]
    assert (outputs.engine_index, outputs.timestamp, finished) == (3, 1.5, [])


def test_a_batch_without_a_time_stamp_gets_one() -> None:
    """As the class does, for an engine that sets none; what is at its default is there all the same."""
    outputs, _ = outputs_from(columns([1], [7])._replace(timestamp=0.0), {1: "a"})
    assert 0 < outputs.timestamp <= time.monotonic()
    assert outputs == EngineCoreOutputs(3, [EngineCoreOutput("a", [7])], timestamp=outputs.timestamp)
    assert (outputs.scheduler_stats, outputs.finished_requests, outputs.wave_complete) == (None, None, None)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=8))
def test_rows_with_other_than_one_token_keep_them_apart(rows: list[list[int]]) -> None:
    """Whatever the counts, none and several among them."""
    made = columns(list(range(len(rows))), [token for row in rows for token in row], [len(row) for row in rows])
    outputs, _ = outputs_from(made, dict(enumerate("abcdefgh")))
    assert [output.new_token_ids for output in outputs.outputs] == rows


def test_what_ends_and_what_is_beside_the_tokens() -> None:
    """Finish and stop reasons, sparse fields and statistics go to their rows, but for rows that are dropped."""
    made = columns([1, 2], [7, 8], finishes=[(0, 0, 42), (1, 1, None)], extras={"num_nans_in_logits": {0: 1, 1: 2}})
    outputs, finished = outputs_from(made._replace(meta={"wave_complete": 5}), {1: "a"})
    (only,) = outputs.outputs
    assert (only.finish_reason, only.stop_reason, only.num_nans_in_logits) == (FinishReason.STOP, 42, 1)
    assert (outputs.wave_complete, finished) == (5, [1])


class Suspicious(EngineCoreOutput):
    """Does not want to be compared."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("each comparison is a call for each token")

    __hash__ = None  # type: ignore[assignment]


def test_outputs_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the rows that are dropped, nothing is asked of those that are not."""
    monkeypatch.setattr(EngineCoreOutput, "__eq__", Suspicious.__eq__)
    outputs, _ = outputs_from(columns([1, 2], [7, 8]), {1: "a"})
    assert len(outputs.outputs) == 1


@pytest.mark.parametrize(("tokens", "counts"), [([7], None), ([7, 8, 9], None), ([7, 8], [2]), ([7], [1, 0, 0])])
def test_columns_of_different_lengths_are_refused(tokens: list[int], counts: list[int] | None) -> None:
    """A batch that would leave rows without tokens, or tokens without rows, is no batch."""
    header = pickle.dumps((0, 1.0, [1, 2], tokens, counts, [], [], None))
    with pytest.raises(RemoteProtocolError, match="2 keys"):
        decode_columns(Frame(Kind.OUTPUTS, 0, 0, header))
