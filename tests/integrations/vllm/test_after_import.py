"""Actions on modules that are loaded already, and on those that come later."""

from __future__ import annotations

import copy
import functools
import importlib
import pickle
import sys
from unittest import mock

import pytest

from engine_client.integrations.vllm.after_import import after_import, wrap_once


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Give the name of a module that can be imported, and was not."""
    (tmp_path / "to_be_patched.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        yield "to_be_patched"


def test_a_module_that_comes_later(module):
    """The action runs when the module has been executed, and before the importer goes on."""
    after_import(module, lambda loaded: setattr(loaded, "value", loaded.value + 1))
    assert importlib.import_module(module).value == 2
    assert importlib.import_module(module).__loader__.get_source(module) == "value = 1\n"


def test_a_copy_of_its_loader(module):
    """The loader of such a module can be copied and pickled like the one that it stands for."""
    after_import(module, print)
    loader = importlib.import_module(module).__loader__
    for copied in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert copied.get_source(module) == "value = 1\n"
        assert not hasattr(copied, "no_such_attribute")


def test_a_module_that_is_there(module):
    """On a loaded module the action runs at once."""
    loaded = importlib.import_module(module)
    after_import(module, lambda loaded: setattr(loaded, "value", 5))
    assert loaded.value == 5


def test_a_module_that_is_not_there():
    """What cannot be found is still not found."""
    after_import("no_such_module_at_all", lambda loaded: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")


def decorated(method):
    """Return a wrapper as another library makes them."""
    return functools.wraps(method)(lambda *args: [*method(*args), "theirs"])


class Owner:
    """Has a method and a static one, both of which somebody else has wrapped already."""

    @decorated
    def method(self, value):
        return [value]

    @staticmethod
    @decorated
    def static(value):
        return [value]


@pytest.mark.parametrize("name", ["method", "static"])
def test_what_is_wrapped_once(name):
    """A function is wrapped whoever has wrapped it before; a second call replaces the first's wrapper."""
    owner = type("Owner", (Owner,), {})
    for added in ("first", "second"):
        wrap_once(owner, name, lambda own, added=added: lambda *args: [*own(*args), added])
    assert getattr(owner(), name)(1) == [1, "theirs", "second"]
    assert getattr(Owner(), name)(1) == [1, "theirs"]
