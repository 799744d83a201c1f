"""Jupyter is an extra of the tests: without it these are left out."""

from __future__ import annotations

from importlib.util import find_spec

if not (find_spec("nbclient") and find_spec("ipykernel")):
    collect_ignore_glob = ["test_*.py"]
