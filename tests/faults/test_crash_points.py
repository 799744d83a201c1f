"""At every step of the protocol, on either side, something goes wrong: everybody learns of it in time, nothing is left.

The places and the faults stand in ``helpers.crash_points``.  Each test lives the life of a client in which the place
comes: a start, some of everything, perhaps ranks that join or leave or step together, an end.  A place that is never
reached fails its test.  The default run has a pairwise subset, ``stress`` all faults at all places for all clients.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine_client.protocol.frames import Kind
from engine_client.testing.inventory import describe_process, key_of
from helpers.crash_lives import KINDS, Life, kinds_of
from helpers.crash_points import POINTS, UNREACHED, Point, armed, environment_of, faults_at
from helpers.procs import run_script
from helpers.timing import DEADLOCK, eventually

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


Case = tuple[Point, str, str]


def pairs_of(case: Case) -> set[tuple[str, str]]:
    """Return what a case has two by two of: the phase, the side, the fault, the kind of client."""
    point, fault, kind = case
    return set(combinations((point.phase, point.side, fault, kind), 2))


def cases() -> list[Any]:
    """Return every fault at every point for every kind of client; a few that have all pairs are for the default run."""
    every: list[Case] = [(p, fault, kind) for p in POINTS for fault in faults_at(p) for kind in kinds_of(p)]
    left = set().union(*map(pairs_of, every))
    some: set[Case] = set()
    Random(1).shuffle(every)
    while left:
        best = max(every, key=lambda case: len(pairs_of(case) & left))
        some.add(best)
        left -= pairs_of(best)
    return [
        pytest.param(
            *(point, fault, kind),
            marks=[] if (point, fault, kind) in some else [pytest.mark.stress],
            id=f"{point.phase}-{point.name}-{fault}-{kind}",
        )
        for point, fault, kind in sorted(every)
    ]


def meet(point: Point, fault: str, kind: str, told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live a life with a fault in it, in this process or in an engine, and check it."""
    life = Life(kind, point, fault, told)
    if point.side == "engine":
        environment = environment_of(point.name, fault, told)
        life.live(lambda: [monkeypatch.setenv(*item) for item in environment.items()])
    else:
        with armed(point.name, fault, told):
            life.live()


@pytest.mark.parametrize(("point", "fault", "kind"), cases())
def test_a_fault_at_a_step(
    point: Point, fault: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits ends in time with the right error or what was asked for, and so does whoever comes later."""
    told = tmp_path / "told"
    if point.side == "client" and fault in ("kill", "stop"):
        meet_in_a_script(point, fault, kind, told)
    else:
        meet(point, fault, kind, told, monkeypatch)
    assert told.exists(), "the point was never reached"


def meet_in_a_script(point: Point, fault: str, kind: str, told: Path) -> None:
    """Have a host of its own killed, or stopped for a while, at a point: nothing is left, or all goes on."""

    def go_on(process: Any) -> None:
        if fault == "stop":
            key = key_of(process.pid)
            eventually(lambda: "state T" in describe_process(key) or process.poll() is not None, DEADLOCK)
            time.sleep(0.3)
            os.kill(process.pid, signal.SIGCONT)

    source = f"""
        from helpers.crash_lives import live_in_a_script
        live_in_a_script({tuple(point)!r}, {fault!r}, {kind!r}, {str(told)!r})
    """
    run_script(source, started=go_on, timeout=2 * DEADLOCK).check(-9 if fault == "kill" else 0)


def test_every_kind_of_frame_has_its_points() -> None:
    """The table has both sides of every kind of frame, or says why not."""
    names = {point.name for point in POINTS}
    for kind in Kind:
        stages = [f"send.{kind.name}.{stage}" for stage in ("before", "mid", "after") if (kind, stage) not in UNREACHED]
        stages += [f"receive.{kind.name}.{stage}" for stage in ("before", "after")]
        assert (set(stages) <= names) is (kind not in UNREACHED), kind
    assert len({(point.name, point.phase) for point in POINTS}) == len(POINTS)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.stress] if kind in ("async", "dp") else []) for kind in KINDS]
)
def test_nothing_is_reached_that_is_not_in_the_table(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole life without a fault passes points of the table alone, and all that are part of such a life."""
    told = tmp_path / "told"
    phase = {"lb": "leave", "lock-step": "wave"}.get(kind, "serve")
    life = Life(kind, Point("*", "engine", phase), "delay", told)
    with armed("*", "delay", told):
        life.live(lambda: [monkeypatch.setenv(*item) for item in environment_of("*", "delay", told).items()])
    reached = set(told.read_text().split())
    assert reached <= {point.name for point in POINTS}
    expected = {point.name for point in POINTS if point.phase in ("start", "serve", "end", phase)}
    assert expected - reached == set()
    assert threading.active_count() < 20
