"""Exceptions across the process border: whole, and without running the code of their classes.

Data flow::

    exception ─ encode_exception ─▶ envelope (plain tuples) ─ pickle ─▶ decode_exception ─▶ exception

Pickle would call the class with ``args``, which fails for every constructor that takes something else.  Here an
exception travels as its class's name, its ``args``, its attributes and its traceback, together with all exceptions it
is linked to: cause, context, members of a group.  Each argument and attribute is pickled on its own; one that cannot be
pickled, or not be unpickled, is replaced by its ``repr``.  The receiver makes the object with the constructor of the
builtin class underneath, so that no ``__init__``, ``__new__``, ``__reduce__`` or ``__setstate__`` of a user runs.  What
cannot be made becomes a ``RemoteCallError`` with the type's name and the text.

Guarantees: neither direction raises anything but ``KeyboardInterrupt``.  Chains are cut at 50, cycles where they close,
the text of a traceback at 64 KiB, a ``repr`` at 1 MiB; arguments are never cut.

Threads: pure functions.  Pure: performs no I/O, but that ``traceback`` looks up source lines.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, NamedTuple

from engine_client.errors import RemoteCallError
from engine_client.protocol.exception_fields import (
    GROUP,
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
from engine_client.protocol.tracebacks import Link, rebuild_trace, trace_of, trace_texts

__all__ = ["decode_exception", "describe_exception", "encode_exception"]

_DEEPEST: Final = 50
"""Longest chain of causes, contexts and nested groups."""
_MOST_NODES: Final = 1000
"""Most exceptions in an envelope; a wide group is cut here."""
_LONGEST_TEXT: Final = 1024 * 1024
_RAISED: Final = "Traceback "
_FRAME: Final = ", in "
"""Ends the place of the first frame."""
_LARGE_PICKLE: Final = 64 * 1024
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types whose values go into an envelope as they are."""


class _Node(NamedTuple):
    """One exception; ``cause``, ``context`` and ``members`` are indices of earlier nodes."""

    module: str
    name: str
    text: str | None  # None: it is the only argument
    args: tuple[Any, ...]
    attributes: dict[str, Any]
    slots: dict[str, Any]
    trace: dict[str, Any] | None
    trace_text: str
    cause: int | None
    context: int | None
    suppress: bool
    members: tuple[int | None, ...] | None


def encode_exception(
    error: BaseException,
    dump: Callable[[Any], tuple[Any, Any]] | None = None,
    seen: dict[int, BaseException] | None = None,
) -> tuple[Any, ...]:
    """Return an envelope: tuples and dicts of plain values, and pickles of all other values.

    Args:
        error: any exception; it is not changed.
        dump: pickles one value; ``load`` of ``decode_exception`` gets the two items that it returns.
        seen: when ``error`` is inside an argument or attribute of another exception: what has been encoded for that
            one, by id.  An exception that is in it already is encoded without links and attributes.
    """
    envelope = attempt(_encode_all, error, dump or _dump, {} if seen is None else seen, otherwise=None)
    if envelope is None:
        title = title_of(*place_of(type(error)))
        stand_in = _encode_briefly(RemoteCallError(f"{title}: {text_of(error)}"))
        envelope = (tuple(stand_in._replace(attributes={"type_name": title})),)
    return envelope


def decode_exception(envelope: tuple[Any, ...], load: Callable[[Any, Any], Any] | None = None) -> BaseException:
    """Return the exception of an envelope, or a ``RemoteCallError`` that stands in for it.

    Its attribute ``remote_traceback`` is the sender's traceback as text.
    """
    error = attempt(_decode_all, envelope, load or _load, otherwise=None)
    return RemoteCallError("an exception arrived that cannot be decoded") if error is None else error


def describe_exception(envelope: Any) -> RemoteCallError:
    """Return what stands in for the exception of an envelope, without importing or unpickling anything.

    Causes and contexts are described as well.  What is not as ``encode_exception`` makes it is left out.
    """
    error = attempt(_describe_all, envelope, otherwise=None)
    return RemoteCallError("an exception arrived that cannot be decoded") if error is None else error


def _dump(value: Any) -> tuple[bytes, tuple[memoryview, ...]]:
    return pickle.dumps(value, 5), ()


def _load(header: bytes, buffers: Any) -> Any:
    return pickle.loads(header, buffers=buffers)  # noqa: S301  # the trust that the codec states


# -- encoding ----------------------------------------------------------------------------------------------------------


def _encode_all(
    error: BaseException, dump: Callable[[Any], tuple[Any, Any]], seen: dict[int, BaseException]
) -> tuple[Any, ...]:
    if id(error) in seen:
        return (tuple(_encode_briefly(error)),)
    links = _collect(error)
    seen.update((id(link.error), link.error) for link in links)
    texts = trace_texts(links)
    return tuple([tuple(_encode(link, text, dump)) for link, text in zip(links, texts, strict=True)])


def _collect(error: BaseException) -> list[Link]:
    """Return the exceptions to encode, each after those that it is linked to, ``error`` last."""
    links: list[Link] = []
    index_of: dict[int, int | None] = {}  # by id; None while those that it is linked to are being added

    def add(error: BaseException | None, depth: int) -> int | None:
        if error is None or depth > _DEEPEST:
            return None
        key = id(error)
        if key in index_of or len(index_of) >= _MOST_NODES:
            return index_of.get(key)
        index_of[key] = None
        cause = add(field(error, "__cause__"), depth + 1)
        context = add(field(error, "__context__"), depth + 1)
        members = None
        if is_group(error):
            members = tuple([add(member, depth + 1) for member in GROUP.exceptions.__get__(error)])
        index_of[key] = len(links)
        links.append(Link(error, cause, context, members))
        return index_of[key]

    add(error, 0)
    return links


