"""What docs/transformers.md shows, runs; and the weights are told of as they are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_client import ClientOptions
from helpers.procs import run_script
from helpers.tree import TESTS


def test_the_program_of_the_guide(smollm: Path, tmp_path: Path) -> None:
    """It answers, with the model in the folder that it names."""
    page = (TESTS.parent / "docs" / "transformers.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(smollm)
    result = run_script(program, cwd=tmp_path, timeout=300, flags=()).check(0)
    assert "pipe" in result.stdout.lower()


def test_the_weights_are_told_of_as_they_load(make: Callable[..., Any]) -> None:
    """From the engine's process: how many of how many, then that it is ready."""
    told: list[tuple[str, int, int]] = []
    make(True, options=ClientOptions(on_progress=lambda *event: told.append(event)))
    counts = [(done, total) for phase, done, total in told if phase == "loading weights" and total]
    assert len(set(counts)) > 3
    assert counts == sorted(counts)
    assert counts[-1][0] == counts[-1][1]
    assert told[-1] == ("ready", 1, 1)
