"""What an exception is made of, read and set past its class."""

from __future__ import annotations

import builtins

import pytest

from engine_client.protocol.exception_fields import (
    args_of,
    attempt,
    construct,
    cut,
    field,
    is_group,
    outline_of,
    place_of,
    repr_of,
    set_field,
    set_slot,
    slots_of,
    text_of,
    title_of,
)


def leave(*_):
    raise SystemExit


class Leaving(Exception):
    args = property(leave)
    __str__ = __repr__ = leave


class Slotted(OSError):
    __slots__ = ("__own", "none", "unset")

    def __init__(self):
        self.__own = 1
        self.none = None


def test_attempt_returns_what_the_call_returns_or_what_stands_in():
    """Any exception but the user's interrupt is swallowed, SystemExit among them."""
    assert attempt(int, "5", otherwise=None) == 5
    assert attempt(int, "five", otherwise=None) is None
    assert attempt(leave, 1, 2, otherwise="left") == "left"

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt(interrupt, otherwise=None)


def test_fields_are_read_and_set_past_the_class():
    """Overrides of the class are not called."""
    error = Leaving("a", 1)
    assert field(error, "args") == args_of(error) == ("a", 1)
    set_field(error, "__suppress_context__", True)
    assert field(error, "__suppress_context__") is True


def test_texts_are_exact_strings_whatever_the_class_returns():
    """A subclass of str, which could run code when pickled, does not get through."""

    class Text(str):
        pass

    class Odd(Exception):
        def __str__(self):
            return Text("odd")

        __repr__ = __str__

    assert type(text_of(Odd())) is str
    assert type(repr_of(Odd())) is str
    assert text_of(Odd()) == repr_of(Odd()) == "odd"


def test_what_cannot_be_asked_is_outlined():
    """Text and repr of hostile objects say what they are."""
    assert "__str__ raised" in text_of(Leaving())
    assert repr_of(Leaving()) == outline_of(Leaving()) == f"<{__name__}.Leaving object>"


def test_classes_are_named_by_module_unless_builtin():
    """A module attribute that is no string is taken as text, or as a question mark."""
    assert title_of(*place_of(ValueError)) == "ValueError"
    assert title_of(*place_of(Leaving)) == f"{__name__}.Leaving"
    assert place_of(type("Odd", (), {"__module__": 5})) == ("5", "Odd")
    assert place_of(type("Odd", (), {"__module__": Leaving()})) == ("?", "Odd")


def test_long_text_is_cut_in_the_middle():
    """Both ends and the number of characters between them are kept."""
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 4) == "ab\n[... 3 characters are cut here ...]\nfg"


def test_slots_are_those_of_builtin_classes_that_are_set_and_all_of_users():
    """Unset slots are left out; None counts in a slot of the user's only."""
    assert dict(slots_of(OSError(2, "no", "f"))) == {"errno": 2, "strerror": "no", "filename": "f"}
    assert dict(slots_of(Slotted())) == {"_Slotted__own": 1, "none": None}
    assert dict(slots_of(AttributeError("x", name="n", obj=object()))) == {"name": "n"}
    assert dict(slots_of(ValueError("x"))) == {}


def test_slots_are_set_where_the_class_has_them():
    """A name that it lacks and a slot that is read-only are ignored."""
    error = construct(Slotted, ())
    set_slot(error, "_Slotted__own", 5)
    set_slot(error, "errno", 7)
    set_slot(error, "nothing", 1)
    assert (error._Slotted__own, error.errno) == (5, 7)  # noqa: SLF001
    assert not hasattr(error, "nothing")


def test_exceptions_are_made_by_the_builtin_class_underneath():
    """Of several bases it is the one that decides the layout; a constructor that refuses the arguments is overruled."""

    class Mixed(RuntimeError, TimeoutError):
        def __new__(cls):
            raise AssertionError

        def __init__(self):
            raise AssertionError

    error = construct(Mixed, (110, "late"))
    assert (type(error), error.errno, error.args) == (Mixed, 110, (110, "late"))
    assert construct(UnicodeDecodeError, ("odd",)).args == ("odd",)


def test_a_plain_oserror_stays_plain():
    """OSError(2, ...) would make a FileNotFoundError, which the sender's object was not."""
    error = construct(OSError, (2, "text"))
    assert (type(error), error.args) == (OSError, (2, "text"))
    assert type(construct(FileNotFoundError, (2, "text"))) is FileNotFoundError


def test_groups_are_told_by_their_class():
    """An ordinary exception is none; its arguments are all of its arguments."""
    assert not is_group(ValueError("x", [ValueError()]))
    group = getattr(builtins, "ExceptionGroup", None)
    if group is not None:  # new in Python 3.11
        assert is_group(group("message", [ValueError()]))
        assert args_of(group("message", [ValueError()])) == ("message",)
