"""Decode messages of an engine that is not trusted: plain data and registered types, and no code of anybody's choice.

Data flow::

    header, buffers ─ pickletools.genops ─▶ opcodes ─▶ Machine: a stack of plain values ─▶ value

The encoding is pickle's, as ever; what is different is who reads it.  The standard unpickler calls whatever a pickle
names, sets attributes of whatever it finds, and allocates what an index promises.  This one knows the opcodes that the
codec writes and nothing else; a name is looked up in the ``registry``, and what that says is done:

- dataclasses, enums and named tuples that are registered (those of ``messages`` and ``params`` are) are made of plain
  values, without a constructor; only their own fields are set;
- arrays, views and tensors are made over buffers that came with the message, of plain types only;
- an exception becomes a ``RemoteCallError`` with the name of its type, its text and its traceback.

Memory grows with the bytes that have come.  Keys are scalars and tuples of these, so that no hash takes for ever.

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

import enum
import io
import pickletools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, Final

from engine_client.errors import RemoteProtocolError, SerializationError
from engine_client.protocol.registry import Name, find_name

__all__ = ["load_restricted"]

_SCALARS: Final = (str, int, float, bytes, type(None), enum.Enum)


def load_restricted(header: bytes | memoryview, buffers: Sequence[memoryview], stream: Any = None) -> Any:
    """Decode what ``codec.dumps`` made.

    Args:
        header: of the message.
        buffers: beside it, that are not part of the stream; read-only.
        stream: a file of the pickle, if it is not all in the header.

    Raises:
        SerializationError: the message names something that is not registered; the error says what.
        RemoteProtocolError: it is no message that this library makes.
    """
    try:
        return _Machine(buffers).run(io.BytesIO(header) if stream is None else _File(stream))
    except (SerializationError, RemoteProtocolError):
        raise
    except Exception as error:
        raise RemoteProtocolError(f"a message cannot be decoded: {type(error).__name__}") from error


class _File:
    """A file whose pieces are bytes."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        return bytes(self._file.read(size))

    def readline(self) -> bytes:
        """Return nothing: no opcode that is known reads a line."""
        return b""


