"""Messages to bytes and back: pickle, with everything large beside it.

Data flow::

    value ─ dumps ─▶ Payload(header, buffers) ─ frame ─▶ loads(header, buffers) ─▶ value

``header`` is a pickle of protocol 5.  ``buffers`` are the blocks of memory that are not in it: the out-of-band buffers
of arrays (``arrays``), then every ``bytes``, ``bytearray`` or text of 64 KiB and more.  The pickler itself hands those
to its file as they are, so that the stream is cut around them and they are never copied; a header that was cut begins
with the places of the cuts, and is read through a file that puts the buffers back in their places.

What is plain needs no pickler of ours (``dumps_plain``), nor do arrays beside it (``dumps_row``).

What pickle cannot do is done here: exceptions whole (``exceptions``), and functions and classes that the receiver
cannot import, by value through cloudpickle where it is installed.

Trust: a pickle runs code.  Both ends of a channel are processes of one user that one of them started, connected by
descriptors that nobody else can open.  A receiver that does not trust the sender decodes by ``restricted``.

Invariants: I9 (buffers are views of the caller's memory, which stays unchanged until they are sent).

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

import pickle
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, NamedTuple

from engine_client.errors import SerializationError
from engine_client.protocol import arrays
from engine_client.protocol.frames import MAX_SEGMENTS

__all__ = ["LONGEST_PLAIN", "Payload", "are_plain", "dumps", "dumps_plain", "dumps_row", "loads"]

_PROTOCOL: Final = 5
_LARGE: Final = 64 * 1024
"""The pickler's own limit, from which on it hands bytes to its file instead of copying them."""
_CUT: Final = b"\x00"
"""First byte of a header that was cut; a pickle begins with 0x80."""
_CUT_BYTE: Final = _CUT[0]
_ROW: Final = b"\x01"
"""First byte of a header that is a row: plain values, and fields of which some are arrays."""
_ROW_BYTE: Final = _ROW[0]
_COUNT: Final = struct.Struct("<I")
_PLAIN: Final = frozenset({type(None), bool, int, float, str})
"""Pickle needs no help with them."""
LONGEST_PLAIN: Final = 16 * 1024
"""Bytes of a plain value's header; beyond, what is long may have to go beside it."""
_MAIN: Final = ("__main__", "__mp_main__")
"""What the module of the user's program is called; the second, where it was run again for its definitions."""


class Payload(NamedTuple):
    """An encoded value: the header, the memory beside it (views of bytes), whether it names objects of ``__main__``."""

    header: bytes
    buffers: list[memoryview]
    needs_main: bool


def dumps(value: Any, *, main_importable: bool = True) -> Payload:
    """Encode a value.

    The buffers are views of the value's own memory: keep it unchanged until they are sent.

    Args:
        value: anything that can be pickled, and exceptions, memoryviews, lambdas (these with cloudpickle).
        main_importable: the receiver can run the sender's ``__main__``, so that its objects can go by name.

    Raises:
        SerializationError: an object can be sent neither by name nor by value.
        Exception: whatever the value's own code raised (PicklingError, TypeError, ...).
    """
    kind = type(value)
    if kind in _PLAIN and not (kind is str and len(value) > LONGEST_PLAIN):
        return Payload(pickle.dumps(value, _PROTOCOL), [], False)
    return _dump(value, main_importable, None)


def are_plain(values: Iterable[Any]) -> bool:
    """Tell whether all are numbers, text or None, of exactly these types, so that ``dumps_plain`` may encode them."""
    return _PLAIN.issuperset(map(type, values))


def dumps_plain(value: Any) -> bytes | None:
    """Encode nested tuples of bytes and what is plain, several times as fast as ``dumps``; None if that is long."""
    header = pickle.dumps(value, _PROTOCOL)
    return header if len(header) <= LONGEST_PLAIN else None


def dumps_row(row: tuple[Any, ...], fields: Mapping[str, Any]) -> Payload | None:
    """Encode plain values and fields that are plain or arrays; ``loads`` returns one tuple, with a dict as its last.

    What arrays are made of goes into the header as numbers and text, so that neither side looks up a name: half of the
    time of ``dumps``.

    Returns:
        None: a field is neither plain nor an array that can go so, two are the same array, or the header is long.
    """
    plain: dict[str, Any] = {}
    seen: set[int] = set()
    places: list[tuple[str, str, list[Any]]] = []
    buffers: list[memoryview] = []
    for name, value in fields.items():
        kind = type(value)
        if kind in _PLAIN:
            plain[name] = value
            continue
        if (kind not in _REDUCERS and not _learn(kind.__module__, kind)) or id(value) in seen:
            return None
        reduced = _REDUCERS[kind](value)
        if reduced is NotImplemented:
            return None
        rebuild, (data, *layout) = reduced
        # Not what is small and in the header, nor a type that has no plain name: it may be one of ``__main__``.
        if type(data) is not pickle.PickleBuffer or type(layout[0]) is not str:
            return None
        seen.add(id(value))
        places.append((name, rebuild.__name__, layout))
        buffers.append(data.raw())
    header = dumps_plain((row, plain, places))
    return None if header is None else Payload(_ROW + header, buffers, False)


