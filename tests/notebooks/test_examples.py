"""The notebooks among the examples run from top to bottom, and are stored as one finds them who opens them first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from helpers.notebooks import Notebook

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "notebooks"
SAYS = {
    "quick_start": ["The with statement is used to ", "[20, 20, 20]", ">ready<", ">closed<"],
    "own_executor": ["'hello hello '", "Summary(steps=", "an engine prints under the cell", "no_such_method"],
    "share_arrays": ["30 MiB went over and were added up to 7999998000000", "4000000 ones", "999999.0 7 MiB"],
}


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def test_every_notebook_is_listed() -> None:
    """A notebook that nobody runs is not an example."""
    assert sorted(path.stem for path in EXAMPLES.glob("*.ipynb")) == sorted(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_stored_without_outputs(name: str) -> None:
    """No outputs, no counts, and valid: a change of one is a change of its text."""
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in cells if cell.outputs or cell.execution_count is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_runs(name: str, tmp_path: Path) -> None:
    """Each cell runs without an error, the notebook says what it is about, and nothing is left."""
    seen = ""
    with Notebook(tmp_path) as notebook:
        for cell in read(name).cells:
            if cell.cell_type == "code":
                done = notebook.run(cell.source).check()
                seen += f"{done.text}\n{done.result}\n{done.html}\n"
    assert [text for text in SAYS[name] if text not in seen] == [], seen
