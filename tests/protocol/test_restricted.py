"""Messages of engines that are not trusted: plain data and registered types come through, and nothing else does."""

from __future__ import annotations

import enum
import io
import os
import pickle
import sys
import tracemalloc
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, strategies as st

from engine_client import messages, register_type
from engine_client.errors import RemoteCallError, RemoteProtocolError, SerializationError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs, FinishReason, LogprobsLists, SchedulerStats
from engine_client.params import SamplingParams
from engine_client.protocol.batch import decode_columns, encode_outputs, with_values
from engine_client.protocol.codec import dumps, loads
from engine_client.protocol.frames import RESTRICTED, Frame, Kind
from engine_client.protocol.restricted import load_restricted

REFUSED = (SerializationError, RemoteProtocolError)


def cross(value: Any) -> Any:
    """Encode a value, and decode it as of somebody who is not trusted."""
    payload = dumps(value)
    return loads(payload.header, payload.buffers, restricted=True)


@dataclass(frozen=True)
class Frozen:
    a: int
    b: str = "b"


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: str = "b"


for _kind in (Frozen, Colour, Pair, Slotted):
    register_type(_kind)

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(),
        st.binary(),
        st.complex_numbers(allow_nan=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.text(), st.integers())), inner, max_size=4),
        st.frozensets(st.integers(), max_size=4),
        st.sets(st.text(), max_size=4),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=30,
)


@given(VALUES)
def test_plain_values_come_back_equal(value: Any) -> None:
    """Whatever they are made of, and of the same types."""
    found = cross(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        2**70,
        "x" * 100_000,
        b"y" * 70_000,
        bytearray(b"z" * 70_000),
        bytearray(b"z"),
        range(1, 10, 2),
        slice(1, None),
        [[1] * 300, dict.fromkeys(range(300)), set(range(300))],
        array("I", [1, 2]),
        FinishReason.STOP,
        SamplingParams(max_tokens=3),
        EngineCoreOutput("a", [1]),
        SchedulerStats(),
        LogprobsLists(1, 2, 3),
        Frozen(1),
        Slotted(1, "c"),
        Colour.RED,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_engines_send_comes_through(value: Any) -> None:
    """Large text and bytes beside the header, messages, and types that were registered."""
    found = cross(value)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(10),
        np.arange(100_000, dtype="f4").reshape(100, 1000),
        np.zeros((3, 0)),
        np.asfortranarray(np.ones((200, 300))),
        np.array(1.5),
    ],
    ids=str,
)
def test_arrays_of_plain_types_come_through(value: Any) -> None:
    """Over the buffers that came with the message."""
    found = cross(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)
    assert not found.flags.writeable


def test_views_come_through() -> None:
    """Of bytes, and of other formats."""
    assert bytes(cross(memoryview(b"abc" * 5000))) == b"abc" * 5000
    assert cross(memoryview(array("d", [1.5] * 1000))).tolist() == [1.5] * 1000


def test_an_exception_is_described() -> None:
    """By the name of its type, its text, its traceback and its causes; nothing of it is made."""
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer", object()) from inner
    except ValueError as error:
        found = cross(error)
    assert type(found) is RemoteCallError
    assert found.type_name == "ValueError"
    assert str(found).startswith("ValueError: ('outer', ")
    assert "in test_an_exception_is_described" in found.remote_traceback
    assert type(found.__cause__) is RemoteCallError
    assert str(found.__cause__) == "KeyError: 'inner'"
    assert str(cross(RuntimeError())) == "RuntimeError"
    assert "cannot be decoded" in str(load_restricted(pickle.dumps(_Calls(("engine_client.protocol.codec", 7))), ()))


class _Calls:
    """Pickled, it calls what decodes exceptions, with what is none."""

    def __init__(self, arg: Any) -> None:
        self.arg = arg

    def __reduce__(self) -> Any:
        from engine_client.protocol.codec import _rebuild_exception

        return _rebuild_exception, (self.arg,)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/evil",)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Evil(), "posix.mkdir"),
        ([1, {"a": (Evil(),)}], "posix.mkdir"),
        (os.getcwd, "posix.getcwd"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (np.int64(3), "scalar"),
        (np.array([None, 1]), "_reconstruct"),
        (EngineCoreOutput, "engine_client.messages.EngineCoreOutput"),
        ({"a": [FinishReason]}, "engine_client.messages.FinishReason"),
        (lambda: 1, "_pickle.loads"),
        ({(1, (2,)): 3}, "a tuple as a key"),
    ],
)
def test_everything_else_is_refused_by_name(value: Any, name: str) -> None:
    """The error says which type it was; nothing is imported or called."""
    with pytest.raises(SerializationError) as caught:
        cross(value)
    assert name in str(caught.value)


