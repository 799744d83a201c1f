"""The output batch of one step, as columns.

A step makes one small output for each of hundreds of requests.  As objects they cost more to pickle than to compute,
so they cross as columns: integer request keys, token ids, counts where a request got other than one token, a sparse
list of those that finished, and sparse columns for whatever else is not at its default::

    plain   (engine_index, timestamp, keys, tokens, counts | None, finishes, strays, heavy)     numbers and short texts
    values  (extras | None, meta | None)                                                        of any kind, if any

``keys`` are the integers that the client chose when it added the requests; its table turns them back into ids, and a
key that it no longer knows is a request that it has aborted: that row is dropped.  ``strays`` are rows whose request id
the engine itself does not know (a fault of the engine's), as text for the client's log.  The values are pickled apart
from the plain part: where they cannot be decoded, ``heavy`` still tells whose they were, and only those rows fail.

Measured (256 one-token rows, x86-64, Python 3.11): see ``engine-client bench``.

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, NamedTuple

from engine_client.errors import RemoteProtocolError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.protocol.codec import dumps, loads
from engine_client.protocol.exception_fields import text_of
from engine_client.protocol.frames import RESTRICTED, Flag, Frame, Kind, new_tuple
from engine_client.protocol.output_fields import comparison, set_fields
from engine_client.protocol.wire import load_frame

__all__ = [
    "Columns",
    "Rest",
    "decode_columns",
    "encode_outputs",
    "failed_batch",
    "split",
    "with_values",
]

_META: Final = {
    f.name: None if f.default is MISSING else f.default
    for f in fields(EngineCoreOutputs)
    if f.name not in ("engine_index", "outputs", "timestamp", "utility_output")
}
_get_meta = attrgetter(*_META)
_NO_META: Final = tuple(_META.values())
_NESTED: Final = int(Flag.NESTED)
_REASONS: Final = frozenset(map(int, FinishReason))
_NAMES: Final = frozenset(_META) | {f.name for f in fields(EngineCoreOutput)} - {"request_id", "new_token_ids"}
_LENGTH: Final = struct.Struct("<I")
"""In front of the plain part when values follow it."""
_LONGEST_PLAIN: Final = 1024
"""Characters; a longer stop reason counts as a value, so that the plain part never has buffers beside it."""


class Columns(NamedTuple):
    """A decoded batch, before its keys are turned into request ids."""

    engine_index: int
    timestamp: float
    keys: list[int]
    tokens: list[int]
    counts: list[int] | None
    finishes: list[tuple[int, int, Any]]
    strays: list[str]
    extras: dict[str, dict[int, Any]] | None = None
    meta: dict[str, Any] | None = None
    fault: BaseException | None = None
    """Why the values of this batch are missing."""
    rest: Rest | None = None
    """The values, not decoded yet."""
    rows: list[int] | None = None
    """Which rows of the engine's batch these are, if not all of them."""


_OUTPUTS: Final = int(Kind.OUTPUTS)
_NO_VALUES: Final = (None,) * 5
"""The last fields of ``Columns``, until its values are decoded."""


class Rest:
    """The values of a batch, decoded when they are wanted; the parts of a batch share one.

    Args:
        frame: holds them.
        heavy: the rows that have some.
    """

    __slots__ = ("_values", "frame", "heavy")

    def __init__(self, frame: Frame, heavy: list[int]) -> None:
        self.frame = frame
        self.heavy = heavy
        self._values: tuple[Any, Any] | None = None

    @property
    def size(self) -> int:
        """Return the bytes that are left to decode."""
        return 0 if self._values is not None else self.frame.size

    def load(self) -> tuple[Any, Any]:
        """Return the values and the rest of the fields; two threads at once may both decode them, which does no harm.

        Raises:
            BaseException: what decoding raised.
        """
        if self._values is None:
            values = load_frame(self.frame)
            if self.frame.flags >= RESTRICTED:
                _check_values(values, self.frame.ref)
            self._values = values
        return self._values


def _is_plain(stop_reason: Any) -> bool:
    return type(stop_reason) is int or (type(stop_reason) is str and len(stop_reason) <= _LONGEST_PLAIN)


_Rows = tuple[list[int], list[int], list[int], list[tuple[int, Any]], list[str]]


def _read_rows(outputs: Iterable[Any], known: Mapping[str, int], silent: Iterable[str]) -> _Rows:
    """Return keys, tokens and counts of the rows, row and output where that may say more, and strays."""
    keys: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    richer: list[tuple[int, Any]] = []
    strays: list[str] = []
    find = known.get
    compared: type = EngineCoreOutput
    differs: Callable[[Any], bool] = bool
    for output in outputs:
        request_id = output.request_id
        key = find(request_id) if type(request_id) is str else None
        if key is None:
            if not isinstance(request_id, str) or request_id not in silent:
                strays.append(repr(request_id)[:200])
            continue
        new = output.new_token_ids
        keys.append(key)
        tokens.extend(new)
        counts.append(len(new))
        if (kind := type(output)) is not compared:
            compared, differs = kind, comparison(kind)
        if len(output.__dict__) > 2 if kind is EngineCoreOutput else differs(output):
            richer.append((len(keys) - 1, output))
    return keys, tokens, counts, richer, strays


