"""The stacks of another process: asked for by a signal, read from memory, whatever that process is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_client.ipc import stacks
from engine_client.ipc.arena_memory import create_memory
from engine_client.ipc.stacks import QUESTION, FaultMemory, own_stacks
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually

REPORTING = """
import os, signal, sys, threading, time
from engine_client.ipc.stacks import QUESTION, report_stacks
report_stacks({fd})
def deep_down():
    print(flush=True)
    {doing}
deep_down()
"""


@contextmanager
def process(doing: str, script: str = REPORTING) -> Iterator[tuple[FaultMemory, Any]]:
    """Yield the memory of a process that does this, and the process."""
    fd = create_memory("faults")
    memory = FaultMemory(fd)
    code = script.format(fd=fd, doing=doing)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[fd]) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield memory, child
        finally:
            child.kill()
            memory.close()


def ask(memory: FaultMemory, child: Any) -> str:
    """Return the stacks of a process."""
    found: list[str] = []
    with memory.turn:
        memory.ask(child.pid, child.send_signal)
        eventually(lambda: found.append(memory.answer(child.pid) or "") or bool(found[-1]), DEADLOCK)
        memory.taken()
    return found[-1]


WAITS = "time.sleep(600)"
HOLDS_THE_GIL = "import ctypes; ctypes.PyDLL(None).sleep(600)"
DEADLOCKED = "lock = threading.Lock(); lock.acquire(); lock.acquire()"


@pytest.mark.parametrize("doing", [WAITS, HOLDS_THE_GIL, DEADLOCKED])
def test_stacks_whatever_the_process_does(doing: str) -> None:
    """Asleep, in C code with the interpreter's lock, or in a deadlock: the stacks are whole, and come again."""
    with process(doing) as (memory, child):
        assert memory.read() == ""
        for _ in range(2):
            text = ask(memory, child)
            assert text.count("in deep_down") == 1
            assert text.rstrip().endswith("in <module>")
            assert "in _answer" in text
            assert memory.read() == ""  # no death shows what somebody has seen
        assert child.poll() is None
        assert "open" in repr(memory)


AT_ONCE = """
import os, signal, threading, time
from engine_client.ipc import stacks
from engine_client.ipc.arena_memory import create_memory
real = signal.pthread_sigmask

def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.3)
    return real(*arguments)

signal.pthread_sigmask = slow
stacks.report_stacks(create_memory("stacks"))
print([stacks._signals(task, "SigBlk", stacks.FORCE) for task in stacks._tasks(os.getpid())].count(False))
"""


def test_it_can_be_asked_from_the_beginning() -> None:
    """Whatever the process does next, be it to keep the interpreter's lock for ever: one thread takes the signal."""
    assert run_script(AT_ONCE).check().stdout == "1\n"


def test_all_threads_are_in_the_answer() -> None:
    """Of fifty threads none is missing, each time: an answer is not read before it is whole."""
    doing = "[threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(50)]; time.sleep(600)"
    with process(doing) as (memory, child):
        eventually(lambda: len(list(Path(f"/proc/{child.pid}/task").iterdir())) == 52, DEADLOCK)
        for _ in range(20):
            assert ask(memory, child).count("hread 0x") == 52


def test_a_process_that_does_not_catch_the_signal_is_not_sent_it() -> None:
    """It would die of it."""
    with process(WAITS, "import time; print(flush=True); {doing}") as (memory, child):
        with memory.turn, pytest.raises(RuntimeError, match="does not catch signal"):
            memory.ask(child.pid, child.send_signal)
        assert child.poll() is None


def test_a_stopped_process_answers_when_it_goes_on() -> None:
    """Nothing is there meanwhile."""
    with process(WAITS) as (memory, child):
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        with memory.turn:
            memory.ask(child.pid, child.send_signal)
            assert memory.answer(child.pid) is None
            child.send_signal(signal.SIGCONT)
            eventually(lambda: "deep_down" in (memory.answer(child.pid) or ""), DEADLOCK)


def test_without_proc_an_answer_is_whole_when_nothing_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not tell whether a handler runs, time does."""
    monkeypatch.setattr(stacks, "_signals", lambda path, mask, number: None)
    monkeypatch.setattr(stacks, "_QUIET", 0.05)
    with process(WAITS) as (memory, child):
        assert "in deep_down" in ask(memory, child)


def test_the_memory_does_not_grow_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while it is written from its beginning again, and what is read is what is new."""
    monkeypatch.setattr(stacks, "_WIND_BACK", 1000)
    with process(WAITS) as (memory, child):
        texts = {ask(memory, child) for _ in range(30)}
        assert all(text.count("in deep_down") == 1 for text in texts)
        assert os.fstat(memory.fileno()).st_size < 3000


def test_only_the_end_of_very_much_is_read() -> None:
    """And of memory that is closed, nothing."""
    memory = FaultMemory(create_memory("faults"))
    os.write(memory.fileno(), b"x" * (1 << 20) + b"end")
    assert len(memory.read()) == 256 * 1024
    assert memory.read().endswith("end")
    memory.close()
    memory.close()
    assert memory.read() == ""
    assert memory.fileno() == -1
    memory.taken()
    assert "closed" in repr(memory)


def test_a_process_that_is_gone_has_no_threads() -> None:
    """What is asked of it is asked in vain."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    memory = FaultMemory(create_memory("faults"))
    with memory.turn:
        memory.ask(child.pid, lambda number: None)
        assert memory.answer(child.pid) is None
    memory.close()


def test_the_stacks_of_this_process() -> None:
    """In the same form, without a signal."""
    assert "in test_the_stacks_of_this_process" in own_stacks()
    assert signal.getsignal(QUESTION) is signal.SIG_DFL
