"""The examples run as they are, from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.procs import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
SAYS = {
    "generate": ["The with statement is used to ", "A list comprehension", "Exceptions are", "[stop]"],
    "own_executor": ["counting up to 12", "from eight [9]", "from eight [12]", "from eight [0] stop"],
    "share_array": ["the largest of 4000000 numbers is 3999999", "30 MiB came back"],
}


def test_every_example_is_listed():
    """An example that nobody runs is not one."""
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(name: str, tmp_path: Path):
    """It ends in order, warns of nothing, leaves nothing, and says what it is about."""
    result = run_script(EXAMPLES / f"{name}.py", cwd=tmp_path).check()
    assert [text for text in SAYS[name] if text not in result.stdout] == []
