"""The command as a whole: arguments, exit statuses, and errors as one readable line."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys

import pytest

from engine_client import __version__
from engine_client.bench.life import cpu_of
from engine_client.cli import generate
from engine_client.cli.main import main
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually

MAIN = "import sys; from engine_client.cli.main import main; sys.exit(main())"


def failing(error: BaseException):
    def run(arguments: object) -> int:
        raise error

    return run


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]):
    """--version prints name and version."""
    with pytest.raises(SystemExit) as exit_status:
        main(["--version"])
    assert exit_status.value.code == 0
    assert capsys.readouterr().out == f"engine-client {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "--help"]])
def test_help_is_there(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    """Every command explains itself."""
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 0
    assert "usage: engine-client" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: COMMAND (see engine-client --help)"),
        (["sing"], "invalid choice: 'sing'"),
        (["generate", "--max-tokens", "many", "x"], "invalid int value: 'many' (see engine-client generate --help)"),
        (["generate", "--mode", "fast", "x"], "invalid choice: 'fast'"),
        (["generate", "--no-such", "x"], "unrecognized arguments: --no-such"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    """Wrong usage is one line on stderr and status 2."""
    with pytest.raises(SystemExit) as exit_status:
        main(arguments)
    assert exit_status.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("engine-client: error: ")
    assert captured.err.count("\n") == 1
    assert text in captured.err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("no such thing"), "no such thing"),
        (RuntimeError("it failed: KeyError: 'a'\nTraceback of the engine:\n  File …"), "it failed: KeyError: 'a'"),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), "a.txt: No such file or directory"),
        (FileNotFoundError(2, "No such file or directory", b"a.txt"), "a.txt: No such file or directory"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_error_is_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """An error is one readable line on stderr and status 1; -v, wherever it stands, shows the traceback too."""
    monkeypatch.setattr(generate, "run", failing(error))
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == f"engine-client: error: {line}\n"
    for arguments in (["-v", "generate", "x"], ["generate", "x", "--verbose"]):
        monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
        assert main(arguments) == 1
        text = capsys.readouterr().err
        assert text.startswith("Traceback")
        assert text.endswith(f"engine-client: error: {line}\n")


def test_verbose_shows_the_log(monkeypatch: pytest.MonkeyPatch):
    """With -v logging is configured; without it the library's warnings have somewhere silent to go."""
    options: list[dict[str, object]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: options.append(given))
    monkeypatch.setattr(logging.getLogger("engine_client"), "handlers", [])
    monkeypatch.setattr(generate, "run", lambda arguments: 0)
    assert main(["generate", "x"]) == 0
    assert main(["generate", "x"]) == 0
    assert options == []
    assert [type(handler) for handler in logging.getLogger("engine_client").handlers] == [logging.NullHandler]
    assert main(["generate", "x", "-v"]) == 0
    assert options[0]["level"] == logging.INFO


def test_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C is status 130, without a word."""
    monkeypatch.setattr(generate, "run", failing(KeyboardInterrupt()))
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr() == ("", "")


def test_closed_pipe_ends_quietly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A reader that is gone is status 141, without a word, even where stdout has no descriptor."""
    monkeypatch.setattr(generate, "run", failing(BrokenPipeError()))
    assert main(["generate", "x"]) == 141
    assert capsys.readouterr() == ("", "")

    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert main(["generate", "x"]) == 141


def test_errors_that_nobody_reads_are_dropped(monkeypatch: pytest.MonkeyPatch):
    """If stderr is closed as well, the status is all there is."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(generate, "run", failing(ValueError("unread")))
    monkeypatch.setattr(sys, "stderr", Closed())
    assert main(["generate", "x"]) == 1


@pytest.fixture
def corpus(tmp_path) -> str:
    file = tmp_path / "corpus.txt"
    file.write_text("the cat sat on the mat. " * 20)
    return str(file)


@pytest.mark.parametrize("mode", ["mp", "inproc"])
def test_reader_that_leaves_early(mode: str, corpus: str):
    """When the reader of the output is gone (``| head``), the command ends and nobody complains."""
    reader, writer = os.pipe()
    os.close(reader)
    result = run_script(MAIN, "generate", "--mode", mode, "--corpus", corpus, "the", "mat", stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr, result.left) == (141, "", [])


@pytest.mark.parametrize("mode", ["mp", "inproc"])
def test_full_disk_is_an_error(mode: str, corpus: str):
    """What cannot be written is an error of one line, not an exception ignored at the end."""
    with open("/dev/full", "w") as full:
        result = run_script(MAIN, "generate", "--mode", mode, "--corpus", corpus, "the", stdout=full)
    assert (result.returncode, result.stderr) == (1, "engine-client: error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_do_no_harm(closed: tuple[int, ...], corpus: str):
    """The command works in a process that was started without some or all of the standard streams."""

    def close() -> None:
        for fd in closed:
            os.close(fd)

    result = run_script(MAIN, "generate", "--corpus", corpus, "-n", "4", "the cat", preexec_fn=close)
    result.check()
    assert result.stdout == ("" if 1 in closed else "the cat sat\n")


@pytest.mark.parametrize("mode", ["mp", "inproc"])
def test_ctrl_c_in_the_terminal(mode: str, corpus: str):
    """SIGINT to the whole process group, as a terminal sends it, ends everything: status 130, nothing said or left."""

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        eventually(lambda: cpu_of(process.pid) > 1.0, DEADLOCK)  # it has started, and generates
        os.killpg(process.pid, signal.SIGINT)

    arguments = ["generate", "--mode", mode, "--corpus", corpus, "--ignore-eos", "-n", "10000000", "the"]
    result = run_script(MAIN, *arguments, started=interrupt)
    result.check(returncode=130)
    assert result.elapsed < 10


def test_module_is_the_command():
    """``python -m engine_client`` is the command; importing the module does nothing."""
    result = run_script("import engine_client.__main__").check()
    assert result.stdout == ""
    result = run_script(None, flags=("-W", "error", "-m", "engine_client", "--help"), stdin="").check()
    assert result.stdout.startswith("usage: engine-client")
