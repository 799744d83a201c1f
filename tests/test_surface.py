"""Names, order, kind and defaults of parameters and fields are the reference's.

``data/surface.json`` is a record of the client layer of vLLM 0.25.1: of every class its bases and public methods, of
every method its parameters, of every message its fields, of every enum its members.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import engine_client
from engine_client import EngineConfig, EngineCoreClient

SURFACE = json.loads((Path(__file__).parent / "data" / "surface.json").read_text())

CLASSES = {**SURFACE["clients"], **SURFACE["engine"]}
METHODS = [
    pytest.param(class_name, name, facts, id=f"{class_name}.{name}")
    for class_name in CLASSES
    for name, facts in CLASSES[class_name]["methods"].items()
]


def described(parameter: inspect.Parameter) -> dict[str, Any]:
    """Return a parameter in the terms of the record."""
    found = {"name": parameter.name, "kind": parameter.kind.name.lower()}
    if parameter.default is not parameter.empty:
        found["default"] = repr(parameter.default)
    return found


def is_added(parameter: inspect.Parameter) -> bool:
    """Tell whether a parameter may be ours: it is given by name or not at all."""
    return parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty


@pytest.mark.parametrize(("class_name", "name", "facts"), METHODS)
def test_method(class_name, name, facts):
    """A method has the reference's parameters; what we add is keyword-only with a default."""
    raw = inspect.getattr_static(getattr(engine_client, class_name), name)
    assert isinstance(raw, staticmethod) is facts["static"]
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    assert inspect.iscoroutinefunction(function) is facts["coroutine"]
    ours = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"]
    known = {parameter["name"] for parameter in facts["parameters"]}
    assert [described(p) for p in ours if p.name in known or not is_added(p)] == facts["parameters"]


@pytest.mark.parametrize("class_name", CLASSES)
def test_bases(class_name):
    """A class has the reference's bases among its own; code asks ``isinstance``."""
    ours = {base.__name__ for base in getattr(engine_client, class_name).__mro__}
    assert set(CLASSES[class_name]["bases"]) <= ours


@pytest.mark.parametrize("name", SURFACE["messages"])
def test_message(name):
    """A message has the reference's fields, in order, with its defaults."""
    message = getattr(engine_client, name)
    ours = []
    for field in dataclasses.fields(message):
        found = {"name": field.name}
        if field.default is not dataclasses.MISSING:
            found["default"] = repr(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            found["default"] = repr(field.default_factory())
        ours.append(found)
    assert ours == SURFACE["messages"][name]
    # And the constructor agrees with the fields, however it is written.
    signature = [described(parameter) for parameter in inspect.signature(message).parameters.values()]
    assert [parameter["name"] for parameter in signature] == [field["name"] for field in ours]
    assert {parameter["kind"] for parameter in signature} == {"positional_or_keyword"}


@pytest.mark.parametrize("name", SURFACE["enums"])
def test_enum(name):
    """An enum has the reference's members and values, in order."""
    members = getattr(engine_client, name)
    assert issubclass(members, enum.Enum)
    assert {member.name: repr(member.value) for member in members} == SURFACE["enums"][name]


@pytest.mark.parametrize("name", SURFACE["errors"])
def test_error(name):
    """The reference's errors are there, and are exceptions."""
    assert issubclass(getattr(engine_client, name), Exception)


def test_nothing_else_is_left_out():
    """Every recorded class is importable from the package."""
    recorded = [*CLASSES, *SURFACE["messages"], *SURFACE["enums"], *SURFACE["errors"]]
    assert [name for name in recorded if not hasattr(engine_client, name)] == []


def test_asyncio_in_process_is_refused():
    """An engine core in this process cannot be asyncio's: the reference refuses it, too."""
    with pytest.raises(NotImplementedError, match="multiprocess_mode"):
        EngineCoreClient.make_client(False, True, EngineConfig(), SimpleNamespace, False)
