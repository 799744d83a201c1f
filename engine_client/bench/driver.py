"""The measured process: runs workloads on one side, one after the other, as it is told through its stdin.

::

    python driver.py SIDE.py [PATH]     PATH is put onto sys.path, for a side that needs the package
    stdin   {"kind": "stream", "parameters": {…}}          one line of JSON for each workload
    stdout  {"about": {…}}, then {"figures": {…}} or {"error": "…"} for each

It is run by its path, also with interpreters that do not have this package: only the standard library is imported.
Whatever the side prints goes to stderr.

Threads: the main thread.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

__all__ = ["load", "main", "serve"]


def load(path: str) -> Any:
    """Return the module of a file, whatever is on ``sys.path``."""
    name = f"bench_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def serve(side: Any, kinds: dict[str, Any], commands: Any, answers: Any) -> None:
    """Answer each line of ``commands`` by one on ``answers``, until there is no more."""

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"about": side.about()})
    for line in commands:
        command = json.loads(line)
        gc.collect()
        try:
            answer({"figures": kinds[command["kind"]](side, **command["parameters"])})
        except Exception as error:  # noqa: BLE001  # the other side of the pipe reports it
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def main(arguments: list[str]) -> None:
    """Serve one side on the standard streams."""
    path, *package = arguments
    here = Path(__file__).parent
    sys.path[:] = [*package, *(entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve())]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed is not lost at the end
    try:
        side = load(path).make_side()
    except Exception as error:  # noqa: BLE001  # as in serve
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
        return
    kinds = getattr(side, "kinds", {})
    for name in ("loops", "life"):
        kinds = {**load(str(here / f"{name}.py")).KINDS, **kinds}
    serve(side, kinds, sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # threads of a client whose engine was killed may be waiting still
