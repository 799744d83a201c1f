"""What the package offers is complete, declared once, and loaded when it is first used."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import engine_client
from engine_client import testing
from engine_client.testing import faults, pytest_plugin
from helpers.tree import MODULES, PACKAGE, TESTS, parse

NAMES = sorted(engine_client.__all__)


def test_all_is_unique():
    """``__all__`` names each thing once."""
    assert len(set(engine_client.__all__)) == len(engine_client.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_name_is_its_home_module_s(name):
    """A name leads to the object of that name in the one module that declares it."""
    value = getattr(engine_client, name)
    homes = [m.name for m in MODULES if name in declared(m) and m.name.count(".") >= 1]
    assert any(getattr(importlib.import_module(home), name) is value for home in homes), homes
    assert name in dir(engine_client)


@pytest.mark.parametrize("module", [m for m in MODULES if m.path.name not in ("__init__.py", "__main__.py")], ids=str)
def test_module_declares_what_it_exports(module):
    """Every module has a sorted, unique ``__all__`` of names that it defines."""
    names = declared(module)
    assert names, "no __all__"
    assert len(set(names)) == len(names)
    defined = {name for node in parse(module).body for name in definitions(node)}
    assert set(names) <= defined | {alias for alias in names if alias.startswith("__")} | reexported(module)


def declared(module) -> list[str]:
    """Return the literal ``__all__``."""
    for node in parse(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:  # computed, in the package itself
                return []
    return []


def reexported(module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in parse(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def definitions(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if isinstance(node, (ast.If, ast.Try)):
        return [
            name for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt) for name in definitions(child)
        ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_unknown_name():
    """An attribute that the package does not have is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(engine_client, "no_such_name")  # noqa: B009  # mypy knows that it is not there


def test_version():
    """The version is the installed distribution's."""
    from importlib.metadata import version

    assert engine_client.__version__ == version("engine_client")


def test_type_checkers_know_every_name():
    """The names under TYPE_CHECKING, which type checkers and editors see, are those that are there when it runs."""
    seen = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("engine_client")
        for alias in node.names
    }
    assert set(NAMES) - {"__version__"} == seen


def test_py_typed():
    """The package says that it is typed."""
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="only tox installs the wheel")
def test_the_wheel_is_what_is_tested():
    """Under tox the tests, and processes that they start, see the installed wheel, not the source tree."""
    root = Path(__file__).parent.parent
    assert root not in Path(engine_client.__file__).parents or ".tox" in engine_client.__file__
    command = [sys.executable, "-c", "import engine_client; print(engine_client.__file__)"]
    child = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
    assert child.stdout.strip() == engine_client.__file__


def test_the_documentation_has_every_name():
    """The page of the API has each public name once, and nothing that is gone."""
    page = (TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. auto(?:class|function|data):: (\S+)$", page, re.MULTILINE)
    for module in re.findall(r"^\.\. automodule:: (\S+)\n   :members:$", page, re.MULTILINE):
        shown += importlib.import_module(module).__all__
    ours = [name for name in shown if "." not in name]
    assert sorted(ours) == NAMES
    assert len(set(shown)) == len(shown)


@pytest.mark.parametrize(
    "name",
    [
        "engine_client.clients.metrics_server.MetricsServer",
        "engine_client.executors.ngram.NGramExecutor",
        "engine_client.executors.transformers.TransformersExecutor",
        "engine_client.ipc.status_page.EngineStatus",
        *(f"engine_client.testing.{name}" for name in testing.__all__ if name not in faults.__all__),
    ],
)
def test_the_documentation_has_what_stands_elsewhere(name: str):
    """The page has what users of other modules need, by its full name, which can be imported."""
    page = (TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert re.search(rf"^\.\. auto(?:class|function|data):: {re.escape(name)}$", page, re.MULTILINE)
    module, _, last = name.rpartition(".")
    assert hasattr(importlib.import_module(module), last)


@pytest.mark.parametrize("name", ["leak_guard", "scripted_engine"])
def test_the_documentation_has_the_fixtures(name: str):
    """The page describes the fixtures of the plugin."""
    page = (TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert re.search(rf"^\.\. py:function:: {name}\(", page, re.MULTILINE)
    assert name in pytest_plugin.__all__


@pytest.mark.parametrize("name", ["SyncMPClient", "AsyncMPClient", "InprocClient"])
def test_the_documentation_has_what_clients_inherit(name: str):
    """A client's methods are all listed, also those of its bases."""
    page = (TESTS.parent / "docs" / "api.md").read_text(encoding="utf-8")
    assert f".. autoclass:: {name}\n   :members:\n   :inherited-members:\n" in page