NAME = b"\x8c" + bytes([len("engine_client.messages")]) + b"engine_client.messages"


def named(name: str, module: bytes = NAME) -> bytes:
    """Return the opcodes that name something."""
    return module + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"


ARRAYS = b"\x8c" + bytes([len("engine_client.protocol.arrays")]) + b"engine_client.protocol.arrays"


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"\x80",
        b".",
        b"no pickle",
        b"K\x01",  # no end
        b"cos\nsystem\n(S'true'\ntR.",  # the oldest protocol
        b"\x8c\x02osK\x01\x93.",  # a name that is none
        b"K\x01K\x02R.",  # calls a number
        named("EngineCoreOutput") + b"K\x01\x81.",  # without arguments
        named("EngineCoreOutput") + b"K\x01\x85\x81.",  # with too many
        named("LogprobsLists") + b")\x81.",  # with too few
        named("FinishReason") + b"K\x63\x85R.",  # no such reason
        named("EngineCoreOutput") + b")\x81}\x8c\x09__class__K\x01sb.",  # what is no field
        named("EngineCoreOutput") + b"}\x8c\x08__init__K\x01sb.",  # of the class itself
        named("EngineCoreOutput") + b")\x81K\x01b.",
        b"]}K\x01K\x02sb.",  # attributes of a list
        b"]K\x01e.",
        b"K\x01a.",
        b"}K\x01a.",
        b"](K\x01u.",
        b"}(K\x01u.",  # a key without a value
        b"K\x01K\x02\x87.",  # three of two
        b"\x87.",
        b"\x97.",  # a buffer that is not there
        b"h\x05.",  # a memo that is not there
        named("rebuild_ndarray", ARRAYS) + b"C\x01a\x8c\x01O)\x8c\x01Ct" + b"R.",
        named("rebuild_ndarray", ARRAYS) + b"(C\x08aaaaaaaa\x8c\x01O)\x8c\x01CtR.",  # of objects
        named("rebuild_ndarray", ARRAYS) + b"(K\x01\x8c\x01b)\x8c\x01CtR.",  # over a number
        named("rebuild_ndarray", ARRAYS) + b"(C\x01a]]a)\x8c\x01CtR.",  # of a nested type
        named("rebuild_ndarray", ARRAYS)
        + b"(C\x01a\x8c\x01bJ\xff\xff\xff\x7f\x85\x8c\x01CtR.",  # larger than its bytes
        named("rebuild_memoryview", ARRAYS) + b"(C\x01a\x8c\x01OK\x01\x85tR.",
        named("rebuild_tensor", ARRAYS) + b"(C\x01a\x8c\x04loadK\x01\x85N\x89tR.",  # no type of torch's
        named("range", b"\x8c\x08builtins") + b"]\x85R.",
        b"\x00\xff\xff\xff\xff",  # a header that was cut in four thousand million places
    ],
)
def test_what_no_codec_writes_is_refused(pickled: bytes) -> None:
    """Each ends in one of two errors, and in no call and no attribute."""
    before = vars(messages.EngineCoreOutput)["__init__"]
    with pytest.raises((*REFUSED, ImportError) if b"tensor" in pickled else (*REFUSED, Exception)) as caught:
        loads(pickled, restricted=True)
    if pickled[:1] != b"\x00":
        assert isinstance(caught.value, REFUSED)
    assert vars(messages.EngineCoreOutput)["__init__"] is before


def test_opcodes_that_only_move_things() -> None:
    """Dropping, marks and numbered memos are understood, as an older pickler writes them."""
    assert loads(b"]K\x010.", restricted=True) == []
    assert loads(b"](K\x01K\x021.", restricted=True) == []
    assert loads(b"]q\x07h\x07\x86.", restricted=True) == ([], [])
    assert loads(b"]r\x07\x00\x00\x00j\x07\x00\x00\x00\x86.", restricted=True) == ([], [])
    assert loads(pickle.dumps([(1, 2), "a", {"b": 1}], 3), restricted=True) == [(1, 2), "a", {"b": 1}]


