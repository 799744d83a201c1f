"""What README.md and docs/ show, runs.

Of every page, the blocks run in order in one empty directory (see CONTRIBUTING.md):

- ``python``: a script, in a file of its own; the name may be given by ``<!-- file: name.py -->`` above the block;
- ``console``: lines after ``$`` are run by bash; what stands below each is its output, where ``...`` matches anything;
- ``bash``: a script;
- ``text`` right after ``<!-- output -->``: what the block before it printed, ``...`` as above;
- anything else is not run here: ``text`` is a picture, and ``ELSEWHERE`` says of each other block where it is run.

A block under ``<!-- in a clone -->`` is run by itself, in a copy of the project, as on a fresh machine: it may install.
Those under ``<!-- in a notebook -->`` are cells of one notebook, with a kernel of its own.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine_client.cli import main as cli
from engine_client.testing.leaks import LeakGuard
from helpers.procs import script_environment
from helpers.timing import DEADLOCK

ROOT = Path(__file__).parent.parent
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if page.exists()]

PLUGIN = "engine_client.testing.pytest_plugin"
"""pytest has it from the installed distribution; not where that is older than the plugin."""

IN_A_CLONE = "in a clone"
IN_A_NOTEBOOK = "in a notebook"

RUN_HERE = {"python", "bash", "console", "text"}

ELSEWHERE = {
    ("README.md", ".venv/bin/pip install --quiet tox"): "nowhere: these tests would run themselves",
    ("docs/drop-in.md", "pip install '.[vllm]'"): "by hand: gigabytes",
    ("docs/drop-in.md", "from engine_client.integrations.vllm"): "tests/integrations/vllm/test_install.py",
    ("docs/drop-in.md", "python -m engine_client.integrations"): "tests/integrations/vllm/test_serving.py",
    ("docs/performance.md", "engine-client bench --peer ~/vllm"): "by hand: vLLM, and many minutes of an idle machine",
    ("docs/transformers.md", "pip install '.[transformers]'"): "by hand: gigabytes",
    ("docs/transformers.md", "pip install gguf accelerate"): "by tox -e transformers, in its own words: 100 MB",
    ("docs/transformers.md", "engine-client chat"): "tests/with_transformers/test_guide.py",
    ("docs/transformers.md", "from engine_client import ClientOptions"): "tests/with_transformers/test_guide.py",
}
"""By page and beginning, the blocks that ``test_page`` passes over: where they run, or why nothing runs them."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n+)?^```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block, the note above it, and the line where it starts."""

    language: str
    text: str
    note: str
    line: int

    def __str__(self) -> str:
        return f"{self.language}-{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["text"], m["note"] or "", text.count("\n", 0, m.start("language")) + 1)
        for m in _BLOCK.finditer(text)
    ]


CLONED = [(page, block) for page in PAGES for block in blocks_of(page) if block.note == IN_A_CLONE]


def matches(expected: str, actual: str) -> bool:
    """Tell whether the output is as shown; ``...`` stands for any text, spaces at line ends do not count."""
    lines = "\n".join(line.rstrip() for line in actual.strip().splitlines())
    parts = [re.escape(part) for part in expected.strip().split("...")]
    return re.fullmatch(".*?".join(parts), lines, re.DOTALL) is not None


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which ``python`` and ``engine-client`` are those that are tested."""
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    shim = tools / "engine-client"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m engine_client "$@"\n')
    shim.chmod(0o755)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(tools), os.environ["PATH"]])
    return script_environment(PATH=path, HOME=str(folder), TERM="dumb", COLUMNS="100", PYTEST_PLUGINS=PLUGIN)


def bare_environment(folder: Path) -> dict[str, str]:
    """Return an environment that knows nothing of this project."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "TOX"))
    }
    tools = str(Path(sys.executable).parent)
    path = [entry for entry in os.environ["PATH"].split(os.pathsep) if entry != tools]
    base = str(Path(sys.executable).resolve().parent)  # the interpreter that a virtual environment was made of
    return {**variables, "PATH": os.pathsep.join([base, *path]), "HOME": str(folder)}


