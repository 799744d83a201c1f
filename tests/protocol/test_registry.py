"""What messages of engines that are not trusted may name; how it is used is in ``test_restricted``."""

from __future__ import annotations

import inspect
from collections import OrderedDict

import pytest

from engine_client import messages, params, register_type
from engine_client.errors import SerializationError
from engine_client.protocol.registry import find_name


def test_a_type_of_no_known_kind_cannot_be_registered() -> None:
    """Nor what is no type."""
    for kind in (int, OrderedDict, tuple, 7, print):
        with pytest.raises(TypeError, match="only a dataclass, an enum or a named tuple"):
            register_type(kind)  # type: ignore[type-var]


def test_all_messages_are_registered() -> None:
    """Every class of the reference's surface that an engine may send."""
    for module in (messages, params):
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__:
                assert find_name(module.__name__, name).kind is kind


def test_a_class_of_the_main_module_is_found_under_both_of_its_names() -> None:
    """An engine knows the user's program as another module."""

    def make(name: str) -> type:
        return type(name, (tuple,), {"__module__": "__main__", "__qualname__": name, "_fields": ("a",)})

    kind = register_type(make("Mine"))
    assert find_name("__mp_main__", "Mine").kind is find_name("__main__", "Mine").kind is kind


def test_a_name_of_nothing_is_an_error_of_bounded_length() -> None:
    """However long it is."""
    with pytest.raises(SerializationError, match=r"xxx is not a registered type") as caught:
        find_name("m", "x" * 10_000_000)
    assert len(str(caught.value)) < 500
