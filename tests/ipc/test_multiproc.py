"""multiprocessing's start methods: the same child, with the limits of the library (BC-05, BC-11, BC-47, BC-61)."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from engine_client.deadline import Deadline
from engine_client.errors import StartupError
from engine_client.ipc import multiproc
from engine_client.ipc.process_group import ProcessGroup
from helpers.launched import PATH, start, started
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually, took_at_most

METHODS = ["spawn", "fork", "forkserver"]

# For scripts that measuring would disturb.
UNMEASURED = {"COVERAGE_PROCESS_CONFIG": None, "COVERAGE_PROCESS_START": None}

every_method = pytest.mark.parametrize("method", METHODS)

# A script that starts a child in the way argv says.
ASK = """
import os, sys
from helpers.launched import description, started

def main():
    with started("describe", sys.argv[1]) as child:
        heard = child.hear()
        child.handle.join(30)
        assert child.handle.exitcode == 0, child.handle
    print("well", flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@every_method
def test_the_child_is_as_with_exec(method, monkeypatch, tmp_path):
    """It leads a session and a group, knows our pid, environment and directory, and keeps its descriptors to itself."""
    with started("describe", method):
        pass  # the fork server runs now, with the environment and the directory of before
    monkeypatch.setenv("ENGINE_CLIENT_TEST_WORD", "later")
    monkeypatch.chdir(tmp_path)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        with started("describe", method) as child:
            heard = child.hear()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert heard["launcher"] == os.getpid()
    assert heard["pid"] == heard["session"] == heard["group"]
    assert heard["environment"] == "later"
    assert heard["cwd"] == str(tmp_path)
    assert heard["path"][0] == PATH[0]
    assert heard["blocked"] == []
    assert not any(heard["inheritable"])
    assert min(heard["ours"]) > 2
    assert heard["streams"] == [True, True, True]


@every_method
@pytest.mark.parametrize("pidfd", [True, False])
@pytest.mark.parametrize(
    ("order", "code"), [({"return": 1}, 0), ({"exit": 3}, 3), ({"signal": 11}, -11), ({"exit": 255}, 255)]
)
def test_exit_codes(method, pidfd, order, code, monkeypatch):
    """Exit codes are those of multiprocessing; where the fork server's 255 may mean anything, it is unknown."""
    monkeypatch.setattr(multiproc, "has_pidfd", lambda: pidfd)
    with started("obey", method) as child:
        assert child.hear() == {"pid": child.handle.pid}
        assert child.handle.is_alive()
        assert child.handle.is_prompt == pidfd
        child.handle.join(0.01)
        assert child.handle.exitcode is None
        child.ask(order)
        child.handle.join(DEADLOCK)
        assert not child.handle.is_alive()
        unknown = code == 255 and method == "forkserver"
        assert child.handle.exitcode == (None if unknown else code)
        assert child.handle.exit_known != unknown
        child.handle.reap()
        child.handle.reap()
        assert child.handle.is_reaped
    assert child.handle.exit_known != unknown
    assert "rank 0" in repr(child.handle)


@every_method
def test_signals(method):
    """Signals reach the child."""
    with started("ignore_sigterm", method) as child:
        child.hear()
        child.handle.terminate()
        child.handle.join(0.05)
        assert child.handle.is_alive()
        child.handle.kill()
        child.handle.join(DEADLOCK)
        assert child.handle.exitcode == -signal.SIGKILL


@every_method
def test_it_ends_in_a_group(method):
    """A process group ends such a child with what is below it."""
    child = start("obey", method)
    group = ProcessGroup()
    group.add(0, child.handle)
    child.hear()
    child.ask({"fork": "group"})
    grandchild = child.hear()["pid"]
    with took_at_most(2):
        assert group.shutdown(Deadline(5), lambda: child.ends.channel.shutdown(2)) == {0: "asked"}
    assert not is_running(grandchild)
    assert child.handle not in multiprocessing.active_children()
    child.close()
    group.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing_reaps_it(method):
    """When the host's use of multiprocessing reaps our child, the exit code is known all the same."""
    with started("obey", method) as child:
        child.hear()
        child.ask({"exit": 3})
        os.waitid(os.P_PID, child.handle.pid, os.WEXITED | os.WNOWAIT)
        assert multiprocessing.active_children() == []
        assert child.handle.exitcode == 3
        assert child.handle.is_reaped


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_host_reaps_it(method):
    """When the host itself reaps our child, the exit code is unknown."""
    with started("obey", method) as child:
        child.hear()
        child.ask({"exit": 3})
        os.waitpid(child.handle.pid, 0)
        assert not child.handle.is_alive()
        assert child.handle.exitcode is None
        child.handle.reap()


@pytest.mark.crash
def test_the_fork_server_may_end():
    """A healthy child of the fork server goes on when that is stopped; then its exit code is unknown (BC-61)."""
    with started("obey", "forkserver") as child:
        child.hear()
        server = Path(f"/proc/{child.handle.pid}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(server), signal.SIGKILL)
        eventually(lambda: not is_running(int(server)), DEADLOCK)  # multiprocessing reaps it when it starts another
        time.sleep(0.1)
        assert child.handle.is_alive()
        child.ask({"fork": "group"})
        assert child.hear()["pid"]
        child.ask({"exit": 3})
        child.handle.join(DEADLOCK)
        assert not child.handle.is_alive()
        assert child.handle.exitcode is None


@pytest.mark.crash
@every_method
def test_the_end_of_the_launcher(method, tmp_path):
    """The child follows the launcher, also where its parent is the fork server (BC-61)."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal
from helpers.launched import start

if __name__ == "__main__":
    child = start("armed", {method!r})
    assert child.hear()
    print(child.handle.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with tempfile.TemporaryDirectory() as directory:  # where a killed fork server leaves its socket
        result = run_script(script, flags=(), env={"TMPDIR": directory})
    result.check(-signal.SIGKILL)
    eventually(lambda: not is_running(int(result.stdout)), 5)


class TestHosts:
    """Where a launcher may live."""

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    @pytest.mark.parametrize("flags", [("-c",), ()], ids=["command", "standard input"])
    def test_no_file(self, method, flags):
        """A main module that is no file is not looked for in the child (BC-05)."""
        code = ASK + "\nmain()\nprint(__file__)" * (not flags) + "\nmain()" * bool(flags)
        result = run_script(code if flags else None, method, stdin=None if flags else code)
        assert result.check().stdout == "well\n" + "<stdin>\n" * (not flags)

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_an_unguarded_script(self, method, tmp_path):
        """A script without a main guard starts one child, which ends before it is one, and no more (BC-05)."""
        script = tmp_path / "script.py"
        code = ASK.replace("heard = child.hear()", "assert child.hear() is None; child.handle.join(30)")
        script.write_text(code.replace("exitcode == 0", "exitcode == 1") + "\nprint('run', flush=True); main()")
        with took_at_most(10):
            result = run_script(script, method)
        assert result.returncode == 0, result.stderr
        assert sorted(result.stdout.split()) == ["run", "run", "well"]
        assert 'if __name__ == "__main__"' in result.stderr

    @pytest.mark.parametrize("method", METHODS)
    def test_a_daemonic_process(self, method):
        """A daemonic process may have no children by multiprocessing: an error says so, and what may work."""
        code = f"""
            import multiprocessing
            from helpers.launched import start

            def run():
                try:
                    start("describe", {method!r})
                except RuntimeError as error:
                    print(error, flush=True)

            process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
            process.start()
            process.join()
            """
        result = run_script(code).check()
        assert "daemonic" in result.stdout
        assert "default start method" in result.stdout

    @pytest.mark.parametrize("default", METHODS)
    def test_the_default_context(self, default):
        """The host's default start method, whichever, is neither used nor changed (BC-47)."""
        code = f"""
            import multiprocessing
            multiprocessing.set_start_method({default!r})
            {ASK.replace(chr(10), chr(10) + " " * 12)}
            for method in ("exec", "spawn", "fork"):
                sys.argv[1:] = [method]
                main()
            assert multiprocessing.get_start_method() == {default!r}
            """
        assert run_script(code).check().stdout == "well\n" * 3

    def test_closed_standard_descriptors(self, tmp_path):
        """Where the fork server gets descriptors below 3, the child has moved them."""
        report = tmp_path / "report"
        code = f"""
            import json, os
            from helpers.launched import started
            for fd in range(3):
                os.close(fd)
            heard = []
            for method in ("forkserver", "spawn", "fork"):
                with started("describe", method) as child:
                    heard.append(child.hear())
                    child.handle.join(30)
            with open({str(report)!r}, "w") as file:
                json.dump(heard, file)
            os._exit(0)
            """
        run_script(code, env=UNMEASURED)
        for heard in json.loads(report.read_text()):
            assert min(heard["ours"]) > 2
            assert {"0", "1", "2"} <= set(heard["fds"])


class TestFork:
    """What only a forked child has."""

    def test_our_ends_are_closed(self):
        """A forked child does not hold our ends, so that the end of the launcher reaches it."""
        with started("describe", "fork") as child:
            held = {os.readlink(f"/proc/self/fd/{fd}") for fd in child.ends.parent_fds()}
            heard = child.hear()
        pipes = [target for target in heard["fds"].values() if target in held]
        assert len(pipes) == 1  # the lifeline is one pipe, of which it has the read end; the channel is two sockets

    def test_a_number_that_was_used_again_is_not_closed(self, tmp_path):
        """A descriptor that a fork hook has closed is not closed again when its number means another file."""
        code = f"""
            import os
            from helpers import launched
            kept = []

            def hook():
                number = child_ends[0].lifeline
                os.close(number)
                os.dup2(os.open({str(tmp_path)!r}, os.O_RDONLY), number)
                kept.append(number)

            child_ends = []
            real = launched.Ends
            launched.Ends = lambda: child_ends.append(real()) or child_ends[0]
            os.register_at_fork(after_in_child=hook)
            with launched.started("describe", "fork") as child:
                heard = child.hear()
                assert heard["fds"][str(child.ends.lifeline)] == {str(tmp_path)!r}, heard["fds"]
            """
        run_script(code).check()

    @pytest.mark.filterwarnings(
        "ignore:This process .* is multi-threaded:DeprecationWarning"
    )  # Python's own, since 3.12
    def test_threads_are_warned_of(self):
        """Fork in a process with threads warns before it forks (BC-11)."""
        ended = threading.Event()
        thread = threading.Thread(target=ended.wait)
        thread.start()
        try:
            with pytest.raises(RuntimeWarning, match="other threads"):
                start("describe", "fork")
            with pytest.warns(RuntimeWarning, match="other threads") as warned, started("describe", "fork") as child:
                child.hear()
            assert warned[0].filename.endswith("launched.py")  # what calls into this package
        finally:
            ended.set()
            thread.join()

    def test_a_temporary_directory_with_a_long_path(self, tmp_path):
        """The fork server gets a socket wherever temporary files are, and nothing stays there or in /tmp."""
        directory = tmp_path / ("x" * 200)
        directory.mkdir()
        end = "from multiprocessing import util\n    print(util.get_temp_dir(), flush=True)"
        script = tmp_path / "script.py"
        script.write_text(f"{ASK}\nif __name__ == '__main__':\n    main()\n    {end}\n")
        told, used = run_script(script, "forkserver", env={"TMPDIR": str(directory)}).check().stdout.split()
        assert told == "well"
        assert Path(used).parent == Path("/tmp")
        assert not Path(used).exists()
        assert os.listdir(directory) == []


class TestFailure:
    """Starts that do not come about leave nothing behind."""

    @every_method
    def test_no_handle(self, method, monkeypatch):
        """A child that cannot be watched is killed."""

        class Failing(multiproc.MultiprocessingHandle):
            def __init__(self, process, **options):
                raise KeyboardInterrupt

        monkeypatch.setattr(multiproc, "MultiprocessingHandle", Failing)
        with pytest.raises(KeyboardInterrupt):
            start("ignore_sigterm", method)
        assert multiprocessing.active_children() == []

    def test_no_process(self, monkeypatch):
        """A process that the system refuses is a failed start."""

        def refuse(*args):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse)
        with pytest.raises(StartupError, match="temporarily unavailable"):
            start("describe", "spawn")


def test_before_the_exit_of_multiprocessing():
    """What is registered runs before multiprocessing joins its children, which would wait for ever (BC-42)."""
    code = """
        from engine_client.ipc.multiproc import before_multiprocessing_exit
        from helpers.launched import start
        import multiprocessing

        child = start("obey", "fork")
        child.hear()

        def end():
            print("ended", flush=True)
            child.close()

        before_multiprocessing_exit(end)
        before_multiprocessing_exit(lambda: print("not this"))()
        """
    with took_at_most(10):
        assert run_script(code).check().stdout == "ended\n"


def test_a_removed_directory(tmp_path, monkeypatch):
    """Where the working directory is gone, multiprocessing cannot start anything; the error says what can."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(StartupError, match="default start method"):
        start("describe", "spawn")


def test_imports():
    """multiprocessing is loaded for its start methods only."""
    code = """
        import sys
        from helpers.launched import started
        with started("describe") as child:
            child.hear()
        assert "multiprocessing" not in sys.modules
        """
    run_script(code, env=UNMEASURED).check()
