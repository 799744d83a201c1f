"""``engine-client chat`` with a real model: it answers, remembers, and an interrupted answer does not end it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from helpers.procs import run_script
from helpers.timing import DEADLOCK

MAIN = "import sys; from engine_client.cli.main import main; sys.exit(main())"
PATIENCE = 10 * DEADLOCK


def test_it_answers_line_by_line(smollm: Path) -> None:
    """Each line of stdin gets an answer that knows of those before; status 0 at the end of the input."""
    lines = "My name is Bartholomew. Say hello.\nWhat is my name?\n/exit\nnot read\n"
    result = run_script(MAIN, "chat", "--model", str(smollm), "-n", "30", stdin=lines, flags=(), timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.strip().split("\n", 1)
    assert first
    assert "Bartholomew" in second


def test_an_interrupted_answer_is_kept(smollm: Path) -> None:
    """Ctrl-C in the middle of an answer ends that alone; the next line is answered."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "chat", "--model", str(smollm), "-n", "400"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    guard = threading.Timer(PATIENCE, process.kill)
    guard.start()
    try:
        process.stdin.write(b"Write a very long story about a dragon.\n")
        shown = process.stdout.read(8)
        os.killpg(process.pid, signal.SIGINT)
        while b"[interrupted]\n" not in shown:
            data = process.stdout.read(1)
            assert data, shown
            shown += data
        process.stdin.write(b"Say yes.\n")
        assert process.stdout.read(1)
        os.killpg(process.pid, signal.SIGINT)
        process.stdin.close()
        process.stdout.read()
        assert process.wait(PATIENCE) == 0
    finally:
        guard.cancel()
        guard.join()
        process.kill()
        process.wait()
        process.stdout.close()
