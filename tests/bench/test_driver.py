"""The measured process: one line of JSON in, one out, whatever the side prints or raises."""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_client.bench import driver
from helpers.timing import DEADLOCK

HERE = Path(driver.__file__).parent

SIDE = """
import sys
print("this goes to stderr")
class Side:
    kinds = {"add": lambda side, a, b: {"sum": a + b}, "fail": lambda side: 1 / 0, "where": lambda side: sys.path}
    def about(self):
        return {"side": "test"}
def make_side():
    return Side()
"""


def drive(tmp_path: Path, text: str, *commands: dict) -> tuple[list[dict], str]:
    path = tmp_path / "side.py"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, driver.__file__, str(path), str(tmp_path / "first")],
        input="".join(json.dumps(command) + "\n" for command in commands),
        capture_output=True,
        text=True,
        timeout=DEADLOCK,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_answers(tmp_path):
    """Each command has one answer; an exception is one, too, and the next command is served."""
    add = {"kind": "add", "parameters": {"a": 1, "b": 2}}
    answers, told = drive(tmp_path, SIDE, add, {"kind": "fail", "parameters": {}}, add)
    assert answers == [
        {"about": {"side": "test"}},
        {"figures": {"sum": 3}},
        {"error": "ZeroDivisionError: division by zero"},
        {"figures": {"sum": 3}},
    ]
    assert "this goes to stderr" in told
    assert "Traceback" in told


def test_path(tmp_path):
    """The package's folder comes first in the path; the benchmark's own is not in it, so that it hides no package."""
    _, answer = drive(tmp_path, SIDE, {"kind": "where", "parameters": {}})[0]
    assert answer["figures"][0] == str(tmp_path / "first")
    assert str(HERE) not in answer["figures"]


def test_side_that_cannot_be_made(tmp_path):
    """A side that does not come up is one answer, which says why."""
    answers, _ = drive(tmp_path, "def make_side():\n    raise ImportError('no such thing')\n")
    assert answers == [{"error": "ImportError: no such thing"}]


def test_workloads_are_there(tmp_path):
    """The common workloads need no mention by the side."""
    text = SIDE.replace("class Side:", "class Side:\n    def make_client(self): raise OSError('asked')")
    _, answer = drive(tmp_path, text, {"kind": "utility", "parameters": {"times": 1}})[0]
    assert answer == {"error": "OSError: asked"}


def test_serving_ends_with_the_commands(tmp_path, capsys):
    """When there are no more commands, serving is over; a failure has left its traceback on stderr."""
    path = tmp_path / "served.py"
    path.write_text(SIDE)
    side = driver.load(str(path)).make_side()
    del sys.modules["bench_served"]
    commands = io.StringIO('{"kind": "add", "parameters": {"a": 1, "b": 1}}\n{"kind": "fail", "parameters": {}}\n')
    answers = io.StringIO()
    driver.serve(side, side.kinds, commands, answers)
    about, figures, error = map(json.loads, answers.getvalue().splitlines())
    assert (about, figures) == ({"about": {"side": "test"}}, {"figures": {"sum": 2}})
    assert error == {"error": "ZeroDivisionError: division by zero"}
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["driver", "loops", "life", "peer_vllm", "zmq_engine"])
def test_files_of_foreign_interpreters(name: str):
    """What runs where this package is not installed does not import it."""
    tree = ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))
    modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    assert [module for module in modules if module.startswith("engine_client")] == []
