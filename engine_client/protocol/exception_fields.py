"""Reading and setting what an exception is made of, without running the code of its class.

An exception of a user's class may override anything: ``args`` may be a property that raises, ``__str__`` may exit.
Here everything is read and set through the descriptors of the builtin classes, and what cannot be had without user
code (texts, pickles) is had by ``attempt``.

Threads: pure functions.  Pure: performs no I/O.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final, TypeVar

__all__ = [
    "GROUP",
    "args_of",
    "attempt",
    "construct",
    "cut",
    "field",
    "is_group",
    "outline_of",
    "place_of",
    "repr_of",
    "set_field",
    "set_slot",
    "slots_of",
    "text_of",
    "title_of",
]

T = TypeVar("T")
U = TypeVar("U")

GROUP: Final[Any] = getattr(builtins, "BaseExceptionGroup", ())
"""The class of exception groups; before Python 3.11 an empty tuple, which nothing is an instance of."""
_LONGEST_REPR: Final = 1024 * 1024
_HEAP_TYPE: Final = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: set in the flags of every class that a ``class`` statement makes."""
_NOT_CARRIED: Final = frozenset({"obj", "message", "exceptions"})
"""Slots of builtin classes: the object that lacked an attribute (anything at all, kept for a hint at the prompt), and
the two of a group, which its constructor sets."""


def attempt(call: Callable[..., T], *args: Any, otherwise: U) -> T | U:
    """Call user code; return what it returns, or ``otherwise`` if it raises, be it SystemExit."""
    try:
        return call(*args)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # safe because the caller says what stands in
        return otherwise


def field(error: BaseException, name: str) -> Any:
    """Read what every exception has, past anything of that name in its own class."""
    return BaseException.__dict__[name].__get__(error)


def set_field(error: BaseException, name: str, value: Any) -> None:
    """Set what every exception has."""
    BaseException.__dict__[name].__set__(error, value)


def is_group(error: BaseException) -> bool:
    """Tell whether this is an exception group, whatever it says of its class."""
    return issubclass(type(error), GROUP)


def args_of(error: BaseException) -> tuple[Any, ...]:
    """Return the arguments, of a group only its message."""
    if is_group(error):
        return (GROUP.message.__get__(error),)
    args: tuple[Any, ...] = field(error, "args")
    return args


def place_of(kind: type) -> tuple[str, str]:
    """Return module and qualified name of a class."""
    return "".join([attempt(str, kind.__module__, otherwise="?")]), kind.__qualname__


def title_of(module: str, name: str) -> str:
    """Return how a class is called in messages."""
    return name if module == "builtins" else f"{module}.{name}"


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, not cut."""
    text = attempt(str, error, otherwise="<its text cannot be had, because __str__ raised>")
    return "".join([text])  # an exact str, whatever __str__ returned


def repr_of(value: Any) -> str:
    """Return ``repr(value)``, cut at 1 MiB; the name of its class if that raises."""
    return cut("".join([attempt(repr, value, otherwise=outline_of(value))]), _LONGEST_REPR)


def outline_of(value: Any) -> str:
    """Return what to call a value without asking it."""
    return f"<{title_of(*place_of(type(value)))} object>"


def cut(text: str, limit: int) -> str:
    """Shorten a text in the middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters are cut here ...]\n{text[-half:]}"


def slots_of(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield what is stored outside of ``__dict__``: fields of builtin classes, such as ``errno``, and ``__slots__``."""
    for kind in type(error).__mro__:
        if kind is BaseException or kind is object:
            continue
        builtin = not kind.__flags__ & _HEAP_TYPE
        for name, slot in kind.__dict__.items():
            if not isinstance(slot, (MemberDescriptorType, GetSetDescriptorType)) or name.startswith("__"):
                continue
            if builtin and name in _NOT_CARRIED:
                continue
            with suppress(Exception):  # safe because a slot that cannot be read is one that is not set
                value = slot.__get__(error)
                if value is not None or not builtin:  # set to None, OSError.filename would show in the text
                    yield name, value


def set_slot(error: BaseException, name: str, value: Any) -> None:
    """Set what ``slots_of`` yielded; a name that this class lacks is ignored."""
    for kind in type(error).__mro__:
        slot = kind.__dict__.get(name)
        if isinstance(slot, (MemberDescriptorType, GetSetDescriptorType)):
            with suppress(Exception):  # safe because a slot that is read-only has its value from the constructor
                slot.__set__(error, value)
            return


def construct(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an instance as the builtin class underneath would."""
    base: Any = kind
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__
    error: BaseException = base.__new__(kind, *args)
    if type(error) is not kind:  # OSError picks a class by its errno, which the sender's object did not have
        error = base.__new__(kind)
    with suppress(Exception):  # safe because args and slots are set afterwards; they need not fit the constructor
        base.__init__(error, *args)
    set_field(error, "args", args)
    return error