_Rest = tuple[list[tuple[int, int, Any]], list[str], dict[str, dict[int, Any]]]


def _read_rest(richer: Iterable[tuple[int, Any]]) -> _Rest:
    """Return what outputs say beside ids and tokens: which requests end and how, their ids, and sparse columns."""
    rest: _Rest = ([], [], {})
    finishes, finished, extras = rest
    for row, output in richer:
        values = set_fields(output)
        reason = values.pop("finish_reason", None)
        stop_reason = values.pop("stop_reason", None)
        if stop_reason is not None and (reason is None or not _is_plain(stop_reason)):
            values["stop_reason"] = stop_reason
            stop_reason = None
        if reason is not None:
            finishes.append((row, int(reason), stop_reason))
            finished.append(output.request_id)
        for name, value in values.items():
            extras.setdefault(name, {})[row] = value
    return rest


def encode_outputs(
    outputs: EngineCoreOutputs, keys: Mapping[str, int], silent: Iterable[str] = ()
) -> tuple[Frame | None, list[str]]:
    """Encode a step's outputs for one front-end.

    Args:
        outputs: what the engine returned.
        keys: the front-end's key of each request id that is in flight.
        silent: ids whose rows are dropped without a word (aborted in the meantime).

    Returns:
        The frame (None when nothing is left to say), and the ids of the requests that these outputs finish.

    Raises:
        SerializationError, TypeError, ...: a value in an output cannot be pickled.
    """
    found, tokens, counts, richer, strays = _read_rows(outputs.outputs, keys, silent)
    is_plain = type(outputs) is EngineCoreOutputs and _get_meta(outputs) == _NO_META
    meta = {} if is_plain else _meta_of(outputs)
    if not (found or meta or strays):
        return None, []
    finishes, finished, extras = _read_rest(richer) if richer else ([], [], {})
    plain = pickle.dumps(
        (
            outputs.engine_index,
            outputs.timestamp,
            found,
            tokens,
            None if counts.count(1) == len(counts) else counts,
            finishes,
            strays,
            sorted({row for column in extras.values() for row in column}) if extras else None,
        ),
        5,
    )
    if not (extras or meta):
        return new_tuple(Frame, (_OUTPUTS, 0, len(found), plain, (), None)), finished
    values = dumps((extras or None, meta or None))
    flags = Flag.NESTED | (Flag.NEEDS_MAIN if values.needs_main else 0)
    header = b"".join([_LENGTH.pack(len(plain)), plain, values.header])
    return Frame(_OUTPUTS, flags, len(found), header, values.buffers), finished


def _meta_of(outputs: Any) -> dict[str, Any]:
    """Return what a batch says beside its rows; missing attributes count as defaults."""
    return {name: value for name, default in _META.items() if (value := getattr(outputs, name, default)) is not default}


def decode_columns(frame: Frame) -> Columns:
    """Decode the plain part of an OUTPUTS frame; nothing is looked up, and no code of others runs.

    Raises:
        Exception: whatever decoding raised: the batch does not even tell its keys.
    """
    restricted = frame.flags >= RESTRICTED
    if not frame.flags & _NESTED:
        return _load_plain(frame.header, restricted=restricted)[0]
    end = _LENGTH.size + _LENGTH.unpack_from(frame.header)[0]
    columns, heavy = _load_plain(frame.header[_LENGTH.size : end], restricted=restricted)
    return columns._replace(rest=Rest(frame._replace(header=frame.header[end:]), heavy or []))


def split(columns: Columns, rows: Iterable[int]) -> tuple[list[Columns], Columns]:
    """Take some rows of a batch out, each as a batch of its own; return these, and what is left."""
    taken = set(rows)
    bounds = _bounds(columns)
    finishes: dict[int, list[tuple[int, int, Any]]] = {}
    for row, reason, stop_reason in columns.finishes:
        finishes.setdefault(row, []).append((0, reason, stop_reason))
    meta: dict[str, Any] | None = None if columns.rest is None else {}  # that of the batch stays with what is left
    singles = [_part(columns, [row], bounds, finishes.get(row, []))._replace(strays=[], meta=meta) for row in taken]
    left = [row for row in range(len(columns.keys)) if row not in taken]
    place = {row: index for index, row in enumerate(left)}
    kept = [(place[row], *finish) for row, *finish in columns.finishes if row in place]
    return singles, _part(columns, left, bounds, kept)


def _bounds(columns: Columns) -> list[int]:
    """Return where each row's tokens begin, and at last where they all end."""
    if columns.counts is None:
        return list(range(len(columns.keys) + 1))
    return [0, *accumulate(columns.counts)]


