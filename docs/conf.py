"""How Sphinx makes a site of these pages: ``tox -e docs``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import engine_client

ROOT = Path(__file__).parent.parent

project = "engine_client"
copyright = "The engine_client contributors"
release = version = engine_client.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"engine_client {version}"

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_PAGES = {"ARCHITECTURE.md": "architecture.md"}
_README_TABLE = "<!-- on the site: the table of README.md, Speed -->"


def rewrite_links(app: Any, name: str, source: list[str]) -> None:
    """Let links that lead out of these pages lead to the page that includes the file, or say where it is."""

    def replace(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        assert (ROOT / path).exists(), f"{name}: no {path}"
        return f"[{text}]({_PAGES[path]})" if path in _PAGES else f"`{path}` in the repository"

    if _README_TABLE in source[0]:
        source[0] = source[0].replace(_README_TABLE, _table_of_readme())
    source[0] = _LINK.sub(replace, source[0])


def _table_of_readme() -> str:
    """Return the figures, which are kept in one place, and the paragraph that says of what they are."""
    parts = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Speed\n")[2].split("\n\n")
    index = next(index for index, part in enumerate(parts) if part.startswith("|"))
    return "\n\n".join(parts[index - 1 : index + 1])


def setup(app: Any) -> None:
    """Register what is above."""
    app.connect("source-read", rewrite_links)
