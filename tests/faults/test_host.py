"""Programs of every form and condition can have an engine: unguarded, without a file, on a terminal (BC-05)."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest

from helpers.hosts import Terminal, run_as, run_terminal
from helpers.scenes import METHODS, methods, told
from helpers.timing import SCALE

pytestmark = pytest.mark.crash

FILES = ("script", "module", "directory", "zip")
FILELESS = ("stdin", "command")

# What every program here does with an engine whose classes can be imported from installed modules: it needs no guard.
USE = """
import os, sys
from dataclasses import dataclass
from engine_client import ClientOptions, EngineConfig, SerializationError, SyncMPClient
from engine_client.engine.executor import Executor
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import TARGET, Script
from helpers.clients import collect, make_request

method = sys.argv[-1] if sys.argv[-1] in ("spawn", "forkserver", "fork") else "exec"

def tokens(client):
    client.add_request(make_request("a", 3))
    return [token for output in collect(client, 1)["a"] for token in output.new_token_ids]

def use():
    for target, executor in ((TARGET, None), (ClientOptions.engine_target, EchoExecutor)):
        config = EngineConfig(additional_config={"script": Script(token=3)})
        options = ClientOptions(start_method=method, engine_target=target)
        with SyncMPClient(config, executor, False, options=options) as client:
            print(*tokens(client), flush=True)

"""
USED = "3 3 3\n3 3 3\n"
GUARD = 'if __name__ == "__main__":\n    use()\n'

# Classes and functions of the program itself, which are to be known in the engine.
OWN = """
class Seven(Executor):
    def execute_model(self, batch):
        return batch.sample(lambda request: 7)

@dataclass
class Point:
    x: int

class Broken(Exception):
    pass

def double(worker, point):
    return Point(2 * point.x)

def break_down(worker):
    raise Broken("unique text")

def use_own():
    for target, executor in ((TARGET, None), (ClientOptions.engine_target, Seven)):
        options = ClientOptions(start_method=method, engine_target=target)
        config = EngineConfig(additional_config={"script": Script(token=7), "own": Point(1)})
        with SyncMPClient(config, executor, False, options=options) as client:
            print(*client.collective_rpc(double, args=(Point(4),)), *tokens(client), flush=True)
            try:
                client.collective_rpc(break_down)
            except Broken as error:
                print(error, flush=True)

"""
OWN_USED = "Point(x=8) 7 7 7\nunique text\n" * 2


# -- BC-05: forms of programs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*FILES, *FILELESS])
def test_bc05_unguarded_programs_of_every_form(form: str, tmp_path: Path) -> None:
    """With the default start no form of program needs a guard, and nothing is printed by the engine."""
    assert run_as(form, f"{USE}use()\n", tmp_path).check().stdout == USED


@pytest.mark.parametrize("method", [*METHODS[1:3], pytest.param("fork", marks=pytest.mark.full)])
@pytest.mark.parametrize("form", [*FILELESS, "zip", pytest.param("script", marks=pytest.mark.full)])
def test_bc05_other_start_methods_in_every_form(form: str, method: str, tmp_path: Path) -> None:
    """With the other start methods programs without a file, and zipped ones, work unguarded, and the others guarded."""
    end = "use()\n" if form in (*FILELESS, "zip") else GUARD
    assert run_as(form, USE + end, tmp_path, method).check().stdout == USED


@pytest.mark.parametrize("form", ["script", *(pytest.param(f, marks=pytest.mark.full) for f in FILES[1:])])
@methods("spawn")
def test_bc05_classes_of_the_program_reach_the_engine(form: str, method: str, tmp_path: Path) -> None:
    """Executor, arguments, results and exceptions of the program itself travel, both ways, and are the same types."""
    unguarded = method in ("exec", "fork")
    end = "use_own()\n" if unguarded else GUARD.replace("use", "use_own")
    assert run_as(form, USE + OWN + end, tmp_path, method).check().stdout == OWN_USED


@methods("spawn", "forkserver")
def test_bc05_an_unguarded_script(method: str, tmp_path: Path) -> None:
    """Unguarded, spawn and forkserver give a RuntimeError that says so, within 5 s, and one process at most."""
    script = f"""{USE}
with open({str(tmp_path / "runs")!r}, "a") as file:
    print(os.getpid(), os.getppid(), file=file)
try:
    use()
