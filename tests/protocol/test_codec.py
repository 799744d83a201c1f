"""Values to bytes and back: what stays in the header, what lies beside it, and what happens when it cannot be done."""

from __future__ import annotations

import array
import collections
import datetime
import enum
import functools
import pickle
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from engine_client.errors import SerializationError
from engine_client.protocol import arrays, codec
from engine_client.protocol.codec import dumps, loads
from engine_client.protocol.frames import MAX_SEGMENTS
from helpers.transport import carry, cross

KIB64 = 64 * 1024
MIB = 1 << 20


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int
    y: object = None


class Pair(NamedTuple):
    a: object
    b: object


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.sampled_from([Colour.RED, datetime.timedelta(3), range(4), int, len, print, collections.OrderedDict]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.text(), inner, max_size=5),
        st.frozensets(st.integers() | st.text(), max_size=5),
        st.sets(st.integers() | st.text(), max_size=5),
        st.builds(Point, st.integers(), inner),
        st.builds(Pair, inner, inner),
        st.builds(
            lambda size, mark: mark * size,
            st.sampled_from([KIB64 - 1, KIB64, KIB64 + 1]),
            st.sampled_from([b"x", "y", "é"]),
        ),
    ),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=300)
def test_any_value_arrives_equal_and_of_the_same_type(value):
    """Sets stay sets, tuples tuples, bytearrays bytearrays, whatever their size and nesting."""
    got = cross(value)
    assert type(got) is type(value)
    assert got == value


def test_identity_within_a_message_is_kept():
    """An object that occurs twice arrives as one, and cycles arrive as cycles."""
    shared = [1]
    cycle = [shared, shared]
    cycle.append(cycle)
    got = cross(cycle)
    assert got[0] is got[1]
    assert got[2] is got


# -- what is not copied ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [KIB64, KIB64 + 1, 3 * MIB])
def test_large_bytes_become_buffers_themselves(size):
    """From 64 KiB on the buffer is the very object, and the header is small."""
    value = bytes(size)
    payload = dumps({"a": value, "b": [value, 5]})
    (buffer,) = payload.buffers
    assert buffer.obj is value
    assert (buffer.format, buffer.ndim) == ("B", 1)
    assert len(payload.header) < 100
    got = carry(payload)
    assert got == {"a": value, "b": [value, 5]}
    assert got["a"] is got["b"][0]


def test_smaller_bytes_stay_in_the_header():
    """One byte less than 64 KiB needs no segment."""
    assert dumps(bytes(KIB64 - 1)).buffers == []


def test_encoding_large_bytes_allocates_next_to_nothing():
    """64 MiB of bytes cost less than 64 KiB to encode."""
    value = bytes(64 * MIB)
    tracemalloc.start()
    try:
        payload = dumps(value)
        assert tracemalloc.get_traced_memory()[1] < KIB64
    finally:
        tracemalloc.stop()
    assert payload.buffers[0].nbytes == 64 * MIB


def test_decoding_large_bytes_copies_once():
    """The peak is the result itself."""
    payload = dumps(bytes(32 * MIB))
    tracemalloc.start()
    try:
        got = loads(payload.header, payload.buffers)
        assert tracemalloc.get_traced_memory()[1] < 33 * MIB
    finally:
        tracemalloc.stop()
    assert len(got) == 32 * MIB


def test_large_values_of_all_kinds_side_by_side_find_their_places():
    """Buffers of arrays come first in the list, cut-out pieces after them, in the order of the stream."""
    value = [
        b"a" * KIB64,
        np.arange(5000),
        "text" * KIB64,
        bytearray(b"c") * KIB64,
        array.array("d", [1.5]) * 5000,
        list(range(100_000)),
        memoryview(b"d" * KIB64),
        "ü" * KIB64,
        b"e" * (5 * MIB),
        Point(1, b"f" * KIB64),
    ]
    payload = dumps(value)
    assert [buffer.nbytes for buffer in payload.buffers] == [
        40_000, 40_000, KIB64, KIB64, 4 * KIB64, KIB64, 2 * KIB64, 5 * MIB, KIB64,
    ]  # fmt: skip
    got = carry(payload)
    assert got[1].tolist() == value[1].tolist()
    del got[1], value[1]
    assert got == value