def _load_row(header: memoryview, views: Sequence[memoryview]) -> tuple[Any, ...]:
    row, fields, places = pickle.loads(header[1:])  # noqa: S301  # see Trust above
    for (name, rebuild, layout), view in zip(places, views, strict=True):
        fields[name] = arrays.REBUILD[rebuild](view, *layout)
    return (*row, fields)


def _dump(value: Any, main_importable: bool, seen: dict[int, BaseException] | None) -> Payload:
    pieces = _Pieces()
    buffers = _Buffers()
    pickler = _Pickler(pieces, _PROTOCOL, buffer_callback=buffers.keep)
    pickler.main_importable = main_importable
    pickler.seen = seen
    try:
        pickler.dump(value)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit out of a __getstate__ would end more than this message
        raise SerializationError(
            f"a {type(value).__qualname__} cannot be sent: pickling it raised {error!r}"
        ) from error
    views = [buffer.raw() for buffer in buffers] if buffers else []
    header = pieces[0] if len(pieces) == 1 else _cut(pieces, views)
    return Payload(header, views, pickler.needs_main)


def loads(header: bytes | memoryview, buffers: Sequence[memoryview] = (), *, restricted: bool = False) -> Any:
    """Decode what ``dumps``, ``dumps_plain`` or ``dumps_row`` made.

    ``restricted``: only plain data and registered types; see ``protocol.restricted``.

    Arrays and views are rebuilt over ``buffers``, without a copy and read-only; torch tensors over the owners of these
    views, which must begin where the views begin.

    Raises:
        Exception: whatever the code of the value's classes raised, or the import of their modules.
    """
    views = [buffer.toreadonly() for buffer in buffers] if buffers else ()
    if restricted:
        from engine_client.protocol.restricted import load_restricted  # noqa: PLC0415  # only for those who ask for it

        if not header or header[0] != _CUT_BYTE:
            return load_restricted(header, views)
        stream, beside = _join(memoryview(header), views)
        return load_restricted(b"", beside, stream)
    if header[0] > _ROW_BYTE:
        return pickle.loads(header, buffers=views)  # noqa: S301  # see Trust above
    if header[0] == _ROW_BYTE:
        return _load_row(memoryview(header), views)
    return _load_cut(memoryview(header), views)


class _Pieces(list[Any]):
    """The pickler's file: collects the pieces of the stream.  (A list is made faster than an object that has one.)"""

    __slots__ = ()
    write = list.append


class _Buffers(list[pickle.PickleBuffer]):
    """Collects what goes beside the stream."""

    __slots__ = ()

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer out of the stream; return True to leave it in because a frame cannot have more segments."""
        if len(self) >= MAX_SEGMENTS:
            return True
        self.append(buffer)
        return False


class _Pickler(pickle.Pickler):
    """Asked by pickle about every object that is not of a plain builtin type."""

    main_importable: bool
    needs_main = False
    seen: dict[int, BaseException] | None  # exceptions encoded around this value, which is a part of one

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle ``obj``, or NotImplemented for pickle's own way."""
        kind = type(obj)
        reduce = _REDUCERS.get(kind)
        if reduce is not None:
            return reduce(obj)
        if kind is FunctionType or issubclass(kind, type):
            return self._reduce_named(obj)
        module = kind.__module__
        if module in _MAIN:
            self.needs_main |= self.main_importable
        elif _learn(module, kind):
            return _REDUCERS[kind](obj)
        if issubclass(kind, BaseException):
            return self._reduce_exception(obj)
        return NotImplemented

    def _reduce_named(self, obj: Any) -> Any:
        """Let a function or class go by its name if it has one that the receiver can import, else by value."""
        if "<" not in obj.__qualname__:  # <locals>, <lambda>
            if obj.__module__ not in _MAIN:
                return NotImplemented
            if self.main_importable and _is_found(obj):
                self.needs_main = True
                return NotImplemented
        cloudpickle = _cloudpickle()
        if cloudpickle is None:
            raise SerializationError(
                f"{obj.__module__}.{obj.__qualname__} cannot be sent, because the other process cannot import it: "
                "put it into an importable module, or install the extra engine_client[notebook]"
            )
        return pickle.loads, (cloudpickle.dumps(obj, protocol=_PROTOCOL),)

    def _reduce_exception(self, error: BaseException) -> Any:
        from engine_client.protocol.exceptions import encode_exception  # noqa: PLC0415  # not needed for plain messages

        seen: dict[int, BaseException] = {} if self.seen is None else self.seen

        def dump_part(value: Any) -> tuple[bytes, list[memoryview]]:
            payload = _dump(value, self.main_importable, seen)
            self.needs_main |= payload.needs_main
            return payload.header, payload.buffers

        return _rebuild_exception, (encode_exception(error, dump_part, seen),)


