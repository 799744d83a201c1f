"""Tracebacks: frames that can be printed elsewhere, and text that reads as Python's own."""

from __future__ import annotations

import builtins
import traceback
import weakref

import pytest

from engine_client.protocol.tracebacks import Link, empty_frames, rebuild_trace, trace_of, trace_texts


def failing() -> None:
    """Raise in a frame of a known name."""
    raise ValueError("text")


def caught(depth: int = 0) -> ValueError:
    def down(left):
        if left:
            down(left - 1)
        else:
            failing()

    with pytest.raises(ValueError, match="text") as info:
        down(depth)
    return info.value


def test_frames_are_rebuilt_with_file_line_and_name():
    """What is printed of the rebuilt traceback is what is printed of the original, but for the marks below a line."""
    error = caught()
    rebuilt = rebuild_trace(trace_of(error.__traceback__))
    places = [(f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(rebuilt)]
    assert places == [(f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(error.__traceback__)]
    assert places[-1][2] == "failing"


def test_a_long_traceback_keeps_its_outer_and_inner_frames():
    """100 frames travel of any number."""
    error = caught(depth=300)
    names = [f.name for f in traceback.extract_tb(rebuild_trace(trace_of(error.__traceback__)))]
    assert len(names) == 100
    assert (names[0], names[1], names[-1]) == ("caught", "down", "failing")


def test_the_text_of_one_exception_is_pythons_own():
    """Also of one that was never raised, one without text, and one with notes."""
    error = caught()
    assert trace_texts([Link(error, None, None, None)]) == ["".join(traceback.format_exception(error))]
    bare = ValueError()
    assert trace_texts([Link(bare, None, None, None)]) == ["ValueError\n"]

    class Unprintable:
        def __str__(self):
            raise RuntimeError

    bare.__notes__ = ["a note", 5, Unprintable()]
    assert trace_texts([Link(bare, None, None, None)]) == ["ValueError\na note\n5\n\n"]
    bare.__notes__ = "no list"
    assert trace_texts([Link(bare, None, None, None)]) == ["ValueError\n"]


def test_the_text_of_the_last_one_has_its_whole_chain():
    """Causes and contexts are joined as Python joins them; the others have their own part only."""
    first, second, third, fourth = KeyError("1"), ValueError("2"), TypeError("3"), OSError("4")
    second.__cause__ = first
    third.__context__ = second
    fourth.__context__ = third
    links = [Link(first, None, None, None), Link(second, 0, 0, None), Link(third, None, 1, None)]
    texts = trace_texts(links)
    assert texts == ["KeyError: '1'\n", "ValueError: 2\n", "".join(traceback.format_exception(third))]
    fourth.__suppress_context__ = True
    assert trace_texts([*links, Link(fourth, None, 2, None)])[-1] == "OSError: 4\n"


def test_long_texts_lose_their_middle():
    """64 KiB is the most, whatever the message and the chain."""
    errors = [ValueError("x" * 100_000) for _ in range(3)]
    links = [Link(errors[0], None, None, None), Link(errors[1], 0, None, None), Link(errors[2], 1, None, None)]
    for text in trace_texts(links):
        assert len(text) < 66_000
        assert "characters are cut here" in text
        assert text.startswith("ValueError: xxx")
        assert text.endswith("xxx\n")


def test_the_text_of_a_group_shows_its_members():
    """The first fifteen, each with its chain, indented."""
    members = [ValueError(n) for n in range(20)]
    cause = KeyError("cause")
    members[0].__cause__ = cause
    group = getattr(builtins, "ExceptionGroup", lambda text, _: ValueError(text))("several", members)
    links = [Link(cause, None, None, None), Link(members[0], 0, None, None)]
    links += [Link(member, None, None, None) for member in members[1:]]
    text = trace_texts([*links, Link(group, None, None, (1, None, *range(2, 20)))])[-1]
    lines = text.splitlines()
    assert "several" in lines[0]
    assert lines[1:4] == ["  +---- member 0", "  | KeyError: 'cause'", "  | "]
    assert "  | ValueError: 0" in lines
    assert "  | (cut)" in lines
    assert "  +---- member 14" in lines
    assert "  +---- member 15" not in lines


def test_frames_whose_source_cannot_be_had_do_not_cost_the_text():
    """A loader that raises is user code like any other."""

    class Loader:
        def get_source(self, name):
            raise SystemExit

    namespace = {"__name__": "odd", "__loader__": Loader()}
    exec(compile("def fail():\n    raise ValueError('text')\n", "<odd source>", "exec"), namespace)
    with pytest.raises(ValueError, match="text") as info:
        namespace["fail"]()
    (text,) = trace_texts([Link(info.value, None, None, None)])
    assert text.startswith("Traceback")
    assert text.endswith("ValueError: text\n")


class Heavy:
    """Can be watched."""


def test_emptied_frames_hold_nothing_and_print_as_before():
    """What frames held is free while the exception is kept, also that of its cause; running frames stay as they are."""
    watched = []

    def fail(deep):
        heavy = Heavy()
        watched.append(weakref.ref(heavy))
        try:
            if deep:
                fail(deep - 1)
            failing()
        except ValueError as error:
            again = RuntimeError("again")
            again.__cause__ = error
            error.__context__ = again  # a cycle is walked once
            raise again from error

    running = Heavy()
    try:
        fail(2)
    except RuntimeError as error:
        before = traceback.format_exception(error)
        empty_frames(error)
        kept = error
    assert traceback.format_exception(kept) == before
    assert len(watched) == 3
    assert [reference() for reference in watched] == [None] * 3
    assert isinstance(running, Heavy)