def test_a_long_list_needs_no_buffers_although_its_header_is_long():
    """The stream of small objects is one header, however long."""
    value = list(range(300_000))
    payload = dumps(value)
    assert payload.buffers == []
    assert len(payload.header) > KIB64
    assert carry(payload) == value


def test_bytes_that_look_like_a_header_do_no_harm():
    """Large bytes that end with the length of the next ones are still told apart."""
    first = b"x" * KIB64 + (KIB64 + 8).to_bytes(8, "little")
    value = [first, b"y" * (KIB64 + 8), first]
    assert cross(value) == value


def test_a_large_header_may_be_a_view():
    """The frame reader gives large headers as views."""
    for value in (list(range(300_000)), [b"x" * KIB64, list(range(300_000))]):
        payload = dumps(value)
        assert loads(memoryview(bytearray(payload.header)), payload.buffers) == value


def test_more_buffers_than_a_frame_has_segments_for_stay_in_the_header(monkeypatch):
    """The value arrives all the same."""
    monkeypatch.setattr(codec, "MAX_SEGMENTS", 2)
    value = [np.full(5000, 1), np.full(5000, 2), np.full(5000, 3), b"x" * KIB64]
    payload = dumps(value)
    assert len(payload.buffers) == 2
    got = carry(payload)
    assert [part.tolist() for part in got[:3]] == [part.tolist() for part in value[:3]]
    assert got[3] == value[3]
    assert MAX_SEGMENTS == 65_535


def test_lengths_of_4_gib_and_more_are_told_by_eight_bytes():
    """The mark before a cut-out piece is its length, in four bytes where that is possible; none is made here."""
    assert codec._length_marks(KIB64) == (b"\0\0\1\0", b"\0\0\1\0\0\0\0\0")  # noqa: SLF001
    assert codec._length_marks((2 << 30) + 1)[0] == b"\1\0\0\x80"  # noqa: SLF001
    assert codec._length_marks((4 << 30) + 1) == (b"\1\0\0\0\1\0\0\0",)  # noqa: SLF001


def test_a_header_whose_pieces_are_missing_is_an_error_of_that_message():
    """Truncated or absent buffers raise; nothing is read out of range."""
    payload = dumps([b"x" * KIB64, b"y" * KIB64])
    short = [payload.buffers[0], payload.buffers[1][:-1]]
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        loads(payload.header, short)
    for cut in range(len(payload.header)):
        with pytest.raises(Exception):  # noqa: B017, PT011  # any error will do
            loads(payload.header[:cut], payload.buffers)
    assert codec._CutStream([memoryview(b"a")]).readline() == b""  # noqa: SLF001


def test_copies_are_made_in_slices_in_which_other_threads_can_run(monkeypatch):
    """Every slice of a large bytes object is a step of its own."""
    seen = []
    slices = arrays.slices

    def spy(view):
        for piece in slices(view):
            seen.append(len(piece))
            yield piece

    monkeypatch.setattr(arrays, "slices", spy)
    value = bytes(2 * MIB + 5)
    assert cross(value) == value
    assert seen == [MIB, MIB, 5]


