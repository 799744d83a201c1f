"""Do something to a module as soon as it was imported, however and whenever that happens; and wrap what it has.

Threads: ``after_import`` from one thread; the actions run on whichever thread imports the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

__all__ = ["after_import", "wrap_once"]

Action = Callable[[ModuleType], None]

_MARK: Final = "_engine_client_wraps"
"""The attribute of a wrapper that has what it wraps; ``__wrapped__`` may be there for other reasons."""


class _Loader(Loader):
    """Loads as the module's own loader does, then acts."""

    def __init__(self, inner: Any, action: Action) -> None:
        self._inner = inner
        self._action = action

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_inner":  # not there yet, in a copy under way
            raise AttributeError(name)
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the module's own loader creates."""
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then act on it."""
        self._inner.exec_module(module)
        self._action(module)


class _Finder(MetaPathFinder):
    """Finds a few modules as the others do, with another loader."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find what there is an action for."""
        action = self.actions.get(name)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, action)
                return spec
        return None


_finder = _Finder()


def after_import(name: str, action: Action) -> None:
    """Call ``action(module)`` now if the module is loaded, else right after it was executed; a second call replaces."""
    _finder.actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    module = sys.modules.get(name)
    if module is not None:
        action(module)


def wrap_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function of a class by a wrapper; a second call replaces the wrapper, and wraps the same again.

    Args:
        owner: the class.
        name: of a method, or of a static one.
        make: returns the wrapper of what the class had at first.
    """
    method = getattr(owner, name)
    own = getattr(method, _MARK, method)
    wrapper = make(own)
    setattr(wrapper, _MARK, own)
    found = next(vars(kind)[name] for kind in owner.__mro__ if name in vars(kind))
    setattr(owner, name, staticmethod(wrapper) if isinstance(found, staticmethod) else wrapper)
