"""docs/failures.md lists the reported faults that are tested, all of them, each with tests that exist."""

from __future__ import annotations

import re

from helpers.tree import TESTS

ROWS = re.findall(
    r"^\|.*\| `(test_\w+\.py)::test_(bc\d\d)_` \|$",
    (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_every_case_has_one_row():
    """The ids in the names of the tests are those of the table."""
    names = " ".join(
        name
        for path in (TESTS / "faults").glob("test_*.py")
        for name in re.findall(r"^def (test_bc\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert sorted(case for _, case in ROWS) == sorted(set(re.findall(r"bc\d\d", names)))


def test_every_row_names_tests_that_exist():
    """Each file has a test of its row's case."""
    for file, case in ROWS:
        assert f"def test_{case}_" in (TESTS / "faults" / file).read_text(encoding="utf-8"), (file, case)
