"""Starting a fresh interpreter: from any place, in any condition of the host (BC-05, BC-11, BC-47)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

import engine_client
from engine_client.errors import StartupError
from engine_client.ipc import launcher
from engine_client.ipc.engine_fds import EngineFds
from engine_client.ipc.launcher import interpreter_flags, launch
from helpers.launched import PATH, Child, Ends, start, started
from helpers.procs import run_script
from helpers.timing import SCALE

PACKAGE = Path(engine_client.__file__).parent

# For scripts that use a copy of the package, or close descriptors that the measuring needs.
UNMEASURED = {"COVERAGE_PROCESS_CONFIG": None, "COVERAGE_PROCESS_START": None}

# A script that starts a child and prints whether all is well; argv holds what it needs on its path.
ASK = """
import json, os, sys
sys.path[:0] = sys.argv[1:]
import helpers.launched
with helpers.launched.started("describe") as child:
    heard = child.hear()
    assert heard["package"] == helpers.launched.description(heard["ours"] * 0, 0)["package"], heard["package"]
    child.handle.join(30)
    assert child.handle.exitcode == 0, child.handle
print("well")
"""


@pytest.fixture
def ends():
    pair = Ends()
    yield pair
    pair.close()


def describe(**options) -> dict:
    with started("describe", **options) as child:
        return child.hear()


class TestChild:
    """What a process started by exec is like."""

    def test_its_place(self):
        """It leads a session and a group of its own, and knows our pid."""
        heard = describe()
        assert heard["launcher"] == heard["parent"] == os.getpid()
        assert heard["pid"] == heard["session"] == heard["group"]
        assert heard["package"] == engine_client.__file__
        assert heard["cwd"] == os.getcwd()

    def test_its_descriptors(self):
        """It has standard streams and the six descriptors, does not pass these on, and nothing else of ours."""
        with open(os.devnull) as file, Path(__file__).open() as another:
            os.set_inheritable(file.fileno(), True)
            os.set_inheritable(another.fileno(), True)
            heard = describe()
        assert set(heard["fds"]) == {"0", "1", "2", *map(str, heard["ours"])}
        assert heard["fds"]["0"] == "/dev/null"
        assert not any(heard["inheritable"])

    def test_its_path_and_arguments(self):
        """Neither the working directory nor ours is on its path, and its arguments are not the launcher's business."""
        heard = describe()
        assert heard["argv"] == ["-c"]
        assert heard["main_file"] is None
        assert "" not in heard["path"]
        assert heard["path"][0] == PATH[0]

    def test_its_environment(self, monkeypatch, tmp_path):
        """It sees environment and directory as they are at the start."""
        monkeypatch.setenv("ENGINE_CLIENT_TEST_WORD", "wörd")
        monkeypatch.chdir(tmp_path)
        heard = describe()
        assert heard["environment"] == "wörd"
        assert heard["cwd"] == str(tmp_path)

    def test_signals(self):
        """Signals that the launching thread blocks are not blocked in it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        try:
            heard = describe()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR1})
        assert heard["blocked"] == []

    def test_without_a_pidfd(self, monkeypatch):
        """Where there is no pidfd, the pipe that stands in for it is not passed on to grandchildren either."""
        monkeypatch.setattr(launcher, "has_pidfd", lambda: False)
        with started("obey") as child:
            child.hear()
            child.ask({"spawn": "group"})
            grandchild = child.hear()["pid"]
            # Its own output goes to a pipe of its parent.
            assert set(os.listdir(f"/proc/{grandchild}/fd")) == {"0", "1", "2"}

    @pytest.mark.timing
    def test_it_is_quick(self, tmp_path):
        """The entry is reached at most 30 ms later than an interpreter that does nothing has come and gone."""
        (tmp_path / "lean.py").write_text(
            "import os, time\ndef entry(fds, launcher_pid): os.write(fds.channel, str(time.monotonic()).encode())"
        )
        ours, bare = [], []
        for _ in range(15):
            ends = Ends()
            began = time.monotonic()
            handle = launch("exec", name="lean", fds=ends.fds, entry="lean:entry", path=[str(tmp_path)])
            ours.append(float(ends.channel.recv(100)) - began)
            Child(handle, ends).close()
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", "pass"], check=True)
            bare.append(time.monotonic() - began)
        assert min(ours) - min(bare) < 3 * 0.030 * SCALE  # generous: the machine is shared


class TestHosts:
    """Where a launcher may live."""

    @pytest.mark.parametrize("flags", [("-c",), ()], ids=["command", "standard input"])
    def test_no_file(self, flags):
        """A main module without a file needs none: python -c, and a script on standard input."""
        result = run_script(ASK if flags else None, *PATH, stdin=None if flags else ASK)
        assert result.check().stdout == "well\n"

    def test_interactive(self):
        """An interactive session can launch."""
        lines = [line for line in ASK.splitlines() if line and not line.startswith((" ", "with"))]
        call = "exec('''with helpers.launched.started(\"describe\") as child: print(child.hear()[\"cwd\"])''')"
        result = run_script(None, *PATH, stdin="\n".join([*lines[:-1], call, lines[-1], ""]), flags=("-i", "-q"))
        assert result.stdout == f"{os.getcwd()}\nwell\n", result.stderr

    def test_an_unguarded_script(self, tmp_path):
        """A script without a main guard starts one child, not one more in each child."""
        script = tmp_path / "script.py"
        script.write_text(f"print('started', flush=True)\n{ASK}")
        assert run_script(script, *PATH).check().stdout == "started\nwell\n"

    def test_a_zip_application(self, tmp_path):
        """The package may lie in a zip archive, which is run by a relative path from a directory that is left."""
        application = tmp_path / "application.zip"
        with zipfile.ZipFile(application, "w") as archive:
            archive.writestr("__main__.py", ASK.replace("with", "os.chdir('/')\nwith", 1))
            for file in PACKAGE.rglob("*.py"):
                archive.write(file, file.relative_to(PACKAGE.parent))
        result = run_script(Path(application.name), PATH[0], cwd=tmp_path, env={"PYTHONPATH": None, **UNMEASURED})
        assert result.check().stdout == "well\n"

    @pytest.mark.parametrize(
        "name",
        ["/".join(["lang" * 50] * 8), "日本語 ü'\"$", "not text \udcff", "new\nline", "a:b"],
        ids=["long", "non-ascii", "bytes", "newline", "colon"],
    )
    @pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}])
    def test_odd_directories(self, tmp_path, name, locale):
        """The package and the working directory may have any name."""
        directory = tmp_path / name
        directory.mkdir(parents=True)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(PACKAGE, directory / "engine_client", ignore=ignore)
        shutil.copytree(Path(PATH[0]) / "helpers", directory / "helpers", ignore=ignore)
        code = "import os, sys; sys.path[:0] = [os.getcwd()]\n" + ASK
        result = run_script(code, cwd=directory, env={"PYTHONPATH": None, **UNMEASURED, **locale})
        assert result.check().stdout == "well\n"

    def test_a_directory_that_was_removed(self, tmp_path):
        """The working directory may be gone."""
        (tmp_path / "gone").mkdir()
        # Not the usual entry: Python 3.13.0 itself can import little in such a place.
        (tmp_path / "lean.py").write_text("import os\ndef entry(fds, launcher_pid): os.write(fds.channel, b'well')")
        code = f"""
            import os
            from engine_client.ipc.launcher import launch
            from helpers.launched import Child, Ends
            ends = Ends()
            os.rmdir({str(tmp_path / "gone")!r})
            handle = launch("exec", name="x", fds=ends.fds, entry="lean:entry", path=[{str(tmp_path)!r}])
            print(ends.channel.recv(100).decode())
            Child(handle, ends).close()
            """
        assert run_script(code, cwd=tmp_path / "gone").check().stdout == "well\n"

    def test_modules_that_lie_in_the_way(self, tmp_path):
        """Files in the working directory, or beside the package, are not taken for the standard library's."""
        beside, working = tmp_path / "beside", tmp_path / "working"
        shutil.copytree(PACKAGE, beside / "engine_client", ignore=shutil.ignore_patterns("__pycache__"))
        working.mkdir()
        for name in ("typing", "signal", "threading", "select", "contextlib", "engine_client", "importlib"):
            (working / f"{name}.py").write_text("raise SystemExit('taken from the wrong place')")
            if name != "engine_client":
                (beside / f"{name}.py").write_text("raise SystemExit('taken from the wrong place')")
        script = tmp_path / "script.py"
        script.write_text(f"import sys; sys.path.append({str(beside)!r}); sys.path.append({PATH[0]!r})\n{ASK}")
        assert run_script(script, cwd=working, env={"PYTHONPATH": None, **UNMEASURED}).check().stdout == "well\n"

    def test_a_thread(self):
        """A thread may launch, while others import, log and launch (BC-11)."""
        children, errors = [], []

        def run() -> None:
            try:
                with started("describe") as child:
                    children.append(child.hear()["pid"])
            except Exception as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(set(children)) == 8

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_a_daemonic_process(self, method, tmp_path):
        """A daemonic multiprocessing process, which may have no children by that library, can launch."""
        script = tmp_path / "script.py"
        script.write_text(
            f"""
import multiprocessing
from helpers.launched import started

def run():
    with started("describe") as child:
        assert child.hear()
        child.handle.join()
        print(child.handle.exitcode, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=run, daemon=True)
    process.start()
    process.join()
"""
        )
        assert run_script(script).check().stdout == "0\n"

    def test_the_end_of_the_interpreter(self):
        """Even an exit hook may launch."""
        code = """
            import atexit
            from helpers.launched import started

            def run():
                with started("describe") as child:
                    print(child.hear()["launcher"] > 0)

            atexit.register(run)
            """
        assert run_script(code).check().stdout == "True\n"

    @pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
    def test_closed_standard_descriptors(self, tmp_path, closed):
        """Where the host has closed standard descriptors, the child has them on /dev/null, with streams."""
        report = tmp_path / "report"
        code = f"""
            import json, os
            from helpers.launched import started
            for fd in {closed}:
                os.close(fd)
            with started("describe") as child:
                heard = child.hear()
                child.handle.join(30)
            with open({str(report)!r}, "w") as file:
                json.dump([heard["fds"], heard["ours"], heard["streams"], child.handle.exitcode], file)
            os._exit(0)  # not by way of streams that are gone
            """
        run_script(code, env=UNMEASURED)
        fds, ours, streams, exitcode = json.loads(report.read_text())
        assert [fds[str(fd)] for fd in closed] == ["/dev/null"] * len(closed)
        assert set(fds) == {"0", "1", "2", *map(str, ours)}
        assert streams == [True, True, True]
        assert exitcode == 0


