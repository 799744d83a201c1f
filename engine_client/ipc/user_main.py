"""The user's main file in the engine process: run there only if an object needs it.

What a script defines is known as ``__main__.Name``.  The engine process has a ``__main__`` of its own; so when a
message names such an object, the file is run there once more, under the name ``__mp_main__`` as ``multiprocessing``
does it: what stands under ``if __name__ == "__main__":`` is not run.  Most engines never need it.

::

    client: describe_main() ── INIT ──▶ engine: ensure_main(description)   once, at the first message that needs it

A script without that guard comes to the line that makes a client, in the engine.  There the replay stops: the names
defined above that line are kept, which is what the client could have sent, and no engine is started by an engine.
Any other module that makes a client while an engine imports it, to find what it was sent, gets an error that says so:
its import could not be finished, and the engines would start one another without end.

Threads: ``describe_main`` and ``replay_guard`` from any thread; ``ensure_main`` on the engine's main thread.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, Final

from engine_client.errors import StartupError

__all__ = ["MainReplayed", "decoding", "describe_main", "ensure_main", "importable", "replay_guard"]

_NAME: Final = "__mp_main__"
"""What ``multiprocessing`` calls it; the client has an alias of this name, so objects find their way back."""


class MainReplayed(BaseException):
    """Stops a main file that is run in an engine where it would make a client."""


class _Replay:
    """What happened to the main file in this process."""

    running = False
    done = False
    decoding = False


def describe_main() -> dict[str, str]:
    """Return how another process can run this one's main file; empty when it has none, as in a notebook.

    The key is ``module`` (run as ``python -m``), ``file`` (a script), or ``archive`` (a zip application).
    """
    main = sys.modules.get("__main__")
    if main is None:
        return {}
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name is not None and name != "__main__":
        return {"module": name}
    path = getattr(main, "__file__", None) or ""
    archive = getattr(getattr(main, "__loader__", None), "archive", None)
    kind, path = ("file", path) if archive is None else ("archive", archive)
    # Interactive sessions have no file, and that of standard input is called <stdin>.
    return {kind: os.path.abspath(path)} if os.path.isfile(path) else {}


def importable(description: dict[str, str]) -> bool:
    """Tell whether objects of the described ``__main__`` can be had in another process."""
    return bool(description)


def ensure_main(description: dict[str, str]) -> None:
    """Make ``__main__`` of this process hold what the described one defines.  Once; later calls do nothing.

    An exception of the main file passes through, with the names defined above it kept.
    """
    if _Replay.done or not description or _is_main(description):
        return
    _Replay.done = True
    code, attributes = _load(description)
    module = ModuleType(_NAME)
    module.__dict__.update(attributes)
    # First, so that what the file pickles or looks up meanwhile is found.
    sys.modules["__main__"] = sys.modules[_NAME] = module
    _Replay.running = True
    try:
        exec(code, module.__dict__)  # noqa: S102 (the user's own main file)
    except (MainReplayed, SystemExit):
        pass  # what it has defined so far is what its objects were made of
    finally:
        _Replay.running = False


class _Decoding:
    """The block in which an engine decodes what it was sent, and imports what that names."""

    def __enter__(self) -> None:
        _Replay.decoding = True

    def __exit__(self, *_: object) -> None:
        _Replay.decoding = False


decoding: Final = _Decoding()
"""``with decoding:`` around the decoding of a payload, on the engine's main thread."""


def replay_guard() -> None:
    """Stop code that an engine runs only for its definitions.  To be called first by whatever starts engines.

    Raises:
        MainReplayed: this process is an engine, and runs the main file for its definitions only.
        StartupError: it imports the module that calls this, in order to decode what it was sent.
    """
    if _Replay.decoding and not _Replay.running:
        raise StartupError(
            "an engine process imports this module to find what it was sent, and the module makes a client while it is "
            'imported: move that into a function, or under `if __name__ == "__main__":`'
        )
    if _Replay.running:
        raise MainReplayed("a main file that is run in an engine process cannot make a client")


def _is_main(description: dict[str, str]) -> bool:
    """Tell whether ``__main__`` is that file already: after a fork, or with multiprocessing's own replay."""
    return describe_main() == description


def _load(description: dict[str, str]) -> tuple[Any, dict[str, Any]]:
    """Return the main file's code, and what its module knows of itself."""
    import importlib.machinery  # noqa: PLC0415 (only for an engine that needs the main file)
    import importlib.util  # noqa: PLC0415 (as above)

    if "module" in description:
        name = description["module"]
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if spec is None or loader is None:
            raise ImportError(f"no module {name!r} in the engine process, but it is the main module of its client")
        attributes = {"__spec__": spec, "__file__": spec.origin, "__package__": name.rpartition(".")[0]}
        return loader.get_code(name), attributes
    if "archive" in description:
        import zipimport  # noqa: PLC0415 (as above)

        archive = zipimport.zipimporter(description["archive"])
        return archive.get_code("__main__"), {"__file__": archive.get_filename("__main__"), "__loader__": archive}
    path = description["file"]
    if path.endswith(".pyc"):
        compiled = importlib.machinery.SourcelessFileLoader(_NAME, path)
        return compiled.get_code(_NAME), {"__file__": path}
    # Not get_code: it would leave a __pycache__ beside the user's script.
    source = importlib.machinery.SourceFileLoader(_NAME, path)
    return source.source_to_code(source.get_data(path), path), {"__file__": path}
