"""From columns to the outputs that callers get, of the reference's class.

This is done once for each token, by whoever takes the outputs: the reader passes columns on as they are.

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.protocol.batch import Columns

__all__ = ["outputs_from"]

_REASONS: Final = tuple(FinishReason)
_new_object: Final = object.__new__


def outputs_from(columns: Columns, ids: Mapping[int, str]) -> tuple[EngineCoreOutputs, list[int]]:
    """Turn columns into the reference's objects.

    Args:
        columns: a decoded batch.
        ids: request id of each key; rows with other keys are dropped.

    Returns:
        The outputs, and the keys of the requests that they finish.
    """
    rows, are_known = _rows(columns, ids)
    finished = _finish(columns, rows) if columns.finishes else []
    for name, column in (columns.extras or {}).items():
        for row, value in column.items():
            if rows[row] is not None:
                setattr(rows[row], name, value)
    # Not ``None in rows``, which would ask each output whether it equals None.
    kept: Any = rows if are_known else [output for output in rows if output is not None]
    outputs: EngineCoreOutputs = _new_object(EngineCoreOutputs)  # as its rows: fields at their default are not set
    outputs.engine_index, outputs.outputs, outputs.timestamp = columns.engine_index, kept, columns.timestamp
    if not columns.timestamp:
        outputs.__post_init__()  # fills it in
    if columns.meta:
        for name, value in columns.meta.items():
            setattr(outputs, name, value)
    return outputs, finished


def _finish(columns: Columns, rows: list[EngineCoreOutput | None]) -> list[int]:
    """Say in outputs that they are the last of their requests; return the keys of these."""
    finished: list[int] = []
    for row, reason, stop_reason in columns.finishes:
        output = rows[row]
        if output is not None:
            output.finish_reason = _REASONS[reason]
            if stop_reason is not None:
                output.stop_reason = stop_reason
            finished.append(columns.keys[row])
    return finished


def _rows(columns: Columns, ids: Mapping[int, str]) -> tuple[list[EngineCoreOutput | None], bool]:
    """Make the outputs, id and tokens only, None where the key is unknown; tell whether all are known."""
    make = EngineCoreOutput.__new__
    find = ids.get
    rows: list[EngineCoreOutput | None] = []
    add = rows.append
    are_known = True
    tokens = columns.tokens
    of_rows = [[token] for token in tokens] if columns.counts is None else _cut(tokens, columns.counts)
    for key, new in zip(columns.keys, of_rows, strict=True):
        request_id = find(key)
        if request_id is None:
            add(None)
            are_known = False
        else:
            output = make(EngineCoreOutput)
            output.request_id = request_id
            output.new_token_ids = new
            add(output)
    return rows, are_known


def _cut(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """Return the new tokens of each row."""
    return [tokens[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
