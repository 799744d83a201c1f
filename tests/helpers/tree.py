"""The package as files: its modules, their syntax trees, and what they import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import engine_client

__all__ = ["MODULES", "PACKAGE", "TESTS", "Import", "Module", "imports", "parse"]

PACKAGE: Final = Path(engine_client.__file__).parent
TESTS: Final = Path(__file__).parent.parent


@dataclass(frozen=True)
class Module:
    """One file, by its full name."""

    path: Path
    name: str

    def __str__(self) -> str:
        return self.name or "engine_client"


class Import(NamedTuple):
    """``target`` is the module that is imported; ``late`` when it happens inside a function."""

    target: str
    line: int
    late: bool
    type_checking: bool


def _module(path: Path) -> Module:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return Module(path, ".".join(["engine_client", *parts]) if parts else "engine_client")


MODULES: Final = [_module(path) for path in sorted(PACKAGE.rglob("*.py"))]
_NAMES: Final = {module.name for module in MODULES}


@cache
def parse(module: Module) -> ast.Module:
    """Return the syntax tree."""
    return ast.parse(module.path.read_text(encoding="utf-8"), str(module.path))


def imports(module: Module) -> list[Import]:
    """Return every import of a module, wherever it stands, by what it loads."""
    return list(_walk(parse(module), late=False, type_checking=False))


def _walk(node: ast.AST, *, late: bool, type_checking: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        here = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        checking = type_checking or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        for target in _targets(child):
            yield Import(target, child.lineno, here, checking)
        yield from _walk(child, late=here, type_checking=checking)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        base = node.module or ""
        # ``from engine_client.ipc import arena`` loads a module, ``from engine_client.ipc.arena import Arena`` a name.
        return sorted({f"{base}.{a.name}" if f"{base}.{a.name}" in _NAMES else base for a in node.names})
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "import_module",
        "importlib.import_module",
        "__import__",
    ):
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) else []
    return []
