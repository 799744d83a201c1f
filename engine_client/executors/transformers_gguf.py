"""A model that is one GGUF file: where it lies, and whether what transformers needs to read it is installed.

::

    folder with config.json, name of a repository ─▶ as it is
    x.gguf, or a folder with x.gguf alone ─────────▶ its folder, gguf_file="x.gguf"

Threads: the engine's.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["locate"]

_NEEDED: Final = ("gguf", "accelerate")


def locate(model: str) -> tuple[str, dict[str, str]]:
    """Return the name and the further arguments by which ``from_pretrained`` finds a model.

    Raises:
        ImportError: it is a GGUF file, and packages to read it are missing; says what to install.
        ValueError: the folder has several GGUF files.
    """
    path = Path(model)
    files: list[Path] = []
    if path.suffix == ".gguf" and path.is_file():
        files = [path]
    elif path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
    if not files:
        return model, {}
    if len(files) > 1:
        raise ValueError(f"several GGUF files: name one of {', '.join(map(str, files))}")
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise ImportError(f"to read {files[0]}, transformers needs: pip install {' '.join(missing)}")
    return str(files[0].parent), {"gguf_file": files[0].name}