except RuntimeError as error:
    assert os.path.basename(sys.argv[0]) == "program.py"
    print(type(error).__name__, "guard" in str(error) and "default start method" in str(error), flush=True)
    raise SystemExit(3) from None
"""
    result = run_as("script", script, tmp_path, method)
    assert result.elapsed < 5.0 * SCALE
    assert not result.left
    runs = [line.split() for line in (tmp_path / "runs").read_text().splitlines()]
    if method in ("exec", "fork"):
        result.check()
        assert result.stdout == USED
        assert len(runs) == 1
    else:
        assert result.returncode == 3, result
        assert result.stdout.splitlines()[-1] == "StartupError True", result
        assert len(runs) <= 2 + (method == "forkserver"), runs


@pytest.mark.parametrize("form", FILELESS)
@methods()
def test_bc05_a_factory_in_a_program_without_a_file(form: str, method: str, tmp_path: Path) -> None:
    """Without cloudpickle it is refused by name before any process is started; utilities refuse single calls."""
    source = f"""
sys_modules = __import__("sys").modules
sys_modules["cloudpickle"] = None
{USE}{OWN}
from unittest import mock
from engine_client.clients import start
watch = mock.patch.object(start, "launch", wraps=start.launch)
launch = watch.start()
for config, executor in ((EngineConfig(), Seven), (EngineConfig(additional_config=dict(own=Point(1))), EchoExecutor)):
    try:
        SyncMPClient(config, executor, False, options=ClientOptions(start_method=method))
    except SerializationError as error:
        print(str(error).split(",")[0], "importable" in str(error), "notebook" in str(error))
print(launch.mock_calls)
with SyncMPClient(EngineConfig(), EchoExecutor, False, options=ClientOptions(start_method=method)) as client:
    assert launch.mock_calls
    try:
        client.collective_rpc(double, args=(1,))
    except SerializationError as error:
        print(str(error).split(",")[0])
    print(*tokens(client))
"""
    lines = [f"__main__.{name} cannot be sent True True" for name in ("Seven", "Point")]
    expected = [*lines, "[]", "__main__.double cannot be sent", "3 3 3", ""]
    assert run_as(form, source, tmp_path, method).check().stdout == "\n".join(expected)


# -- an interactive session --------------------------------------------------------------------------------------------


@methods("spawn")
def test_bc05_an_interactive_session(method: str, tmp_path: Path) -> None:
    """On a terminal, typed line by line, both engines work, Ctrl-C interrupts a wait only, and the end is silent."""

    def talk(terminal: Terminal) -> None:
        terminal.expect(">>> ")
        terminal.run(USE)
        terminal.type("use()\n")
        terminal.expect(r"3 3 3\s+3 3 3\s+>>> ")
        terminal.run(
            f"""
            options = ClientOptions(start_method={method!r})
            client = SyncMPClient(EngineConfig(), EchoExecutor, False, options=options)
            """
        )
        terminal.type("print('wait' + 'ing'); client.get_output()\n")
        terminal.expect("waiting")
        terminal.type("\x03")
        terminal.expect("KeyboardInterrupt\\s+>>> ")
        terminal.type("print(*tokens(client), client.is_alive)\n")
        terminal.expect("3 3 3 True\\s+>>> ")
        terminal.type("exit()\n")

    assert run_terminal(talk, method).check().stdout == ""


def test_bc05_classes_typed_into_a_session() -> None:
    """With cloudpickle the classes and functions that were typed into a session reach the engine, and come back."""

    def talk(terminal: Terminal) -> None:
        terminal.expect(">>> ")
        terminal.run(USE + OWN)
        terminal.type("use_own()\n")
        terminal.expect(r"(Point\(x=8\) 7 7 7\s+unique text\s+){2}>>> ")
        terminal.type("exit()\n")

    assert run_terminal(talk).check().stdout == ""


# -- conditions --------------------------------------------------------------------------------------------------------


@methods("spawn")
def test_modules_beside_the_script_reach_the_engine(method: str, tmp_path: Path) -> None:
    """Classes and functions of modules beside the script are found by the engine, wherever it was started from."""
    (tmp_path / "beside.py").write_text(USE + OWN)
    source = "import os\nfrom beside import use_own\nif __name__ == '__main__':\n    os.chdir('/')\n    use_own()\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run_as("script", source, tmp_path, method, cwd=elsewhere).check().stdout == OWN_USED
    assert sorted(os.listdir(elsewhere)) == []


@pytest.mark.parametrize("form", FILELESS)
def test_modules_in_the_working_directory_reach_the_engine(form: str, tmp_path: Path) -> None:
    """Without a script it is the working directory whose modules are found, as in the program itself."""
    (tmp_path / "beside.py").write_text(USE + OWN)
    assert run_as(form, "from beside import use_own\nuse_own()\n", tmp_path, cwd=tmp_path).check().stdout == OWN_USED


LONG = "/".join(["lang" * 50] * 4)


@pytest.mark.parametrize("name", [LONG, "日本語 ü'\"$ x", "not text \udcff"], ids=["long", "non-ascii", "bytes"])
@methods()
def test_directories_of_any_name(name: str, method: str, tmp_path: Path) -> None:
    """Script, working directory and temporary directory may have any name; nothing of ours stays in any."""
    directory = tmp_path / name
    temporary = directory / "temporary"
    temporary.mkdir(parents=True)
    (directory / "beside.py").write_text(USE + OWN)
    source = "from beside import *\nif __name__ == '__main__':\n    use(), use_own()\n"
    env = {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    result = run_as("script", source, directory, method, cwd=directory, env=env)
    assert result.check().stdout == USED + OWN_USED
    assert sorted(os.listdir(directory)) == ["beside.py", "program.py", "temporary"]
    assert os.listdir(temporary) == []


@methods("forkserver")
def test_a_temporary_directory_with_a_long_path(method: str, tmp_path: Path) -> None:
    """A temporary directory whose path is longer than a socket's may be (107 characters) is no obstacle."""
    temporary = tmp_path / ("t" * 100) / ("u" * 100)
    temporary.mkdir(parents=True)
    result = run_as("script", USE + GUARD, tmp_path, method, env={"TMPDIR": str(temporary)})
    assert result.check().stdout == USED
    assert os.listdir(temporary) == []


