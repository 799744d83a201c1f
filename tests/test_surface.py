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
from engine_client import EngineConfig, EngineCoreClient, ParallelConfig

SURFACE = json.loads((Path(__file__).parent / "data" / "surface.json").read_text())

LATER = ("AsyncMPClient", "DPAsyncMPClient", "DPLBAsyncMPClient")
"""Classes of the reference that belong to asyncio and data parallel; the factories refuse them in a sentence."""

CLASSES = {**SURFACE["clients"], **SURFACE["engine"]}
PRESENT = [name for name in CLASSES if name not in LATER]
METHODS = [
    pytest.param(class_name, name, facts, id=f"{class_name}.{name}")
    for class_name in PRESENT
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


@pytest.mark.parametrize("class_name", PRESENT)
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
    """Every recorded class is importable from the package, but for those that belong to a later version."""
    recorded = [*CLASSES, *SURFACE["messages"], *SURFACE["enums"], *SURFACE["errors"]]
    assert [name for name in recorded if not hasattr(engine_client, name)] == list(LATER)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("external", [False, True])
def test_later_clients_are_refused_in_a_sentence(size, external):
    """Asking a factory for an asyncio client raises NotImplementedError that says what to do, and starts nothing."""
    config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=size, data_parallel_external_lb=external))
    for make in (
        lambda: EngineCoreClient.make_client(True, True, config, SimpleNamespace, False),
        lambda: EngineCoreClient.make_async_mp_client(config, SimpleNamespace, False),
    ):
        with pytest.raises(NotImplementedError, match=r"\w+ \w+ \w+.*make_client"):
            make()


def test_asyncio_in_process_is_refused():
    """An engine core in this process cannot be asyncio's: the reference refuses it, too."""
    with pytest.raises(NotImplementedError, match="multiprocess_mode"):
        EngineCoreClient.make_client(False, True, EngineConfig(), SimpleNamespace, False)