class TestFlags:
    """The child's interpreter has the flags of ours."""

    CHECK = """
import sys
sys.path[:0] = sys.argv[1:]
from helpers.launched import description, started
import os
with started("describe") as child:
    heard = child.hear()
ours = description((), 0)
for what in ("flags", "warnoptions", "xoptions"):
    assert heard[what] == ours[what], (what, heard[what], ours[what])
"""

    @pytest.mark.parametrize(
        "flags",
        [
            ("-O",),
            ("-OO", "-B"),
            ("-b",),
            ("-bb",),
            ("-E",),
            ("-s",),
            ("-I",),
            ("-S",),
            ("-q",),
            ("-W", "error"),
            ("-W", "ignore::DeprecationWarning", "-W", "default:some text:UserWarning", "-b"),
            ("-X", "dev"),
            ("-X", "dev", "-bb", "-W", "error::ResourceWarning"),
            ("-X", "utf8=0", "-X", "faulthandler", "-X", "pycache_prefix=/tmp/a=b", "-X", "a_word_of_the_users"),
            *([("-P",), ("-X", "int_max_str_digits=5000")] if sys.version_info >= (3, 11) else []),
        ],
        ids=" ".join,
    )
    def test_flags_are_passed_on(self, flags):
        """Optimisation, isolation, warning filters, -X options: all of it."""
        run_script(self.CHECK, *PATH, str(PACKAGE.parent), flags=flags).check(stderr=None)

    def test_flags_by_environment(self):
        """Flags that came by environment variables are not doubled into other ones."""
        env = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "error::UserWarning", "PYTHONOPTIMIZE": "1"}
        run_script(self.CHECK, *PATH, env=env, flags=()).check()

    def test_letters(self, monkeypatch):
        """Each flag that has a letter is passed on by it."""
        names = ["debug", "dont_write_bytecode", "optimize", "no_site", "verbose", "bytes_warning", "quiet"]
        names += ["isolated", "ignore_environment", "no_user_site", "safe_path"]

        class Flags:
            pass

        for name in names:
            setattr(Flags, name, 1)
        monkeypatch.setattr(launcher.sys, "flags", Flags)
        monkeypatch.setattr(launcher.sys, "warnoptions", ["error"])
        assert interpreter_flags()[:9] == ["-d", "-B", "-O", "-S", "-v", "-b", "-q", "-I", "-Werror"]
        Flags.isolated = 0
        assert interpreter_flags()[7:11] == ["-E", "-s", "-P", "-Werror"]


