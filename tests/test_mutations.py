"""The planted bugs of mutations.py can still be planted, and the tests that find them are still there."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from helpers.tree import TESTS

SPEC = importlib.util.spec_from_file_location("mutations", TESTS / "mutations.py")
mutations = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)

EACH = pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda mutation: mutation.name)


@EACH
def test_a_bug_can_be_planted(mutation):
    """The text that a bug replaces is in its file exactly once, and what comes of it is a program, and another one."""
    text = (TESTS.parent / "engine_client" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert ast.dump(ast.parse(text.replace(mutation.old, mutation.new))) != ast.dump(ast.parse(text))


@EACH
def test_a_bug_has_a_test(mutation):
    """The test that finds a bug exists under its name."""
    file, _, name = mutation.test.partition("::")
    tree = ast.parse(Path(TESTS.parent / file).read_text(encoding="utf-8"))
    assert name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_bugs_have_names_of_their_own():
    """There are a dozen bugs at least, each with a name by which it can be run."""
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(set(names)) == len(names) >= 12
