"""Exceptions across the border: all that they are, none of their classes' code, and an answer in every case."""

from __future__ import annotations

import asyncio
import builtins
import json
import os
import pickle
import subprocess
import sys
import threading
import traceback
import types
import zlib
from concurrent.futures import CancelledError

import pytest
from hypothesis import given, strategies as st

from engine_client import errors
from engine_client.errors import RemoteCallError
from engine_client.protocol import exceptions
from engine_client.protocol.exceptions import decode_exception, encode_exception
from helpers.transport import cross

MIB = 1 << 20


def raised(error: BaseException) -> BaseException:
    """Give an exception a traceback."""
    try:
        raise error.with_traceback(None)  # that is what this is for
    except BaseException as caught:  # noqa: BLE001  # any kind is given
        return caught


def alone(error: BaseException) -> BaseException:
    """Cross the border without the codec."""
    return decode_exception(pickle.loads(pickle.dumps(encode_exception(error))))


# -- BC-07: classes whose instances pickle cannot carry ----------------------------------------------------------------


class KeywordOnly(Exception):
    def __init__(self, *, code, detail):
        super().__init__(f"{detail} ({code})")
        self.code = code
        self.detail = detail


class NoArguments(Exception):
    def __init__(self):
        super().__init__("fixed text")


class TwoRequired(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")
        self.first = first
        self.second = second


class WithLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class ReduceRaises(Exception):
    def __reduce__(self):
        raise RuntimeError("cannot be reduced")

    __reduce_ex__ = __getstate__ = __setstate__ = __reduce__


class RequiredNew(Exception):
    def __new__(cls, needed):
        self = super().__new__(cls, needed)
        self.needed = needed
        return self

    def __init__(self, needed):
        pass


class ExitsWhenUnpickled(Exception):
    def __reduce__(self):
        return os._exit, (17,)


class Slotted(Exception):
    __slots__ = ("none", "unset", "value")

    def __init__(self, value):
        super().__init__(value)
        self.value = value
        self.none = None


class Hostile(Exception):
    """Overrides whatever could be called on the way."""

    def _exit(self, *_):
        raise SystemExit("user code ran")

    __str__ = __repr__ = __bool__ = __len__ = __eq__ = __getattribute__ = __setattr__ = __delattr__ = _exit
    __hash__ = __dir__ = __sizeof__ = __format__ = __init__ = _exit
    args = property(_exit)
    __cause__ = property(_exit)
    __context__ = property(_exit)
    __traceback__ = property(_exit)
    __notes__ = property(_exit)
    remote_traceback = property(_exit)


CASES = [
    KeywordOnly(code=3, detail="wrong"),
    NoArguments(),
    TwoRequired("one", "two"),
    ReduceRaises("some text"),
    RequiredNew("thing"),
    ExitsWhenUnpickled("do not run me"),
    Slotted(5),
    KeyError("missing"),
    ValueError(),
    ValueError("text", 3, b"bytes", None, 2.5, 1j, True),
    OSError(2, "No such file", "/a/path"),
    OSError(18, "Cross-device link", "/from", None, "/to"),
    OSError("just text"),
    PermissionError(13, "no"),
    BlockingIOError(11, "would block", 7),
    ImportError("no such module", name="module", path="/there"),
    ModuleNotFoundError("none", name="none"),
    SystemExit(4),
    SystemExit(None),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(5),
    StopAsyncIteration(),
    UnicodeDecodeError("utf-8", b"\xff\x00", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "é", 0, 1, "ordinal not in range"),
    UnicodeTranslateError("é", 0, 1, "why"),
    SyntaxError("invalid syntax", ("file.py", 3, 5, "text of line", 3, 9)),
    NameError("name 'x' is not defined", name="x"),
    AssertionError(("a", ["tuple"])),
    ZeroDivisionError("division by zero"),
    UserWarning("a warning"),
    asyncio.CancelledError("why"),
    CancelledError(),
    zlib.error("Error -3"),
    json.JSONDecodeError("Expecting value", "doc", 0),
    subprocess.CalledProcessError(3, ["cmd"], b"out", "err"),
    errors.EngineDeadError("gone", rank=2, pid=77, exit_name="SIGKILL(-9)"),
    errors.HandshakeTimeout("late"),
    errors.SerializationError("cannot"),
    RemoteCallError("m.E: text", "m.E", "Traceback ..."),
]


FIELDS = (
    *("errno", "strerror", "filename", "filename2", "characters_written", "name", "path", "msg", "code", "value"),
    *("encoding", "object", "start", "end", "reason", "lineno", "offset", "text", "end_lineno", "end_offset"),
)


def fields(error: BaseException) -> dict[str, object]:
    own = {name: value for name, value in vars(error).items() if name != "remote_traceback"}
    return {**{name: getattr(error, name) for name in FIELDS if hasattr(error, name)}, **own}


@pytest.mark.parametrize("through", [alone, cross], ids=["alone", "codec"])
@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
def test_type_arguments_attributes_and_text_arrive(error, through):
    """Whatever the constructor takes: class, args, every field, str, repr, and the traceback with its lines."""
    got = through(raised(error))
    assert type(got) is type(error)
    assert got.args == error.args
    assert fields(got) == fields(error)
    assert (str(got), repr(got)) == (str(error), repr(error))
    assert got.__cause__ is None
    assert got.__suppress_context__ == error.__suppress_context__
    frames = traceback.extract_tb(got.__traceback__)
    assert [frame.name for frame in frames] == ["raised"]
    if getattr(error, "remote_traceback", ""):
        assert error.remote_traceback in got.remote_traceback
    else:
        assert "in raised" in got.remote_traceback
        assert type(error).__name__ in got.remote_traceback
    raised(got)


def test_an_exception_that_was_never_raised_arrives_without_a_traceback():
    """None stays None; the text is the last line alone."""
    got = cross(ValueError("text"))
    assert got.__traceback__ is None
    assert got.remote_traceback == "ValueError: text\n"


def test_a_part_that_cannot_be_pickled_is_replaced_by_its_repr():
    """The lock becomes text; class, arguments and other attributes are kept."""
    error = WithLock("text")
    error.other = [1, 2]
    error.function = lambda: 1
    got = alone(error)
    assert (type(got), got.args, got.other) == (WithLock, ("text",), [1, 2])
    assert got.lock == repr(error.lock)
    assert got.function == repr(error.function)


def test_a_part_that_cannot_be_unpickled_is_replaced_by_its_repr(monkeypatch):
    """A class that only the sender has is seen as text; a large one only as its type."""
    module = types.ModuleType("only_there")
    only_there = type("Thing", (), {"__module__": "only_there", "__repr__": lambda self: "Thing here"})
    module.Thing = only_there
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "only_there", module)
        large = only_there()
        large.data = list(range(50_000))
        envelope = encode_exception(ValueError(only_there(), large))
    got = decode_exception(envelope)
    assert got.args == ("Thing here", "<only_there.Thing object>")


