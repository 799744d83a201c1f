"""docs/failures.md lists the reported faults that are tested, all of them, each with tests that exist."""

from __future__ import annotations

import re

from helpers.tree import TESTS

ROWS = re.findall(
    r"^\|.*\| `(test_\w+\.py)::test_(bc\d\d)_` \|$",
    (TESTS.parent / "docs" / "failures.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
CASES = set(
    re.findall(
        r"\w+",
        """
        bc01 bc02 bc03 bc04 bc05 bc06 bc07 bc08 bc09 bc10 bc11 bc12 bc13 bc14 bc15 bc16 bc17 bc18 bc19 bc20
        bc21 bc22 bc23 bc25 bc26 bc27 bc29 bc32 bc33 bc36 bc38 bc39 bc40 bc42 bc46 bc47 bc50 bc51 bc53 bc55
        bc57 bc59 bc61 bc63 bc64 bc66
        """,
    )
)
"""The faults that users have reported: what the table and the tests have to be about, whatever they forget."""


def names_of_tests() -> list[str]:
    """Return the names of all tests of faults."""
    return [
        name
        for path in (TESTS / "faults").glob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def test_every_case_has_one_row():
    """The table has the 46 reported faults, each once."""
    assert len(CASES) == 46
    assert sorted(case for _, case in ROWS) == sorted(CASES)


def test_every_case_has_tests():
    """Each reported fault has a test with its id in its name, and no test has the id of another fault."""
    assert set(re.findall(r"bc\d\d", " ".join(names_of_tests()))) == CASES


def test_every_row_names_tests_that_exist():
    """Each file has a test of its row's case."""
    for file, case in ROWS:
        assert f"def test_{case}_" in (TESTS / "faults" / file).read_text(encoding="utf-8"), (file, case)