def test_buffers_arrive_read_only_even_if_the_memory_is_not():
    """Nobody can write into received memory by accident."""
    got = cross(pickle.PickleBuffer(bytearray(5000)))
    assert got.readonly


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def main_module(monkeypatch):
    """A class and a function that live in ``__main__``, as those of a user's script do."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec("class Config:\n    depth = 3\ndef function(x):\n    return x + 1\n", namespace)
    main = sys.modules["__main__"]
    for name in ("Config", "function"):
        monkeypatch.setattr(main, name, namespace[name], raising=False)
    return main


def test_objects_of_main_go_by_name_and_are_noted(main_module):
    """Class, function, instance: the receiver is told that it must run the script first."""
    for value in (main_module.Config, main_module.function, main_module.Config(), [{"deep": main_module.Config}]):
        payload = dumps(value)
        assert payload.needs_main
        assert len(payload.header) < 200
    assert carry(dumps(main_module.function)) is main_module.function
    assert not dumps([1, Point(1), len, "__main__", b"__main__"]).needs_main


def test_objects_of_main_that_its_name_no_longer_finds_go_by_value(main_module, monkeypatch):
    """An object of before its cell ran again is not taken for one of the class that has its name now."""
    old = main_module.Config
    monkeypatch.setattr(main_module, "Config", type("Config", (), {"__module__": "__main__"}))
    payload = dumps([old])
    assert not payload.needs_main
    assert carry(payload)[0] is not main_module.Config
    assert dumps([main_module.Config]).needs_main


def test_objects_of_a_main_that_was_run_again_are_noted(main_module, monkeypatch):
    """In a child of multiprocessing the script's classes are those of ``__mp_main__``."""
    monkeypatch.setitem(sys.modules, "__mp_main__", main_module)
    monkeypatch.setattr(main_module.Config, "__module__", "__mp_main__")
    for value in (main_module.Config, main_module.Config()):
        payload = dumps(value)
        assert payload.needs_main
        assert b"__mp_main__" in payload.header


def test_objects_of_a_session_go_by_value_where_cloudpickle_is_installed(main_module):
    """A fresh interpreter, which has no such names, can use them."""
    value = {"config": main_module.Config(), "function": main_module.function, "class": main_module.Config}
    payload = dumps(value, main_importable=False)
    assert not payload.needs_main
    script = (
        "import sys, pickle; value = pickle.loads(sys.stdin.buffer.read()); "
        "assert type(value['config']) is value['class']; "
        "print(value['config'].depth + value['function'](1))"
    )
    done = subprocess.run([sys.executable, "-c", script], input=payload.header, capture_output=True, check=False)
    assert done.stdout == b"5\n", done.stderr


def test_lambdas_and_local_definitions_go_by_value_where_cloudpickle_is_installed():
    """Closures keep what they closed over."""
    step = 5

    def add(x):
        return x + step

    class Local:
        size = 3

    for main_importable in (True, False):
        got = cross([lambda x: x * step, add, Local(), functools.partial(add, 2)], main_importable=main_importable)
        assert (got[0](2), got[1](2), got[2].size, got[3]()) == (10, 7, 3, 7)


@pytest.fixture
def no_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # what import finds when a package is not installed


def test_without_cloudpickle_the_error_names_the_object_and_the_way_out(main_module, no_cloudpickle):
    """Whatever cannot be imported by the other side is refused in the caller, by name."""

    def local():
        """Do nothing."""

    for value, name in [
        (lambda: 1, "<lambda>"),
        (local, "local"),
        (main_module.Config(), "__main__.Config"),
        (main_module.function, "__main__.function"),
    ]:
        with pytest.raises(SerializationError, match=rf"{name} cannot be sent.*importable module.*\[notebook\]"):
            dumps([value], main_importable=False)
    assert dumps(main_module.Config()).needs_main


def test_a_class_of_any_metaclass_goes_by_name():
    """Also abstract classes and enums."""
    assert cross(Colour) is Colour
    assert cross(collections.abc.Mapping) is collections.abc.Mapping


# -- failures ----------------------------------------------------------------------------------------------------------


class Failing:
    def __init__(self, error):
        self.error = error

    def __getstate__(self):
        raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("mine"), TypeError("type"), pickle.PicklingError("pickle"), RecursionError()]
)
def test_an_exception_of_the_values_own_code_is_raised_as_it_is(error):
    """The caller sees what its own __getstate__ raised."""
    with pytest.raises(type(error)) as caught:
        dumps([Failing(error)])
    assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_an_exit_out_of_a_value_does_not_end_the_process(error):
    """What would end a thread or process becomes SerializationError with that cause."""
    with pytest.raises(SerializationError, match="pickling it raised") as caught:
        dumps(Failing(error))
    assert caught.value.__cause__ is error


