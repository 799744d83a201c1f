"""The tests mirror the package: every module has its test file, and every test says what it shows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers.tree import MODULES, TESTS

FILES = sorted(TESTS.rglob("test_*.py"))


@pytest.mark.parametrize("module", [m for m in MODULES if m.path.name not in ("__init__.py", "__main__.py")], ids=str)
def test_module_has_its_test_file(module):
    """``engine_client/ipc/arena.py`` is tested by ``tests/ipc/test_arena.py``, and so on."""
    *rooms, name = module.name.split(".")[1:]
    assert TESTS.joinpath(*rooms, f"test_{name}.py").exists()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_has_a_sentence(path: Path):
    """A test's docstring is one sentence on how the library behaves."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    ]
    assert [node.name for node in tests if not ast.get_docstring(node)] == []
    assert ast.get_docstring(tree), "the file does not say what it is about"


@pytest.mark.parametrize(
    "folder", [p for p in TESTS.iterdir() if p.is_dir() and list(p.glob("test_*.py"))], ids=lambda p: p.name
)
def test_folders_are_packages(folder: Path):
    """Folders of tests are packages (so that equal file names do not clash and engines can import test classes)."""
    assert (folder / "__init__.py").exists()
    assert not (TESTS / "__init__.py").exists()