class TestFailure:
    """Starts that do not come about leave nothing behind; the leak guard looks."""

    def test_descriptors_that_are_standard(self, ends):
        """Descriptors below 3 are refused, since the child would take them for its streams."""
        with pytest.raises(ValueError, match="0 to 2"):
            launch("exec", name="x", fds=EngineFds(3, 4, 5, 2, 6, 7))

    @pytest.mark.parametrize("pidfd", [True, False])
    def test_no_interpreter(self, ends, monkeypatch, pidfd):
        """An interpreter that is not there is named."""
        monkeypatch.setattr(launcher, "has_pidfd", lambda: pidfd)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)
        with pytest.raises(StartupError, match="/nowhere/python") as caught:
            launch("exec", name="x", fds=ends.fds)
        assert isinstance(caught.value.__cause__, FileNotFoundError)

    def test_an_embedded_interpreter(self, ends, monkeypatch):
        """Where Python does not know its executable, that is said."""
        monkeypatch.setattr(sys, "executable", None)
        monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)
        with pytest.raises(StartupError, match=r"sys\.executable"):
            launch("exec", name="x", fds=ends.fds)

    def test_a_frozen_application(self, ends, monkeypatch):
        """A frozen application would run itself again: it is told what to use instead."""
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        with pytest.raises(StartupError, match="freeze_support"):
            launch("exec", name="x", fds=ends.fds)

    def test_the_executable_can_be_set(self, ends, monkeypatch):
        """What multiprocessing.set_executable was told is used here too."""
        spawn = pytest.importorskip("multiprocessing.spawn")
        monkeypatch.setattr(spawn, "get_executable", lambda: b"/nowhere/else")
        with pytest.raises(StartupError, match="/nowhere/else"):
            launch("exec", name="x", fds=ends.fds)

    def test_no_descriptor_left_for_the_handle(self, ends, monkeypatch):
        """A child that cannot be watched is killed and reaped at once."""

        def fail(*args, **kwargs):
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(launcher, "ChildHandle", fail)
        for pidfd in (True, False):
            monkeypatch.setattr(launcher, "has_pidfd", lambda pidfd=pidfd: pidfd)
            with pytest.raises(OSError, match="Too many"):
                launch("exec", name="x", fds=ends.fds, entry="helpers.launched:ignore_sigterm", path=PATH)
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, 0)

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_an_interrupt(self, ends, monkeypatch, moment):
        """An interrupt in the middle of a start kills what was started, and goes on to the caller."""
        real = subprocess.Popen.__init__

        def interrupted(self, *args, **kwargs):
            if moment == "after":
                real(self, *args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess.Popen, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch("exec", name="x", fds=ends.fds)
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, 0)

    def test_a_child_that_the_host_reaped_first(self, ends, monkeypatch):
        """A failed start copes with a host that reaps its children."""
        real = launcher.ChildHandle

        def fail(name, pid, **kwargs):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise MemoryError

        monkeypatch.setattr(launcher, "ChildHandle", fail)
        with pytest.raises(MemoryError):
            launch("exec", name="x", fds=ends.fds)
        assert real is not fail

    def test_while_the_main_file_is_imported(self, ends, monkeypatch):
        """A multiprocessing child that is still importing the main file must not start engines (BC-05)."""
        import multiprocessing

        monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
        with pytest.raises(StartupError, match="__main__"):
            launch("exec", name="x", fds=ends.fds)


def test_a_hundred_starts_with_warnings_as_errors():
    """Starts in a row leave nothing behind and warn of nothing, however the children end."""
    for number in range(20):
        child = start("obey" if number % 2 else "describe")
        child.close()
