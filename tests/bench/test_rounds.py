"""The benchmark as a whole: both sides in turn, what fails, and what a first look at it yields."""

from __future__ import annotations

import pytest

from engine_client.bench import rounds, sides
from engine_client.bench.sides import SideError
from engine_client.bench.workloads import WORKLOADS, Workload


class FakeSide:
    """Notes what it is told."""

    def __init__(self, label: str, log: list[str]) -> None:
        self.label = label
        self.about = {"version": "1"}
        self._log = log

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self._log.append(f"{self.label} ends")

    def run(self, workload: Workload, parameters: dict) -> dict:
        self._log.append(f"{self.label} {workload.name}")
        if workload.name == "ingest":
            raise SideError("it broke")
        note = "get_output() had not returned" if workload.name == "death" and self.label == "vllm" else "died"
        return {"p50_us": 1.0, **parameters, "note": note}

    def close(self) -> None:
        self._log.append(f"{self.label} is closed")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(sides, "ours", lambda: FakeSide("engine_client", log))
    monkeypatch.setattr(sides, "peer", lambda which: FakeSide("vllm", log))
    return log


def measure(*names: str, **options):
    return rounds.measure([WORKLOADS[name] for name in names], **options)


def test_sides_take_turns(log: list[str]):
    """Each workload runs on one side, then on the other, as often as there are rounds."""
    results = measure("utility", "first_token", peer="python", rounds=2)
    turns = ["engine_client utility", "vllm utility"] * 2 + ["engine_client first_token", "vllm first_token"] * 2
    assert log[:-2] == turns
    assert results.peer == {"label": "vllm", "version": "1"}
    assert [len(m.peer) for m in results.workloads.values()] == [2, 2]


def test_what_peers_cannot_do(log: list[str]):
    """What only this library has runs there alone; a peer dies once, and begins anew if it never noticed."""
    measure("allocated", "death", peer="python", rounds=2)
    assert log[:2] == ["engine_client allocated"] * 2
    assert log[2:6] == ["engine_client death", "vllm death", "vllm is closed", "engine_client death"]


def test_failure_keeps_its_place(log: list[str]):
    """A failure is noted and the rest runs; runs that failed stay in the count, so that pairs stay pairs."""
    results = measure("ingest", "utility", rounds=2)
    assert results.workloads["ingest"].errors == ["it broke", "it broke"]
    assert results.workloads["ingest"].ours == [{}, {}]
    assert len(results.workloads["utility"].ours) == 2


def test_quick_has_fewer_repetitions(log: list[str]):
    """A first look takes the workload's own smaller numbers, and progress tells each step."""
    steps: list[tuple[str, int, int]] = []
    results = measure("utility", rounds=1, quick=True, progress=lambda *step: steps.append(step))
    assert results.workloads["utility"].ours[0]["times"] == WORKLOADS["utility"].quick["times"]
    assert steps == [("starting", 0, 1), ("utility engine_client", 0, 1), ("done", 1, 1)]


def test_real_run():
    """A real first look, in both colours, yields figures of both sides and tells where it ran."""
    names = ("stream_64", "async_stream_256")
    results = measure(*names, peer="zmq", rounds=1, quick=True)
    for name in names:
        measured = results.workloads[name]
        assert measured.errors == []
        assert measured.ratio("tokens_per_s") is not None
    assert {"cpus", "python"} <= set(results.machine)
    assert results.date.endswith("Z")