def test_a_class_that_only_the_engine_has_is_stood_in_for(monkeypatch):
    """RemoteCallError says type and text, and carries traceback and cause."""
    module = types.ModuleType("only_there")
    module.Lost = type("Lost", (Exception,), {"__module__": "only_there"})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "only_there", module)
        error = module.Lost("the reason", 5)
        error.__cause__ = KeyError("cause")
        envelope = encode_exception(raised(error))
        plain = encode_exception(module.Lost("x" * (2 * MIB)))
    got = decode_exception(envelope)
    assert type(got) is RemoteCallError
    assert str(got) == "only_there.Lost: ('the reason', 5)"
    assert got.type_name == "only_there.Lost"
    assert "raise error.with" in got.remote_traceback
    assert repr(got.__cause__) == "KeyError('cause')"
    assert traceback.extract_tb(got.__traceback__)[0].name == "raised"
    assert str(decode_exception(plain)) == "only_there.Lost: " + "x" * (2 * MIB)


def test_a_local_class_and_a_name_that_is_no_exception_are_stood_in_for(monkeypatch):
    """What is found under the name must be an exception class."""

    class Local(Exception):
        pass

    assert str(alone(Local("x"))).endswith("<locals>.Local: x")
    not_one = type("Renamed", (Exception,), {"__module__": "json", "__qualname__": "dumps"})
    assert str(alone(not_one("x"))) == "json.dumps: x"
    nameless = type("Nameless", (Exception,), {"__module__": Hostile.__new__(Hostile)})
    assert str(alone(nameless("x"))) == "?.Nameless: x"


def test_no_code_of_the_class_runs_on_either_side():
    """A class that exits from every method arrives as an instance of itself."""
    error = Hostile.__new__(Hostile, "text")
    try:
        raise error
    except Hostile:
        pass
    for got in (alone(error), cross(error)):
        assert type(got) is Hostile
        assert BaseException.__dict__["args"].__get__(got) == ("text",)
        assert BaseException.__dict__["__traceback__"].__get__(got) is not None
        attributes = BaseException.__dict__["__dict__"].__get__(got)
        assert "Hostile" in attributes["remote_traceback"]


