"""What messages of an engine that is not trusted may name: types that are registered, and what makes arrays and errors.

Each name stands for a function of plain values, which is all that ``restricted`` does with it.

Threads: pure functions; ``register_type`` at any time.  Pure: performs no I/O, but that numpy or torch may be imported.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any, Final, NamedTuple, TypeVar

from engine_client import messages, params
from engine_client.errors import RemoteProtocolError, SerializationError
from engine_client.protocol import arrays
from engine_client.protocol.exceptions import describe_exception

__all__ = ["Name", "find_name", "register_type"]

T = TypeVar("T", bound=type)

_LONGEST_NAME: Final = 200
"""Characters of a name that somebody else has chosen, in a message."""


class Name(NamedTuple):
    """A name on the stack: not a value, only what it stands for in the table can be done with it."""

    title: str
    make: Callable[..., Any]
    kind: type | None


def register_type(kind: T) -> T:
    """Let values of a class be decoded by clients with ``ClientOptions(codec="restricted")``; return the class.

    Its constructor does not run, nor any method: fields are set to what has arrived, which is plain data or of
    registered types, and may be of other types than the class says.  Can be used as a decorator.

    Args:
        kind: a dataclass, an enum, or a named tuple.

    Raises:
        TypeError: it is something else.
    """
    given: Any = kind
    is_class = isinstance(given, type)
    if not (is_class and (is_dataclass(given) or hasattr(given, "_fields") or issubclass(given, enum.Enum))):
        raise TypeError(f"only a dataclass, an enum or a named tuple can be registered, not {kind!r}")
    make = kind if issubclass(kind, enum.Enum) else _maker(kind)
    name = f"{kind.__module__}.{kind.__qualname__}"
    _TABLE[kind.__module__, kind.__qualname__] = Name(name, make, kind)
    return kind


def _maker(kind: type) -> Callable[..., Any]:
    def make(*args: Any) -> Any:
        count = len(kind._fields) if issubclass(kind, tuple) else 0  # type: ignore[attr-defined]  # a named tuple's
        if len(args) != count:
            raise RemoteProtocolError(f"a {kind.__qualname__} with {len(args)} values cannot be")
        return tuple.__new__(kind, args) if issubclass(kind, tuple) else object.__new__(kind)

    return make


def find_name(module: str, name: str) -> Name:
    """Return what a name stands for.

    Raises:
        SerializationError: nothing.
    """
    found = _TABLE.get(("__main__" if module == "__mp_main__" else module, name))
    if found is None:
        raise SerializationError(
            f"{module}.{name}"[:_LONGEST_NAME] + " is not a registered type, and this client decodes no others: "
            'engine_client.register_type makes it one, and ClientOptions(codec="pickle") trusts engines with all'
        )
    return found


def _checked(rebuild: Callable[..., Any], data: Any, *args: Any) -> Any:
    """Rebuild something over its bytes, whatever the other arguments are."""
    if type(data) not in {bytes, memoryview}:
        raise RemoteProtocolError("an array is made of what are no bytes")
    for arg in args:
        parts: Iterable[Any] = arg if type(arg) in {tuple, list} else (arg,)
        if not all(type(part) in {str, int, bool, type(None)} for part in parts):
            raise SerializationError("an array of a type that is not plain cannot be decoded by this client")
    return rebuild(data, *args)


def _array(typecode: Any, data: Any) -> Any:
    return _checked(lambda data, typecode: arrays.rebuild_array(typecode, data), data, typecode)


def _ndarray(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
    def rebuild(data: Any, dtype: Any, shape: Any, order: Any) -> Any:
        if arrays.attribute("numpy", "dtype")(dtype).hasobject:
            raise SerializationError("an array of objects cannot be decoded by this client")
        return arrays.rebuild_ndarray(data, dtype, shape, order)

    return _checked(rebuild, data, dtype, shape, order)


def _memoryview(data: Any, layout: Any, shape: Any) -> Any:
    return _checked(arrays.rebuild_memoryview, data, layout, shape)


def _tensor(data: Any, name: Any, shape: Any, order: Any, requires_grad: Any) -> Any:
    def rebuild(data: Any, name: Any, *args: Any) -> Any:
        if not isinstance(arrays.attribute("torch", name), arrays.attribute("torch", "dtype")):
            raise RemoteProtocolError("a tensor is of no type")
        return arrays.rebuild_tensor(data, name, *args)

    return _checked(rebuild, data, name, shape, order, requires_grad)


def _plain(make: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        if not all(type(arg) in {int, float, type(None)} for arg in args):
            raise RemoteProtocolError(f"a {make.__name__} is made of what are no numbers")
        return make(*args)

    return checked


_TABLE: Final[dict[tuple[str, str], Name]] = {
    (module, name): Name(f"{module}.{name}", make, None)
    for module, name, make in (
        ("builtins", "complex", _plain(complex)),
        ("builtins", "range", _plain(range)),
        ("builtins", "slice", _plain(slice)),
        ("engine_client.protocol.arrays", "rebuild_array", _array),
        ("engine_client.protocol.arrays", "rebuild_memoryview", _memoryview),
        ("engine_client.protocol.arrays", "rebuild_ndarray", _ndarray),
        ("engine_client.protocol.arrays", "rebuild_tensor", _tensor),
        ("engine_client.protocol.codec", "_rebuild_exception", describe_exception),
    )
}
"""What a message may name: what messages call it, what it makes."""

for _module in (messages, params):
    for _kind in vars(_module).values():
        if isinstance(_kind, type) and _kind.__module__ == _module.__name__:
            register_type(_kind)