CLOSED = [closed for count in (1, 2, 3) for closed in combinations((0, 1, 2), count)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "closed", [c if c in ((0,), (0, 1, 2)) else pytest.param(c, marks=pytest.mark.full) for c in CLOSED], ids=str
)
def test_closed_standard_descriptors(closed: tuple[int, ...], late: bool, tmp_path: Path) -> None:
    """With 0 to 2 closed, before or by the host, all works, and what the engine prints ends up in no pipe of ours."""
    source = f"""{USE}
if {late}:
    for fd in {closed}:
        os.close(fd)
import json
from helpers.scenes import describe
found = []
for target, executor in ((TARGET, None), (ClientOptions.engine_target, EchoExecutor)):
    config = EngineConfig(additional_config=dict(script=Script(token=3)))
    with SyncMPClient(config, executor, False, options=ClientOptions(engine_target=target)) as client:
        client.collective_rpc(print, args=("noise " * 10000,))
        client.collective_rpc(os_write)
        found.append(tokens(client))
describe({str(tmp_path / "told")!r}, found=found)
""".replace("import json\n", "from noise import os_write\n")
    (tmp_path / "noise.py").write_text(
        "import os\ndef os_write(worker):\n    for fd in (1, 2):\n        os.write(fd, b'noise' * 1000)\n"
    )

    def close() -> None:
        for fd in closed:
            os.close(fd)

    options = {} if late else {"preexec_fn": close}
    result = run_as("script", source, tmp_path, env={"PYTHONFAULTHANDLER": None}, **options)
    assert result.returncode == 0, result
    assert not result.left
    assert told(tmp_path / "told")["found"] == [[3, 3, 3]] * 2
    assert "Traceback" not in result.stderr


@methods()
@pytest.mark.parametrize("daemonic_by", ["spawn", *(pytest.param(m, marks=pytest.mark.full) for m in METHODS[2:])])
def test_a_daemonic_process(daemonic_by: str, method: str, tmp_path: Path) -> None:
    """A daemonic process can have engines, though multiprocessing's methods must refuse; the refusal names the way."""
    source = f"""{USE}{OWN}
import multiprocessing

def work():
    try:
        use()
        use_own()
    except RuntimeError as error:
        print(type(error).__name__, "daemonic" in str(error) and "default start method" in str(error), flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context({daemonic_by!r}).Process(target=work, daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    expected = USED + OWN_USED if method == "exec" else "StartupError True\n"
    assert run_as("script", source, tmp_path, method).check().stdout == expected