_REDUCERS: Final[dict[type, Callable[[Any], Any]]] = {
    array: arrays.reduce_array,
    memoryview: arrays.reduce_memoryview,
}
_FOREIGN: Final = {
    "numpy": ("ndarray", arrays.reduce_ndarray),
    "torch": ("Tensor", arrays.reduce_tensor),
}


def _learn(module: str, kind: type) -> bool:
    """Note how to reduce a class of a library that is not imported from here; tell whether this is one."""
    name, reduce = _FOREIGN.get(module, ("", None))
    if reduce is None or kind is not getattr(sys.modules.get(module), name, None):
        return False
    _REDUCERS[kind] = reduce
    return True


def _is_found(obj: Any) -> bool:
    """Tell whether a function or class is what its name stands for here: not after its notebook cell ran again."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


def _cloudpickle() -> Any:
    """Return the cloudpickle module, or None where it is not installed."""
    try:
        import cloudpickle  # noqa: PLC0415  # optional
    except ImportError:
        return None
    return cloudpickle


def _rebuild_exception(envelope: tuple[Any, ...]) -> BaseException:
    """Decode an exception; what pickles of exceptions call by name."""
    from engine_client.protocol.exceptions import decode_exception  # noqa: PLC0415  # not needed for plain messages

    return decode_exception(envelope, loads)


def _cut(pieces: list[Any], buffers: list[memoryview]) -> bytes:
    """Move the large pieces of a pickle stream to ``buffers``; return the header made of the others.

    A large piece is one that the pickler passed on as it was; the piece before ends with its length.  Every border
    between pieces is a border between steps of the unpickler, so a wrong guess would do no harm.
    """
    small: list[bytes] = []
    places: list[int] = []
    place = 0
    for piece in pieces:
        length = len(piece)
        large = length >= _LARGE and len(buffers) < MAX_SEGMENTS
        if large and small and small[-1].endswith(_length_marks(length)):
            places.append(place)
            buffers.append(memoryview(piece))
        else:
            small.append(piece)
            place += length
    if not places:
        return b"".join(small)
    table = struct.pack(f"<{len(places)}Q", *places)
    return b"".join([_CUT, _COUNT.pack(len(places)), table, *small])


def _length_marks(length: int) -> tuple[bytes, ...]:
    wide = length.to_bytes(8, "little")
    return (wide,) if any(wide[4:]) else (wide[:4], wide)


def _load_cut(header: memoryview, buffers: Sequence[memoryview]) -> Any:
    stream, beside = _join(header, buffers)
    return pickle.Unpickler(stream, buffers=beside).load()  # noqa: S301  # see Trust above


def _join(header: memoryview, buffers: Sequence[memoryview]) -> tuple[_CutStream, Sequence[memoryview]]:
    """Return the stream of a header that was cut, and the buffers that are not part of it."""
    (count,) = _COUNT.unpack_from(header, 1)
    begin = 1 + _COUNT.size + count * 8
    stream = header[begin:]
    borders = [0, *struct.unpack_from(f"<{count}Q", header, 1 + _COUNT.size), len(stream)]
    first = len(buffers) - count
    pieces = [stream[borders[0] : borders[1]]]
    for number in range(count):
        pieces += [buffers[first + number], stream[borders[number + 1] : borders[number + 2]]]
    return _CutStream(pieces), buffers[:first]


class _CutStream:
    """The unpickler's file: the pieces of a stream in order, each step of the unpickler within one of them."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces[::-1]

    def read(self, size: int) -> Any:
        """Return a view of the next ``size`` bytes, fewer at the end of a piece."""
        pieces = self._pieces
        while len(pieces) > 1 and not pieces[-1]:
            pieces.pop()
        piece = pieces[-1]
        pieces[-1] = piece[size:]
        return piece[:size]

    def readinto(self, target: memoryview) -> int:
        """Copy the next bytes to ``target``; return how many there were."""
        source = self.read(len(target))
        begin = 0
        for part in arrays.slices(source):
            target[begin : begin + len(part)] = part
            begin += len(part)
        return begin

    def readline(self) -> bytes:
        """Return nothing: no step of protocol 5 reads a line, so that asking for one is an error."""
        return b""
