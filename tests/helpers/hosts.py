"""Hosts of clients: the forms that a user's program may have, and an interactive session on a real terminal."""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import termios
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.procs import ScriptResult, run_script
from helpers.timing import DEADLOCK

__all__ = ["Terminal", "run_as", "run_terminal"]


def run_as(form: str, source: str, directory: Path, *args: str, **options: Any) -> ScriptResult:
    """Run a program in one of these forms: script, module, directory, zip, stdin, command, repl (fed line by line)."""
    source = textwrap.dedent(source)
    if form == "stdin":
        return run_script(None, *args, stdin=source, **options)
    if form == "command":
        return run_script(source, *args, **options)
    if form == "script":
        script = directory / "program.py"
        script.write_text(source)
        return run_script(script, *args, **options)
    if form == "module":
        (directory / "package").mkdir()
        (directory / "package" / "__init__.py").touch()
        (directory / "package" / "program.py").write_text(source)
        flags = (*options.pop("flags", ("-W", "error")), "-m", "package.program")
        return run_script("", *args, flags=flags, **{"cwd": directory, **options})
    if form == "directory":
        (directory / "program").mkdir()
        (directory / "program" / "__main__.py").write_text(source)
        return run_script(directory / "program", *args, **options)
    assert form == "zip"
    with zipfile.ZipFile(directory / "program.zip", "w") as archive:
        archive.writestr("__main__.py", source)
    return run_script(directory / "program.zip", *args, **options)


class Terminal:
    """The other end of a terminal that a program runs on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.text = ""

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())

    def expect(self, pattern: str, timeout: float = DEADLOCK) -> str:
        """Wait until the program has written something that matches; forget all up to its end."""
        deadline = time.monotonic() + timeout
        while (match := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come: {self.text!r}"
            self.text += os.read(self.fd, 65536).decode(errors="replace")
        self.text = self.text[match.end() :]
        return match.group()

    def rest(self) -> str:
        """Return what was written since."""
        while select.select([self.fd], [], [], 0)[0]:
            self.text += os.read(self.fd, 65536).decode(errors="replace")
        return self.text

    def run(self, source: str, prompt: str = ">>> ") -> None:
        """Type a program as a user does: each line after the prompt that asks for it."""
        inside = False
        for line in [*textwrap.dedent(source).strip().splitlines(), ""]:
            self.type(f"{line}\n")
            inside = bool(line) and (inside or line.endswith(":") or line.startswith("@"))
            self.expect(re.escape("... " if inside else prompt))


def run_terminal(dialogue: Callable[[Terminal], Any], *args: str, **options: Any) -> ScriptResult:
    """Run Python on a terminal that is its controlling one, while ``dialogue`` types and reads; stdout is the rest."""
    master, slave = os.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    terminal = Terminal(master)

    def take_terminal() -> None:
        os.dup2(slave, 0)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def started(process: subprocess.Popen[bytes]) -> None:
        del process
        dialogue(terminal)

    # The plain prompt of all versions; the one of 3.13 draws what is typed anew for each key.
    options["env"] = {"PYTHON_BASIC_REPL": "1", "TERM": "dumb", **options.get("env", {})}
    options.setdefault("flags", ("-W", "error", "-q", "-i"))
    try:
        options.update(preexec_fn=take_terminal, stdout=slave, stderr=slave)
        result = run_script(None, *args, started=started, **options)
        result.stdout = terminal.rest()
        return result
    finally:
        os.close(slave)
        os.close(master)
