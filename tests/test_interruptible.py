"""A lock is given back whatever an interrupt comes between.

Python 3.12 and 3.13 look for signals where a loop begins anew, and what is raised there is not seen by the ``with`` or
``try`` around the loop (the jump is not in their exception tables): the lock stays taken for good.  So no loop stands
directly inside of a block that holds a lock; it is in a function that is called there.
"""

from __future__ import annotations

import ast

import pytest

from helpers.tree import MODULES, Module, parse

LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)


def loops_within(node: ast.AST) -> list[int]:
    """Return the lines of loops in a block, those of functions in it apart."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            continue
        if isinstance(child, LOOPS):
            found.append(child.lineno)
        else:
            found += loops_within(child)
    return found


def holds_a_lock(block: ast.With) -> bool:
    """Tell whether a block is entered by a lock, by its name."""
    return any(ast.unparse(item.context_expr).endswith("lock") for item in block.items)


@pytest.mark.parametrize("module", [module for module in MODULES if module.name.startswith("engine_client")], ids=str)
def test_no_loop_stands_in_a_block_that_holds_a_lock(module: Module) -> None:
    """What runs under a lock and repeats is a function of its own."""
    blocks = [node for node in ast.walk(parse(module)) if isinstance(node, ast.With) and holds_a_lock(node)]
    assert [line for block in blocks for line in loops_within(ast.Module(block.body, []))] == []