class _Machine:
    """Runs one pickle; owns its stack."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = iter(buffers)
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks under the marks
        self._memo: dict[int, Any] = {}

    def run(self, file: Any) -> Any:
        """Return the value of a pickle."""
        steps = _STEPS
        for opcode, arg, _ in pickletools.genops(file):
            step = steps.get(opcode.name)
            if step is None:
                raise RemoteProtocolError(f"a message has the opcode {opcode.name}, which this library does not write")
            step(self, arg)
        return self.pop()

    # -- the stack -----------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return _value(self._stack.pop())

    def pop_name(self) -> Name:
        name = self._stack.pop()
        if type(name) is not Name:
            raise RemoteProtocolError("a message calls a value")
        return name

    def mark(self, arg: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        for item in items:
            _value(item)
        return items

    def pop_marked(self, arg: None) -> None:
        self.pop_mark()

    def drop(self, arg: None) -> None:
        self._stack.pop()

    # -- the memo ------------------------------------------------------------------------------------------------------

    def memoize(self, arg: None) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put(self, arg: int) -> None:
        self._memo[arg] = self._stack[-1]

    def get(self, arg: int) -> None:
        self.push(self._memo[arg])

    # -- containers ----------------------------------------------------------------------------------------------------

    def make_tuple(self, count: int) -> None:
        items = tuple(_value(item) for item in self._stack[-count:]) if count else ()
        if len(items) != count:
            raise RemoteProtocolError("a message takes what is not there")
        del self._stack[len(self._stack) - count :]
        self.push(items)

    def append(self, arg: None) -> None:
        item = self.pop()
        self.top(list).append(item)

    def appends(self, arg: None) -> None:
        items = self.pop_mark()
        self.top(list).extend(items)

    def add_items(self, arg: None) -> None:
        items = self.pop_mark()
        self.top(set).update(map(_key, items))

    def set_item(self, arg: None) -> None:
        value, key = self.pop(), self.pop()
        self.top(dict)[_key(key)] = value

    def set_items(self, arg: None) -> None:
        items = self.pop_mark()
        self.top(dict).update(zip(map(_key, items[::2]), items[1::2], strict=True))

    def top(self, kind: type) -> Any:
        top = self._stack[-1]
        if type(top) is not kind:
            raise RemoteProtocolError(f"a message adds to what is no {kind.__name__}")
        return top

    # -- objects -------------------------------------------------------------------------------------------------------

    def name(self, arg: None) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str:
            raise RemoteProtocolError("a message names what is no name")
        self.push(find_name(module, name))

    def call(self, arg: None) -> None:
        args = self.pop()
        name = self.pop_name()
        if type(args) is not tuple:
            raise RemoteProtocolError("a message calls something without arguments")
        self.push(name.make(*args))

    def build(self, arg: None) -> None:
        """Set fields of an instance that was just made."""
        state = self.pop()
        instance = self._stack[-1]
        known = _FIELDS.get(type(instance))
        if known is None and is_dataclass(instance) and not isinstance(instance, type):
            known = _FIELDS[type(instance)] = tuple(field.name for field in fields(instance))
        if known is None:
            raise RemoteProtocolError(f"a message sets attributes of a {type(instance).__name__}")
        if type(state) is list:  # of a frozen one with slots
            state = dict(zip(known, state, strict=True))
        for values in state if type(state) is tuple else (state,):
            for name, value in (values or {}).items():
                if name not in known:
                    raise RemoteProtocolError(f"a message sets what a {type(instance).__name__} does not have")
                object.__setattr__(instance, name, value)

    def next_buffer(self, arg: None) -> None:
        self.push(next(self._buffers))

    def frozen(self, arg: None) -> None:
        self.push(frozenset(map(_key, self.pop_mark())))


def _value(item: Any) -> Any:
    """Return an item of the stack, which must not be a name."""
    if type(item) is Name:
        raise SerializationError(f"{item.title} itself, and not an instance of it, cannot be decoded by this client")
    return item


def _key(item: Any) -> Any:
    """Return what may be in a set or a key of a dict."""
    parts: Iterable[Any] = item if type(item) is tuple else (item,)
    if not all(isinstance(part, _SCALARS) for part in parts):
        raise SerializationError(f"a {type(item).__name__} as a key cannot be decoded by this client")
    return item


def _same(machine: _Machine, arg: Any) -> None:
    """Do nothing."""


def _literal(machine: _Machine, arg: Any) -> None:
    machine.push(arg)


def _new(make: Callable[[], Any]) -> Callable[[_Machine, Any], None]:
    return lambda machine, arg: machine.push(make())


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, arg: machine.make_tuple(count)


_STEPS: Final[Mapping[str, Callable[[_Machine, Any], None]]] = MappingProxyType(
    {
        **dict.fromkeys(("PROTO", "FRAME", "STOP", "READONLY_BUFFER"), _same),
        **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"), _literal),
        **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _literal),
        **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"), _literal),
        "NONE": _new(lambda: None),
        "NEWTRUE": _new(lambda: True),
        "NEWFALSE": _new(lambda: False),
        "EMPTY_TUPLE": _new(tuple),
        "EMPTY_LIST": _new(list),
        "EMPTY_DICT": _new(dict),
        "EMPTY_SET": _new(set),
        **{f"TUPLE{count}": _tuple_of(count) for count in (1, 2, 3)},
        "TUPLE": lambda machine, arg: machine.push(tuple(machine.pop_mark())),
        "MARK": _Machine.mark,
        "POP": _Machine.drop,
        "POP_MARK": _Machine.pop_marked,
        "MEMOIZE": _Machine.memoize,
        "BINPUT": _Machine.put,
        "LONG_BINPUT": _Machine.put,
        "BINGET": _Machine.get,
        "LONG_BINGET": _Machine.get,
        "APPEND": _Machine.append,
        "APPENDS": _Machine.appends,
        "ADDITEMS": _Machine.add_items,
        "SETITEM": _Machine.set_item,
        "SETITEMS": _Machine.set_items,
        "FROZENSET": _Machine.frozen,
        "STACK_GLOBAL": _Machine.name,
        "REDUCE": _Machine.call,
        "NEWOBJ": _Machine.call,
        "BUILD": _Machine.build,
        "NEXT_BUFFER": _Machine.next_buffer,
    }
)
_FIELDS: Final[dict[type, tuple[str, ...]]] = {}