def test_memory_does_not_grow_with_what_an_index_promises() -> None:
    """The standard unpickler allocates gigabytes for this; and for a length that is a lie nothing is allocated."""
    tracemalloc.start()
    try:
        assert loads(b"\x80\x05]r\xff\xff\xff\x7f.", restricted=True) == []
        for lie in (b"\x8e" + b"\xff" * 7 + b"\x7fa", b"\x96" + b"\xff" * 7 + b"\x7fa", b"\x95" + b"\xff" * 8 + b"]"):
            with pytest.raises(REFUSED):
                loads(b"\x80\x05" + lie, restricted=True)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_an_expansion_without_end_is_not_made_a_text() -> None:
    """A value that contains itself a thousand million times is a value; as a key, or a text, it is refused."""
    bomb = (
        b"]"
        + b"\x94h\x00h\x00\x86\x94"
        + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(1, 40))
    )
    value = loads(bomb + b".", restricted=True)
    assert type(value) is tuple
    with pytest.raises(SerializationError, match="as a key"):
        loads(bomb + b"}h\x28K\x01s.", restricted=True)


@given(VALUES, st.data())
def test_garbage_is_refused_and_nothing_else(value: Any, data: st.DataObject) -> None:
    """A message that is cut, changed or repeated anywhere decodes to something plain, or ends in one of two errors."""
    header = bytearray(dumps([value, EngineCoreOutput("a", [1]), np.arange(3)]).header)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(0, len(header) - 1)))
        header[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    try:
        load_restricted(bytes(header), ())
    except REFUSED:
        return


def outputs_frame() -> Frame:
    """Return a batch with values, as of somebody who is not trusted."""
    outputs = EngineCoreOutputs(0, [EngineCoreOutput("a", [1, 2]), EngineCoreOutput("b", [3])], timestamp=1.0)
    outputs.outputs[1].kv_transfer_params = {"x": 1}
    outputs.outputs[0].finish_reason = FinishReason.STOP
    frame, _ = encode_outputs(outputs, {"a": 1, "b": 2})
    assert frame is not None
    return frame._replace(flags=frame.flags | RESTRICTED)


def test_a_batch_comes_through() -> None:
    """Columns and values alike."""
    columns, failed = with_values(decode_columns(outputs_frame()))
    assert (columns.keys, columns.tokens, columns.counts, failed) == ([1, 2], [1, 2, 3], [2, 1], [])
    assert columns.extras == {"kv_transfer_params": {1: {"x": 1}}}


@pytest.mark.parametrize(
    "change",
    [
        {0: "rank"},
        {1: 1},
        {2: "ab"},
        {2: [1, "b"]},
        {3: [1, 2]},
        {4: [5, -2]},
        {5: [(7, 0, None)]},
        {5: [(0, 99, None)]},
        {5: [(0, 0, [])]},
        {5: [[0, 0, None]]},
        {6: [b"x"]},
        {7: [2]},
        {7: "1"},
    ],
    ids=str,
)
def test_columns_that_cannot_be_are_refused(change: dict[int, Any]) -> None:
    """Rows that are not there, other types, counts that do not add up: not one of them reaches the tables."""
    plain = [0, 1.0, [1, 2], [1, 2, 3], [2, 1], [(0, 0, None)], [], [1]]
    plain[next(iter(change))] = next(iter(change.values()))
    frame = Frame(Kind.OUTPUTS, RESTRICTED, 2, pickle.dumps(tuple(plain), 5))
    with pytest.raises(RemoteProtocolError):
        decode_columns(frame)


@pytest.mark.parametrize("values", [({"__class__": {0: 1}}, None), ({"events": {9: 1}}, None), (None, {"outputs": []})])
def test_values_that_cannot_be_fail_their_rows(values: Any) -> None:
    """Attributes that outputs do not have, and rows that are not there."""
    frame = outputs_frame()
    columns = decode_columns(frame)
    assert columns.rest is not None
    columns.rest.frame = columns.rest.frame._replace(header=pickle.dumps(values, 5))
    columns, failed = with_values(columns)
    assert failed == [2]
    assert isinstance(columns.fault, RemoteProtocolError)


def test_a_stream_that_is_not_all_in_the_header() -> None:
    """It is read piece by piece, and has no lines."""
    assert load_restricted(b"", (), io.BytesIO(pickle.dumps([1, "a"], 5))) == [1, "a"]
    with pytest.raises(RemoteProtocolError):
        load_restricted(b"", (), io.BytesIO(b"cos\nsystem\n."))


def test_tensors_are_of_types_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch calls a type is one; anything else that it has is not called."""
    fake = SimpleNamespace(dtype=type, float32=float, load=print, empty=lambda shape, dtype: (shape, dtype))
    monkeypatch.setitem(sys.modules, "torch", fake)
    pickled = named("rebuild_tensor", ARRAYS) + b"(C\x00\x8c\x07float32K\x00\x85N\x89tR."
    assert loads(pickled, restricted=True) == ((0,), float)
    with pytest.raises(RemoteProtocolError, match="of no type"):
        loads(pickled.replace(b"\x07float32", b"\x04load"), restricted=True)
