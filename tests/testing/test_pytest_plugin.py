"""The pytest plugin, in runs of pytest of its own."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from helpers.procs import script_environment
from helpers.timing import DEADLOCK

PLUGIN = "engine_client.testing.pytest_plugin"
ON = "--engine-client-leak-guard"
MARK = "ENGINE_CLIENT_LEAK_GUARD"
"""The variable by which a guard finds processes; here it is that of the guard around the test."""

LEAKY = """
import os, pytest

def test_clean(): pass

def test_leaky(): os.pipe()

@pytest.mark.no_leak_guard
def test_left_out(): os.pipe()

@pytest.mark.usefixtures("leak_guard")
def test_guarded(): os.pipe()

@pytest.fixture(scope="module")
def held(): return os.pipe()

@pytest.mark.usefixtures("leak_guard")
def test_what_a_module_holds(held): pass
"""


def run_pytest(folder: Path, source: str, *args: str, ini: str = "") -> tuple[int, str]:
    (folder / "test_it.py").write_text(textwrap.dedent(source))
    (folder / "pytest.ini").write_text(f"[pytest]\nengine_client_leak_patience = 0.05\n{ini}\n")
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "--strict-markers", "-ra", *args]
    done = subprocess.run(
        command,
        cwd=folder,
        env=script_environment(PYTEST_ADDOPTS=None, PYTEST_PLUGINS=None, COLUMNS="200"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLOCK,
        check=False,
    )
    return done.returncode, done.stdout


def failed(output: str) -> set[str]:
    summary = output.partition("short test summary info")[2]
    return {line.partition("::")[2].split()[0] for line in summary.splitlines() if line.startswith(("ERROR", "FAILED"))}


def test_off_by_default(tmp_path: Path) -> None:
    """Only the test that asks for the guard has it."""
    status, output = run_pytest(tmp_path, LEAKY)
    assert (status, failed(output)) == (1, {"test_guarded"}), output


@pytest.mark.parametrize(("args", "ini"), [((ON,), ""), ((), "engine_client_leak_guard = true")], ids=["flag", "ini"])
def test_on_for_all(tmp_path: Path, args: tuple[str, ...], ini: str) -> None:
    """By flag or by setting every test is guarded, but those that say no; the leak is named in the report."""
    status, output = run_pytest(tmp_path, LEAKY, *args, ini=ini)
    assert (status, failed(output)) == (1, {"test_leaky", "test_guarded"}), output
    assert "LeakError: left after 0.05 s" in output
    assert "descriptor" in output


def test_nothing_is_loaded_or_changed_when_off(tmp_path: Path) -> None:
    """No module of the library but the plugin and what checks its settings, no fixture in use, no variable set."""
    source = """
        import os, sys
        def test_it(request):
            loaded = {name for name in sys.modules if name.startswith("engine_client")}
            assert loaded == {"engine_client", "engine_client.deadline", "engine_client.testing", PLUGIN}
            assert not [name for name in ("psutil", "tblib", "numpy") if name in sys.modules]
            assert os.environ["ENGINE_CLIENT_LEAK_GUARD"] == MARK
            assert request.fixturenames == ["request"]
        """
    status, output = run_pytest(
        tmp_path, f"PLUGIN = {PLUGIN!r}\nMARK = {os.environ[MARK]!r}\n" + textwrap.dedent(source)
    )
    assert status == 0, output


def test_clients_are_shut_down(tmp_path: Path) -> None:
    """What ``scripted_engine`` makes is gone when the test ends, whatever the test does; several may be made."""
    source = """
        from engine_client.testing import Script, collect, make_request
        made = []
        def test_it(scripted_engine):
            made.extend([scripted_engine(Script(token=5)), scripted_engine(kind="async", ready_timeout=30.0)])
            made[0].add_request(make_request("a", 1))
            assert collect(made[0], 1)["a"][0].new_token_ids == [5]
            raise RuntimeError("the test fails")
        def test_after():
            assert [client.is_alive for client in made] == [False, False]
        """
    status, output = run_pytest(tmp_path, source, ON, ini="engine_client_leak_guard = true")
    assert (status, failed(output)) == (1, {"test_it"}), output
    assert "LeakError" not in output


def test_a_wrong_patience_is_refused(tmp_path: Path) -> None:
    """pytest says which setting is wrong, and runs nothing."""
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    status, output = run_pytest(tmp_path, "", "-o", "engine_client_leak_patience=soon")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "engine_client_leak_patience must be a number of seconds, not 'soon'" in output


def test_pytest_finds_it() -> None:
    """The distribution names the plugin by the name of its module, so that naming it again loads it once."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(Path(__file__).parent.parent.parent / "setup.cfg")
    assert f"{PLUGIN} = {PLUGIN}" in setup["options.entry_points"]["pytest11"]
    installed = {(point.name, point.value) for point in entry_points(group="pytest11") if "engine_client" in point.name}
    if "TOX_ENV_NAME" in os.environ:
        assert installed == {(PLUGIN, PLUGIN)}


PROJECT = Path(__file__).parent.parent.parent / "examples" / "testing-project"


@pytest.mark.slow
@pytest.mark.crash
def test_the_example_project(tmp_path: Path) -> None:
    """Its tests pass; with a leak in one of them, that one does not."""
    for path in PROJECT.glob("*.*"):
        (tmp_path / path.name).write_text(path.read_text())
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-q", "-W", "error", "--strict-config"]
    options = {"cwd": tmp_path, "env": script_environment(PYTEST_ADDOPTS=None), "text": True, "capture_output": True}
    good = subprocess.run(command, timeout=2 * DEADLOCK, check=False, **options)
    assert good.returncode == 0, good.stdout
    assert "4 passed" in good.stdout
    tests = tmp_path / "test_answering.py"
    tests.write_text(tests.read_text() + "\n\ndef test_careless():\n    import os\n    os.pipe()\n")
    setup = tmp_path / "pyproject.toml"
    setup.write_text(setup.read_text() + "engine_client_leak_patience = 0.1\n")
    bad = subprocess.run([*command, "-k", "careless"], timeout=2 * DEADLOCK, check=False, **options)
    assert bad.returncode == 1
    assert "LeakError" in bad.stdout