def _encode(link: Link, trace_text: str, dump: Callable[[Any], tuple[Any, Any]]) -> _Node:
    def pack(value: Any) -> Any:
        """Return a plain value as it is, any other as ``(its repr, its pickle or None)``."""
        if type(value) in _PLAIN:
            return value
        pickled = attempt(dump, value, otherwise=None)
        # The repr is for a receiver that cannot unpickle; of a large value it would cost more than it says.
        brief = pickled is None or len(pickled[0]) < _LARGE_PICKLE
        return repr_of(value) if brief else outline_of(value), pickled

    error = link.error
    trace = field(error, "__traceback__")
    attributes = dict(field(error, "__dict__"))
    return _encode_core(error, pack)._replace(
        attributes={name: pack(value) for name, value in attributes.items() if type(name) is str},
        slots={name: pack(value) for name, value in slots_of(error)},
        trace=None if trace is None else attempt(trace_of, trace, otherwise=None),  # its text travels as well
        trace_text=trace_text,
        cause=link.cause,
        context=link.context,
        suppress=field(error, "__suppress_context__"),
        members=link.members,
    )


def _encode_briefly(error: BaseException) -> _Node:
    """Encode type, text and arguments, the last as text where they are not plain."""
    return _encode_core(error, lambda value: value if type(value) in _PLAIN else (repr_of(value), None))


def _encode_core(error: BaseException, pack: Callable[[Any], Any]) -> _Node:
    module, name = place_of(type(error))
    args = args_of(error)
    text: str | None = text_of(error)
    if len(args) == 1 and type(args[0]) is str and args[0] == text:
        text = None
    return _Node(
        module=module,
        name=name,
        text=text if text is None else cut(text, _LONGEST_TEXT),
        args=tuple([pack(value) for value in args]),
        attributes={},
        slots={},
        trace=None,
        trace_text="",
        cause=None,
        context=None,
        suppress=False,
        members=() if is_group(error) else None,
    )


# -- decoding ----------------------------------------------------------------------------------------------------------


def _decode_all(envelope: tuple[Any, ...], load: Callable[[Any, Any], Any]) -> BaseException:
    errors: list[BaseException] = []
    for fields in envelope:
        node = _Node(*fields)
        rebuilt = attempt(_rebuild, node, errors, load, otherwise=None)
        error = _stand_in(node) if rebuilt is None else rebuilt
        set_field(error, "__cause__", None if node.cause is None else errors[node.cause])
        set_field(error, "__context__", None if node.context is None else errors[node.context])
        set_field(error, "__suppress_context__", node.suppress)
        if node.trace is not None:
            set_field(error, "__traceback__", attempt(rebuild_trace, node.trace, otherwise=None))
        attributes = field(error, "__dict__")
        attributes["remote_traceback"] = _story(attributes.get("remote_traceback"), node)
        errors.append(error)
    return errors[-1]


def _story(before: Any, node: _Node) -> str:
    """Return the text of the tracebacks of all journeys; ``before`` is that of the earlier ones."""
    if not isinstance(before, str) or not before:
        return node.trace_text
    if node.trace is None:  # it was not raised since
        return before
    _, raised, frames = before.partition(_RAISED)
    place = frames.partition(_FRAME)[0]
    if not raised or (place and place in node.trace_text):  # what is raised again keeps its traceback
        return node.trace_text
    return cut(f"{before.rstrip()}\n\nIt was raised again, in another process:\n\n{node.trace_text}", _LONGEST_TEXT)


def _describe_all(envelope: tuple[Any, ...]) -> RemoteCallError:
    errors: list[RemoteCallError] = []
    for fields in envelope:
        node = _Node(*fields)
        only = node.args[0] if node.text is None and type(node.args) is tuple and node.args else node.text
        # Text is taken from who sent it, and of nothing else is any made: that of nested values may have no end.
        title, text = title_of(_text(node.module), _text(node.name)), _text(only)
        error = RemoteCallError(f"{title}: {text}" if text else title, title, _text(node.trace_text))
        for name, index in (("__cause__", node.cause), ("__context__", node.context)):
            set_field(error, name, errors[index] if type(index) is int and 0 <= index < len(errors) else None)
        set_field(error, "__suppress_context__", node.suppress is True)
        errors.append(error)
    return errors[-1]


def _text(value: Any) -> str:
    return value if type(value) is str else "?"


def _stand_in(node: _Node) -> RemoteCallError:
    title = title_of(node.module, node.name)
    text = node.args[0] if node.text is None else node.text
    return RemoteCallError(f"{title}: {text}", title, node.trace_text)


def _rebuild(node: _Node, earlier: list[BaseException], load: Callable[[Any, Any], Any]) -> BaseException:
    def unpack(value: Any) -> Any:
        if type(value) is not tuple:
            return value
        text, pickled = value
        return text if pickled is None else attempt(load, *pickled, otherwise=text)

    kind = _find_class(node.module, node.name)
    args = tuple(map(unpack, node.args))
    if node.members is None:
        error = construct(kind, args)
    else:
        members = [_cut_member() if index is None else earlier[index] for index in node.members]
        error = GROUP.__new__(kind, *args, members or [_cut_member()])
    field(error, "__dict__").update((name, unpack(value)) for name, value in node.attributes.items())
    for name, value in node.slots.items():
        set_slot(error, name, unpack(value))
    return error


def _find_class(module: str, name: str) -> type[BaseException]:
    found: Any = sys.modules.get(module) or import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        raise TypeError(f"{module}.{name} is not an exception class")
    return found


def _cut_member() -> RemoteCallError:
    return RemoteCallError("a member of this group was cut, because there were too many")
