"""``engine-client top`` shows engines of other processes as they are, and leaves them alone."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest

import engine_client
from engine_client import EngineConfig, EngineCoreClient, ParallelConfig, RunningEngine, running_engines
from engine_client.cli import top
from engine_client.cli.main import main
from engine_client.ipc.counters import Reading
from engine_client.ipc.status_page import EngineStatus
from helpers.clients import make_request
from helpers.engines import Recording
from helpers.procs import run_script

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make(ranks: int = 1):
    config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=ranks))
    return EngineCoreClient.make_client(True, ranks > 1, config, Recording, False)


def test_engines_of_another_process_are_shown() -> None:
    """The command, in a process of its own, shows each rank; a pid picks a client."""
    with make(ranks=2):
        command = "import sys; from engine_client.cli.main import main; sys.exit(main())"
        result = run_script(command, "top", str(os.getpid())).check()
        header, *rows = [re.split(r"  +", line.strip()) for line in result.stdout.splitlines()]
        pids = [engine.pid for engine in running_engines(os.getpid())]
    assert header[:4] == ["RANK", "PID", "CLIENT", "STATE"]
    assert [row[:6] for row in rows] == [
        [str(rank), str(pid), str(os.getpid()), "ready", "0", "0"] for rank, pid in enumerate(pids)
    ]


def test_what_an_engine_does_is_told_by_rates() -> None:
    """Tokens, prompt tokens and steps are told per second between two looks; of the first there are none."""
    rates = top.Rates()
    with make() as client:
        [first] = running_engines(os.getpid())
        assert rates.of(first) is None
        client.add_request(make_request("a", 4, [1, 2, 3]))
        finished = False
        while not finished:
            finished = any(output.finished for output in client.get_output().outputs)
        [second] = running_engines(os.getpid())
        tokens, prompt, steps = rates.of(second)
        assert tokens == pytest.approx(prompt * 4 / 3)
        assert steps == pytest.approx(tokens)
        assert top.table([second], top.Rates())[1].count("-") == 3


def test_on_a_terminal_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the table is drawn over itself until Ctrl-C, which is no error."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    with make():
        monkeypatch.setattr(top.time, "sleep", sleep)
        assert main(["top", "--interval", "0.01", str(os.getpid())]) == 0
        monkeypatch.undo()
    assert screen.getvalue().count("\x1b[H") == 3
    assert screen.getvalue().count("RANK") == 3


def running(rank: int, condition: str) -> RunningEngine:
    """Return an engine that has been at it for long, and whose cells are as wide as they come."""
    status = EngineStatus(rank=rank, condition=condition, waiting=1024, running=256)
    return RunningEngine(status, Reading(kv_usage=1.0), 4_194_303, 4_194_302, 512 << 30, 250 * 3600.0)


@pytest.mark.parametrize("condition", ["ready", "in a step for 3600 s"])
def test_80_columns_are_enough_for_what_matters(monkeypatch: pytest.MonkeyPatch, condition: str) -> None:
    """Where not all fits, the least important columns are left out and none is cut."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(engine_client, "running_engines", lambda pid: [running(rank, condition) for rank in (0, 1)])
    assert main(["top", "-n", "1"]) == 0
    monkeypatch.undo()
    header, *rows, _ = screen.getvalue().removeprefix("\x1b[H").split("\x1b[K\n")
    names, cells = header.split(), [re.split("  +", row.strip()) for row in rows]
    assert [name for name in ("RANK", "CLIENT") if name in names] == (
        ["RANK", "CLIENT"] if condition == "ready" else ["RANK"]
    )
    shown = {"PID": "4194303", "STATE": condition, "WAIT": "1024", "RUN": "256", "TOK/S": "-"}
    shown |= {"MEMORY": "524,288 MiB", "UP": "250:00:00"}
    for row in cells:
        assert shown.items() <= dict(zip(names, row, strict=True)).items()
    assert max(map(len, [header, *rows])) <= 79


def test_a_wide_terminal_and_a_pipe_get_everything() -> None:
    """Columns are left out one by one, and only where there is no room."""
    engines = [running(0, "ready")]
    everything = top.table(engines, top.Rates())
    width = len(everything[0])
    assert top.table(engines, top.Rates(), width) == everything
    shown = [[*top.table(engines, top.Rates(), size)[0].split()] for size in (width - 1, width - 11, 0)]
    short = ["RANK", "PID", "CLIENT", "STATE", "WAIT", "RUN", "TOK/S", "PROMPT/S", "STEPS/S", "KV%", "MEMORY", "UP"]
    assert shown[:2] == [short, [name for name in short if name != "STEPS/S"]]
    assert shown[2] == ["PID", "STATE", "WAIT", "RUN", "TOK/S", "MEMORY", "UP"]


def test_without_an_engine_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """No engine is one line and status 1; so is a process that is not there, or an interval that cannot be."""
    assert main(["top", str(os.getpid())]) == 1
    assert "no engine" in capsys.readouterr().out
    assert main(["top", str(2**22 + 1)]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main(["top", "--interval", "0"]) == 1
    assert "--interval" in capsys.readouterr().err