def _part(columns: Columns, rows: list[int], bounds: list[int], finishes: list[Any]) -> Columns:
    original = columns.rows
    tokens: list[int] = []
    for row in rows:
        tokens += columns.tokens[bounds[row] : bounds[row + 1]]
    return columns._replace(
        keys=[columns.keys[row] for row in rows],
        tokens=tokens,
        counts=None if columns.counts is None else [columns.counts[row] for row in rows],
        finishes=finishes,
        rows=None if columns.rest is None else [row if original is None else original[row] for row in rows],
    )


def failed_batch(rank: int, keys: list[int], text: str, timestamp: float) -> Columns:
    """Return a batch that ends requests with reason ERROR, which no engine has sent."""
    finishes = [(row, int(FinishReason.ERROR), text) for row in range(len(keys))]
    return Columns(rank, timestamp, keys, [], [0] * len(keys), finishes, [])


def with_values(columns: Columns) -> tuple[Columns, list[int]]:
    """Decode the values of a batch too.

    It is for whoever takes the outputs: decoding may import modules, which the reader must not wait for.

    Returns:
        The columns, and the keys of requests that fail here because their values cannot be decoded: each has a row that
        ends it with reason ERROR, and the engine does not know.
    """
    if columns.rest is None:
        return columns, []
    heavy = columns.rest.heavy
    if columns.rows is not None:
        heavy = [row for row, original in enumerate(columns.rows) if original in set(columns.rest.heavy)]
    try:
        extras, meta = columns.rest.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # the values' own code ran (SystemExit?); only these requests fail
        return _without_values(columns, heavy, error)
    if columns.rows is not None:
        extras = _extras_of(extras or {}, columns.rows)
    meta = meta if columns.meta is None else None
    return columns._replace(extras=extras, meta=meta, rest=None, rows=None), []


def _extras_of(extras: dict[str, dict[int, Any]], rows: list[int]) -> dict[str, dict[int, Any]]:
    """Return the values of some rows under their new numbers."""
    return {
        name: {row: column[original] for row, original in enumerate(rows) if original in column}
        for name, column in extras.items()
    }


def _load_plain(header: Any, *, restricted: bool) -> tuple[Columns, list[int] | None]:
    """Return the columns without values, and which rows have some."""
    plain = loads(header, restricted=True) if restricted else pickle.loads(header)  # noqa: S301  # the codec's trust
    columns = new_tuple(Columns, (*plain[:-1], *_NO_VALUES))
    if restricted:
        _check(columns, plain[-1])
    for finish in columns.finishes:
        if not _is_finish(finish, len(columns.keys)):
            raise RemoteProtocolError("an output batch ends requests that it does not name, or for no known reason")
    if len(columns.tokens if columns.counts is None else columns.counts) != len(columns.keys):
        raise RemoteProtocolError(f"an output batch has {len(columns.keys)} keys and other columns of another length")
    return columns, plain[-1]


def _check(columns: Columns, heavy: Any) -> None:
    """Raise unless the columns of an engine that is not trusted are what they should be."""
    rank, timestamp, keys, tokens, counts, finishes, strays = columns[:7]
    numbers = [keys, tokens, *([] if counts is None else [counts]), *([] if heavy is None else [heavy])]
    is_right = (
        all(type(column) is list and {int}.issuperset(map(type, column)) for column in numbers)
        and (type(rank), type(timestamp), type(finishes), type(strays)) == (int, float, list, list)
        and (counts is None or (min(counts, default=0) >= 0 and sum(counts) == len(tokens)))
        and all(0 <= row < len(keys) for row in heavy or ())
        and all(type(stray) is str for stray in strays)
    )
    if not is_right:
        raise RemoteProtocolError("an output batch has columns that cannot be")


def _is_finish(finish: Any, rows: int) -> bool:
    """Tell whether this is a row's number, a reason, and what it stopped at."""
    if type(finish) is not tuple or len(finish) != 3 or not {int}.issuperset(map(type, finish[:2])):
        return False
    return 0 <= finish[0] < rows and finish[1] in _REASONS and type(finish[2]) in {int, str, type(None)}


def _check_values(values: Any, rows: int) -> None:
    """Raise unless the values are columns of fields that outputs have."""
    extras, meta = values
    names = {*(extras or ()), *(meta or ())}
    if not (names <= _NAMES and all(0 <= row < rows for column in (extras or {}).values() for row in column)):
        raise RemoteProtocolError("an output batch has values that no output can have")


def _without_values(columns: Columns, heavy: list[int], error: BaseException) -> tuple[Columns, list[int]]:
    """End the rows whose values are lost."""
    text = f"an output cannot be decoded: {type(error).__name__}: {text_of(error)}"
    finishes = [finish for finish in columns.finishes if finish[0] not in heavy]
    finishes += [(row, int(FinishReason.ERROR), text) for row in heavy]
    columns = columns._replace(finishes=finishes, meta=None, fault=error, rest=None, rows=None)
    return columns, [columns.keys[row] for row in heavy]
