"""A measured process seen from outside: started, asked, restarted after a failure, and gone at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine_client.bench import driver, sides
from engine_client.bench.sides import Side, SideError
from engine_client.bench.workloads import Workload
from helpers.timing import eventually

SIDE = """
import os, sys, time
class Side:
    kinds = {
        "pid": lambda side: {"pid": os.getpid(), "folder": os.environ["TMPDIR"]},
        "fail": lambda side: 1 / 0,
        "hang": lambda side: time.sleep(60),
        "vanish": lambda side: (print("that was all", flush=True), os._exit(3)),
    }
    def about(self):
        return {"side": "test"}
make_side = Side
"""


def workload(kind: str, seconds: float = 30.0) -> Workload:
    return Workload(kind, kind, (), seconds=seconds)


@pytest.fixture
def side(tmp_path: Path):
    path = tmp_path / "side.py"
    path.write_text(SIDE)
    with Side("test", [sys.executable, driver.__file__, str(path)]) as side:
        yield side


def ask(side: Side, kind: str = "pid", **options: float) -> dict:
    return side.run(workload(kind, **options), {})


def test_one_process_for_all(side: Side):
    """Workloads run one after the other in the same process, which tells its versions."""
    assert side.about == {"side": "test"}
    assert ask(side)["pid"] == ask(side)["pid"]
    assert repr(side).startswith("<Side 'test' pid=")


@pytest.mark.parametrize(
    ("kind", "seconds", "text"),
    [
        ("fail", 30.0, "test: ZeroDivisionError: division by zero"),
        ("hang", 0.2, r"test: no answer within 0\.2 s"),
        ("vanish", 30.0, r"test: its process ended; it said last: that was all"),
    ],
)
def test_failure_is_told_and_over(side: Side, kind: str, seconds: float, text: str):
    """A workload that fails, hangs or ends its process is an error that says so; the next has a fresh process."""
    before = ask(side)
    with pytest.raises(SideError, match=text):
        ask(side, kind, seconds=seconds)
    assert ask(side)["pid"] != before["pid"]
    assert eventually(lambda: not Path(f"/proc/{before['pid']}").exists())


def test_nothing_is_left(side: Side):
    """What a side makes in its temporary folder goes with it."""
    folder = Path(ask(side)["folder"])
    (folder / "socket").touch()
    side.close()
    assert not folder.exists()
    side.close()


def test_closed_side_begins_anew(side: Side):
    """A side that was closed has a fresh process for the next workload."""
    before = ask(side)
    side.close()
    assert ask(side)["pid"] != before["pid"]


def test_peer_that_is_not_there(tmp_path: Path):
    """An interpreter that does not exist, or has no vLLM, is an error of one line."""
    with pytest.raises(SideError, match=r"vllm: /no/python: No such file or directory"):
        sides.peer("/no/python")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SideError, match=r"vllm: ModuleNotFoundError: No module named"):
        sides.peer(str(python))


@pytest.mark.parametrize(("start", "name"), [(sides.ours, "engine_client"), (lambda: sides.peer("zmq"), "zmq")])
def test_real_sides(start, name: str):
    """This library and its twin on ZeroMQ run a workload."""
    with start() as side:
        assert side.label == name
        figures = side.run(Workload("utility", "utility", ()), {"times": 3})
        assert figures["p50_us"] > 0
