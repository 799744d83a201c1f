"""``engine-client bench``: from arguments to table, files, and exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_client.bench import plot, rounds
from engine_client.bench.results import Measured, Results
from engine_client.cli.main import main


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Measured]:
    """Take the place of all measuring: the figures that are returned, for the test to fill in."""
    found: dict[str, Measured] = {}
    peer = {"label": "vllm", "vllm": "0.25.1"}
    monkeypatch.setattr(rounds, "measure", lambda *args, **options: Results(peer=peer, workloads=found))
    return found


def test_table_is_printed(figures: dict[str, Measured], capsys: pytest.CaptureFixture[str]):
    """The table goes to stdout, and nothing is judged unless asked for."""
    figures["utility"] = Measured([{"p50_us": 90.0}], [{"p50_us": 100.0}])
    assert main(["bench", "utility"]) == 0
    shown = capsys.readouterr().out
    assert "0.90" in shown
    assert "MISSED" not in shown


@pytest.mark.parametrize(("ours", "status"), [(30.0, 0), (40.0, 1)])
def test_check(ours: float, status: int, figures: dict[str, Measured], capsys: pytest.CaptureFixture[str]):
    """--check fails when a target is missed, and names it; it lists what is met, too."""
    figures["utility"] = Measured([{"p50_us": ours}], [{"p50_us": 100.0}])
    figures["death"] = Measured([{"ms": 5.0}])
    assert main(["bench", "--check"]) == status
    shown = capsys.readouterr().out
    assert ("MISSED  utility p50_us ≤ 0.33 of vLLM's: is 0.4" in shown) == bool(status)
    assert "met     death ms ≤ 20: is 5" in shown


@pytest.mark.usefixtures("figures")
def test_check_of_nothing(capsys: pytest.CaptureFixture[str]):
    """A check without any target is no success."""
    assert main(["bench", "--check"]) == 1
    assert "no target applies" in capsys.readouterr().err


def test_failure_of_a_workload(figures: dict[str, Measured]):
    """A workload that failed fails the command, checked or not."""
    figures["utility"] = Measured([{}], [], ["it broke"])
    assert main(["bench"]) == 1


def test_files(figures: dict[str, Measured], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """--json writes what --from shows again."""
    figures["utility"] = Measured([{"p50_us": 90.0}], [{"p50_us": 100.0}])
    path = tmp_path / "bench.json"
    assert main(["bench", "--json", str(path)]) == 0
    first = capsys.readouterr().out
    figures.clear()
    assert main(["bench", "--from", str(path)]) == 0
    assert capsys.readouterr().out == first


def test_plot(figures: dict[str, Measured], monkeypatch: pytest.MonkeyPatch):
    """--plot draws what was measured, once there is a matplotlib to draw with."""
    figures["utility"] = Measured([{"p50_us": 90.0}])
    drawn: list[tuple[Results, str]] = []
    monkeypatch.setattr(plot, "check", lambda path: None)
    monkeypatch.setattr(plot, "draw", lambda results, path: drawn.append((results, path)))
    assert main(["bench", "--plot", "bench.svg"]) == 0
    assert [(results.workloads, path) for results, path in drawn] == [(figures, "bench.svg")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "there is no workload 'nonsense'; there are floor, utility, "),
        (["--plot", "x.gif"], "--plot draws FILE.svg or FILE.png, not x.gif"),
        (["--from", "/no/file"], "/no/file: No such file or directory"),
        (["utility", "--peer", "/no/python"], "vllm: /no/python: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]):
    """What cannot work is one readable line."""
    assert main(["bench", *arguments]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"engine-client: error: {line}")


def test_rounds_are_positive(capsys: pytest.CaptureFixture[str]):
    """No round at all is wrong usage."""
    with pytest.raises(SystemExit):
        main(["bench", "--rounds", "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_real_run(capsys: pytest.CaptureFixture[str]):
    """A first look at one workload, all the way."""
    assert main(["bench", "utility", "--quick", "--rounds", "1"]) == 0
    captured = capsys.readouterr()
    assert "| utility  | p50, µs" in captured.out
    assert "utility" in captured.err