def run(command: list[str], folder: Path, where: str, *, bare: bool = False) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=bare_environment(folder) if bare else environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=10 * DEADLOCK if bare else 2 * DEADLOCK,
        check=False,
    )
    assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def run_console(block: Block, folder: Path, where: str) -> None:
    """Run each command and compare what it prints with what stands below it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, expected = take_command(part)
        output = run(["bash", "-euc", command], folder, f"{where}: {command}")
        assert not expected.strip() or matches(expected, output), f"{where}: {command} printed:\n{output}"


def take_command(part: str) -> tuple[str, str]:
    """Split a command, which goes on after a backslash or in a here-document, from its output."""
    lines = part.splitlines(keepends=True)
    count = 1
    while lines[count - 1].endswith("\\\n") and count < len(lines):
        count += 1
    here = re.search(r"<<\s*'?(\w+)'?", lines[0])
    if here:
        count = next(i for i, line in enumerate(lines) if line.strip() == here[1]) + 1
    return "".join(lines[:count]), "".join(lines[count:])


def run_block(block: Block, folder: Path, where: str, before: str, *, bare: bool = False) -> str:
    """Run a block; return what it printed."""
    if block.language == "python":
        name = block.note.partition("file:")[2].strip() or f"block_{block.line}.py"
        (folder / name).write_text(block.text, encoding="utf-8")
        return run([sys.executable, name], folder, where)
    if block.language == "bash":
        return run(["bash", "-euc", block.text], folder, where, bare=bare)
    if block.language == "console":
        run_console(block, folder, where)
    elif block.language == "text" and block.note == "output":
        assert matches(block.text, before), f"{where}: the block above printed:\n{before}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, tmp_path: Path):
    """Every block runs, prints what the page says it prints, and leaves nothing running."""
    output = ""
    for block in blocks_of(page):
        if block.note not in (IN_A_CLONE, IN_A_NOTEBOOK):
            with LeakGuard():
                output = run_block(block, tmp_path, f"{page.name}:{block.line}", output)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(b.note == IN_A_NOTEBOOK for b in blocks_of(p))], ids=lambda page: page.name
)
def test_cells(page: Path, tmp_path: Path):
    """The cells that a page shows run in a kernel, one after the other."""
    pytest.importorskip("nbclient")
    from helpers.notebooks import Notebook

    with Notebook(tmp_path) as notebook:
        for block in blocks_of(page):
            if block.note == IN_A_NOTEBOOK:
                cell = notebook.run(block.text)
                assert not cell.error, f"{page.name}:{block.line}: {cell.error}"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "block"), CLONED, ids=str)
def test_block_in_a_clone(page: Path, block: Block, tmp_path: Path):
    """What a newcomer does first, from installation on, works in a copy of the project and nothing else."""
    clone = tmp_path / "engine_client"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__"))
    run_block(block, clone, f"{page.name}:{block.line}", "", bare=True)


def test_no_other_block_is_only_read():
    """Every block is run, or named in ``ELSEWHERE``; what is named is still there, and so is the test that runs it."""
    passed_over = [
        (str(page.relative_to(ROOT)), block.text)
        for page in PAGES
        for block in blocks_of(page)
        if block.language not in RUN_HERE
    ]
    named = [[key for key in ELSEWHERE if key[0] == page and text.startswith(key[1])] for page, text in passed_over]
    assert [block for block, keys in zip(passed_over, named, strict=True) if not keys] == []
    assert sorted(key for keys in named for key in keys) == sorted(ELSEWHERE)
    assert [where for where in ELSEWHERE.values() if where.startswith("tests/") and not (ROOT / where).exists()] == []


def test_commands_that_are_only_read_are_understood():
    """Where a page shows a command that no test runs, at least its arguments exist."""
    lines = [
        line
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "sh"
        for line in block.text.splitlines()
        if line.startswith("engine-client ")
    ]
    assert lines
    for line in lines:
        assert cli._parser().parse_args(shlex.split(line, comments=True)[1:]).command, line  # noqa: SLF001  # to run none


def test_every_page_is_in_the_site():
    """Each page of docs/ is named in the index, once; Sphinx itself is run by ``tox -e docs``."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```{toctree}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    named = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(named) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")


def test_the_architecture_is_included():
    """The site shows the one ARCHITECTURE.md, not a copy of it."""
    assert "{include} ../ARCHITECTURE.md" in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_site_leads_to_what_is_not_in_it(page: Path):
    """Links out of docs/ become links within the site, or say where to look; the table of README.md is shown."""
    text = page.read_text(encoding="utf-8")
    source = [text]
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["rewrite_links"](None, page.stem, source)
    assert "](../" not in source[0]
    for path in re.findall(r"\]\(\.\./(examples/[^)]*)\)", text):
        assert f"`{path}` in the repository" in source[0]
    if page.name == "performance.md":
        assert "| first token, p50 |" in source[0]
        assert "| first token, p50 |" not in text


def test_pages_are_found():
    """There is a README, and it shows code and commands."""
    languages = {block.language for page in PAGES for block in blocks_of(page)}
    assert {"python", "console"} <= languages


def test_a_wrong_page_is_noticed(tmp_path):
    """A block that fails, or prints something else, fails the test (the test of the test)."""
    page = tmp_path / "page.md"
    page.write_text(
        textwrap.dedent("""
            Text.

            <!-- file: first.py -->
            ```python
            print("one")
            ```

            <!-- output -->
            ```text
            o...e
            ```

            ```console
            $ python first.py && \\
              echo two
            one
            two
            $ cat <<'END'
            x
            END
            $ engine-client --help
            usage...
            ```

            ```bash
            echo three >file
            ```

            ```sh
            exit 1
            ```
        """)
    )
    blocks = blocks_of(page)
    assert [str(block) for block in blocks] == ["python-5", "text-10", "console-14", "bash-26", "sh-30"]
    output = ""
    for block in blocks:
        output = run_block(block, tmp_path, "page", output)
    assert (tmp_path / "file").read_text() == "three\n"
    for language, text, note in (
        ("python", "1 / 0", ""),
        ("bash", "false; true", ""),
        ("console", "$ echo a\nb\n", ""),
        ("text", "b", "output"),
    ):
        with pytest.raises(AssertionError, match="page"):
            run_block(Block(language, text, note, 1), tmp_path, "page", "a")