def test_the_users_interrupt_is_not_swallowed():
    """Ctrl-C while a value is pickled reaches the user."""
    with pytest.raises(KeyboardInterrupt):
        dumps(Failing(KeyboardInterrupt()))


@pytest.mark.parametrize(
    "value", [threading.Lock(), sys, (n for n in ()), sys.__stdin__], ids=lambda v: type(v).__name__
)
def test_what_cannot_be_pickled_raises_in_the_caller(value):
    """Locks, modules, generators, files; and the next value is not affected."""
    with pytest.raises((TypeError, pickle.PicklingError)):
        dumps({"value": value})
    assert cross(1) == 1


def test_a_value_nested_too_deeply_raises_recursion_error():
    """The interpreter's limit is an error of that message."""
    value: list = []
    for _ in range(1_000_000):
        value = [value]
    with pytest.raises(RecursionError):
        dumps(value)
    while value:
        value = value.pop()


def test_many_threads_encode_at_once():
    """Nothing is shared between calls."""
    wrong = []

    def work(number):
        for _ in range(50):
            value = [number] * 100, np.full(1000, number), b"%d" % number * KIB64
            got = cross(value)
            if got[0] != value[0] or got[1][0] != number or got[2] != value[2]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_class_that_calls_itself_by_a_librarys_name_is_not_taken_for_it():
    """Only the library's own class is; an impostor is pickled as what it is."""
    impostor = type("ndarray", (), {"__module__": "numpy", "__reduce__": lambda self: (str, ("me",))})
    assert cross(impostor()) == "me"


# -- exceptions, as parts of values ------------------------------------------------------------------------------------


class NeedsKeyword(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


def test_exceptions_inside_values_arrive_whole():
    """Wherever an exception stands in a value, it goes by the envelope and not by its constructor."""
    error = NeedsKeyword(code=5)
    got = cross({"failed": [error, error]})["failed"]
    assert got[0] is got[1]
    assert (type(got[0]), got[0].args, got[0].code) == (NeedsKeyword, ("code 5",), 5)


def test_an_exception_that_holds_itself_or_its_cause_is_encoded_once():
    """References back are cut to type and text instead of going round."""
    error, cause = NeedsKeyword(code=1), ValueError("cause")
    error.__cause__ = cause
    error.itself = error
    error.history = [cause, error]
    cause.result = {"of": error}
    got = cross(error)
    assert type(got.itself) is NeedsKeyword
    assert [repr(part) for part in got.history] == ["ValueError('cause')", "NeedsKeyword('code 1')"]
    assert type(got.__cause__.result["of"]) is NeedsKeyword


def test_many_exceptions_that_hold_each_other_stay_small():
    """Each is encoded once, so the size does not grow with the number of ways to reach it."""
    errors = [ValueError(n) for n in range(12)]
    for error in errors:
        error.others = errors
    for error, context in zip(errors[1:], errors, strict=False):
        error.__context__ = context
    assert len(dumps(errors[-1]).header) < 60_000


def test_an_exception_of_main_needs_main(main_module, monkeypatch):
    """Also one that is a part of another exception."""
    kind = type("MainError", (Exception,), {"__module__": "__main__"})
    monkeypatch.setattr(main_module, "MainError", kind, raising=False)
    assert dumps(kind("x")).needs_main
    assert dumps(ValueError([kind("x")])).needs_main
    assert not dumps(ValueError("x")).needs_main
    assert type(cross(kind("x"))) is kind


def test_large_parts_of_an_exception_are_not_in_the_header():
    """A message of 50 MiB, or an array among the arguments, travels like any other large value."""
    text = "x" * (50 * MIB)
    payload = dumps(ValueError(text, np.arange(10_000)))
    assert len(payload.header) < 200_000
    got = carry(payload)
    assert got.args[0] == text
    assert got.args[1].tolist() == list(range(10_000))