def test_the_users_interrupt_is_not_swallowed():
    """Ctrl-C inside a part's own code reaches the user, on both sides."""

    class Interrupting:
        def __reduce__(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_exception(ValueError(Interrupting()))

    def load(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_exception(encode_exception(ValueError([1])), load)


# -- links -------------------------------------------------------------------------------------------------------------


def test_cause_context_and_suppression_arrive():
    """Both links, and that ``raise ... from None`` hides the second."""
    try:
        try:
            {}["first"]
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as second:
        got = cross(second)
    assert repr(got.__cause__) == "KeyError('first')"
    assert got.__context__ is got.__cause__
    assert got.__suppress_context__
    assert "direct cause" in got.remote_traceback
    assert "direct cause" not in got.__cause__.remote_traceback
    hidden = ValueError("third")
    hidden.__context__ = KeyError("hidden")
    hidden.__suppress_context__ = True
    got = cross(hidden)
    assert (repr(got.__context__), got.__cause__, got.__suppress_context__) == ("KeyError('hidden')", None, True)


def test_cycles_are_cut_where_they_close():
    """An exception that is its own ancestor arrives without the link that closes the circle."""
    first, second = ValueError(1), ValueError(2)
    first.__cause__, second.__context__ = second, first
    got = cross(first)
    assert got.__cause__.args == (2,)
    assert got.__cause__.__context__ is None
    own = ValueError("own")
    own.__cause__ = own
    assert cross(own).__cause__ is None


def test_a_very_long_chain_is_cut():
    """The nearest fifty are kept."""
    error = ValueError(0)
    for number in range(1, 5000):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    got = cross(error)
    numbers = []
    while got is not None:
        numbers.append(got.args[0])
        got = got.__cause__
    assert numbers == list(range(4999, 4948, -1))


def test_notes_arrive():
    """They are an attribute like others, and show in the text."""
    error = ValueError("text")
    error.__notes__ = ["a note", "another"]
    got = cross(error)
    assert got.__notes__ == ["a note", "another"]
    if sys.version_info >= (3, 11):
        assert "another" in got.remote_traceback


ExceptionGroup = getattr(builtins, "ExceptionGroup", None)
BaseExceptionGroup = getattr(builtins, "BaseExceptionGroup", None)

if ExceptionGroup is not None:  # new in Python 3.11

    class TestGroups:
        def test_groups_arrive_with_their_members(self):
            """Nested, with causes, of both kinds, and of a class of the user's."""
            member = ValueError("one")
            member.__cause__ = KeyError("cause")
            inner = ExceptionGroup("inner", [member, TwoRequired(1, 2)])
            got = cross(raised(ExceptionGroup("outer", [inner, OSError(2, "no")])))
            assert type(got).__name__ == "ExceptionGroup"
            assert got.message == "outer"
            assert repr(got.exceptions[0].exceptions[0].__cause__) == "KeyError('cause')"
            assert type(got.exceptions[0].exceptions[1]) is TwoRequired
            assert got.exceptions[1].errno == 2
            assert "inner" in got.remote_traceback
            got = cross(BaseExceptionGroup("base", [KeyboardInterrupt()]))
            assert type(got.exceptions[0]) is KeyboardInterrupt

        def test_a_group_of_a_users_class_keeps_class_and_attributes(self, monkeypatch):
            """Its constructor is not run."""

            class Own(ExceptionGroup):
                def __new__(cls, message, members, code):
                    self = super().__new__(cls, message, members)
                    self.code = code
                    return self

            Own.__qualname__ = "OwnGroup"
            monkeypatch.setattr(sys.modules[__name__], "OwnGroup", Own, raising=False)
            got = cross(Own("m", [ValueError(1)], 7))
            assert (type(got), got.code, repr(got.exceptions)) == (Own, 7, "(ValueError(1),)")

        def test_a_group_with_too_many_members_is_cut(self):
            """The first thousand exceptions are kept, the others are said to be cut."""
            got = cross(ExceptionGroup("wide", [ValueError(n) for n in range(1100)]))
            assert len(got.exceptions) == 1100
            assert [error.args[0] for error in got.exceptions[:999]] == list(range(999))
            assert "was cut" in str(got.exceptions[-1])

        def test_a_group_that_was_encoded_already_arrives_briefly(self):
            """Seen again inside its own attribute, it is its message and one stand-in."""
            group = ExceptionGroup("again", [ValueError(1)])
            group.itself = group
            got = cross(group)
            assert got.itself.message == "again"
            assert "was cut" in str(got.itself.exceptions[0])


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_message_of_50_mib_arrives_whole_and_its_traceback_does_not():
    """The argument is never cut; the text of the traceback is, in the middle."""
    text = "begin" + "x" * (50 * MIB) + "end"
    got = cross(raised(RuntimeError(text)))
    assert got.args == (text,)
    assert len(got.remote_traceback) < 70_000
    assert "characters are cut here" in got.remote_traceback
    assert got.remote_traceback.startswith("Traceback")
    assert got.remote_traceback.endswith("end\n")


def test_a_long_repr_is_cut_in_the_middle():
    """What stands in for a part that cannot be pickled has 1 MiB at most, and so has the text."""

    class Long:
        def __repr__(self):
            return "<" + "r" * (3 * MIB) + ">"

    envelope = encode_exception(ValueError(Long()))
    got = decode_exception(envelope)
    assert len(got.args[0]) < MIB + 100
    assert (got.args[0][0], got.args[0][-1]) == ("<", ">")
    assert len(envelope[0][2]) < MIB + 100


@pytest.mark.parametrize("mutual", [False, True])
def test_a_deep_traceback_loses_its_middle(mutual):
    """A RecursionError arrives with the outermost and the innermost frames."""

    def down():
        return up() if mutual else down()

    def up():
        return down()

    with pytest.raises(RecursionError) as caught:
        down()
    got = cross(caught.value)
    frames = traceback.extract_tb(got.__traceback__)
    assert len(frames) == 100
    assert frames[0].name == "test_a_deep_traceback_loses_its_middle"
    assert frames[-1].name in {"down", "up"}


def test_a_traceback_that_cannot_be_carried_leaves_its_text(monkeypatch):
    """Whatever tblib raises, on either side, costs the frames only."""
    error = raised(ValueError("text"))
    envelope = encode_exception(error)

    def fail(*_):
        raise RuntimeError

    monkeypatch.setattr("tblib.Traceback.as_traceback", fail)
    monkeypatch.setattr("tblib.Traceback.to_traceback", fail)
    got = decode_exception(envelope)
    assert got.__traceback__ is None
    assert "in raised" in got.remote_traceback
    monkeypatch.setattr("tblib.Traceback.to_dict", fail)
    assert decode_exception(encode_exception(error)).__traceback__ is None


def test_odd_module_globals_do_not_cost_the_traceback():
    """A module may call itself anything; frames carry it as text."""
    namespace = {"__name__": threading.Lock(), "__file__": 3}
    exec("def fail():\n    raise ValueError('text')\n", namespace)
    with pytest.raises(ValueError, match="text") as caught:
        namespace["fail"]()
    got = cross(caught.value)
    assert traceback.extract_tb(got.__traceback__)[-1].name == "fail"


def test_attributes_whose_names_are_no_plain_strings_are_left_out():
    """They cannot be read by name anyway."""
    error = ValueError("text")
    vars(error)[5] = "five"
    error.kept = True
    got = cross(error)
    assert got.kept
    assert 5 not in vars(got)


# -- safety nets -------------------------------------------------------------------------------------------------------


def test_an_exception_that_cannot_be_encoded_at_all_is_still_told(monkeypatch):
    """Should encoding itself fail, type and text travel."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(exceptions, "_collect", fail)
    got = decode_exception(encode_exception(KeyError("text")))
    assert type(got) is RemoteCallError
    assert (str(got), got.type_name) == ("KeyError: 'text'", "KeyError")


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner).map(tuple), max_leaves=20))
def test_a_malformed_envelope_is_decoded_to_an_error_that_says_so(envelope):
    """Nothing that arrives raises."""
    got = decode_exception(envelope)
    assert type(got) is RemoteCallError
    assert "cannot be decoded" in str(got)


@given(st.data())
def test_a_damaged_envelope_is_decoded_to_some_exception(data):
    """Any field replaced by anything gives the exception, a stand-in, or the error that says so."""
    nodes = [list(node) for node in encode_exception(raised(OSError(2, "text", ["a list"])))]
    position = data.draw(st.integers(0, len(nodes[0]) - 1))
    nodes[0][position] = data.draw(
        st.one_of(
            st.none(), st.integers(-2, 5), st.text(max_size=3), st.just(()), st.just({"a": ("b",)}), st.just((1, 2))
        )
    )
    assert isinstance(decode_exception(tuple(map(tuple, nodes))), BaseException)


def test_a_class_that_another_library_taught_to_pickle_is_not_asked(monkeypatch):
    """tblib.pickling_support, and whatever else edits copyreg, has no say."""
    import copyreg

    monkeypatch.setitem(copyreg.dispatch_table, TwoRequired, lambda error: (os._exit, (1,)))
    got = cross(TwoRequired(1, 2))
    assert (type(got), got.first) == (TwoRequired, 1)


def test_an_exception_can_cross_again():
    """What was rebuilt is an ordinary exception: it crosses once more, with the tracebacks of both journeys."""
    first = cross(raised(KeywordOnly(code=1, detail="far")))
    with pytest.raises(KeywordOnly) as again:
        raise first
    second = cross(again.value)
    assert type(second) is KeywordOnly
    assert first.remote_traceback.splitlines()[1] in second.remote_traceback
    assert "test_an_exception_can_cross_again" in second.remote_traceback
    assert len(traceback.extract_tb(second.__traceback__)) == 2
