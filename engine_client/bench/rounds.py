"""The benchmark itself: every workload in rounds, this library and its peer in turn.

::

    utility:      ours peer  ours peer  ours peer        what disturbs the machine for a while disturbs both
    first_token:  ours peer  ours peer  ours peer

Both are processes that live for the whole run and wait while the other works.

Threads: the main thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from engine_client.bench import machine, sides
from engine_client.bench.results import Measured, Results
from engine_client.bench.sides import Side, SideError
from engine_client.bench.workloads import Workload

__all__ = ["measure"]

Progress = Callable[[str, int, int], None]


def measure(
    workloads: Sequence[Workload],
    peer: str | None = None,
    *,
    rounds: int = 5,
    quick: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> Results:
    """Run workloads and return what was measured.

    Args:
        peer: ``"zmq"``, or an interpreter that has vLLM; None: this library alone.
        rounds: how often each side runs each workload.
        quick: fewer repetitions, for a first look.
        progress: called as ``progress(what, done, total)``.

    Raises:
        SideError: a side did not start.
    """
    results = Results(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=" ".join(["engine-client", *sys.argv[1:]]),
        machine=machine.describe(),
    )
    with ExitStack() as stack:
        progress("starting", 0, 1)
        ours = stack.enter_context(sides.ours())
        other = stack.enter_context(sides.peer(peer)) if peer is not None else None
        results.ours = ours.about
        results.peer = {"label": other.label, **other.about} if other is not None else None
        plan = list(_plan(workloads, ours, other, rounds))
        for done, (workload, side) in enumerate(plan):
            progress(f"{workload.name} {side.label}", done, len(plan))
            _run(workload, side, results, quick=quick)
        progress("done", len(plan), len(plan))
    return results


def _plan(workloads: Sequence[Workload], ours: Side, peer: Side | None, rounds: int) -> Iterator[tuple[Workload, Side]]:
    """Yield what runs where, one after the other."""
    for workload in workloads:
        for number in range(rounds):
            yield workload, ours
            if peer is not None and workload.peer and (not workload.rounds or number < workload.rounds):
                yield workload, peer


def _run(workload: Workload, side: Side, results: Results, *, quick: bool) -> None:
    measured = results.workloads.setdefault(workload.name, Measured())
    parameters: dict[str, Any] = {**workload.parameters, **(workload.quick if quick else {})}
    runs = measured.ours if side.label == "engine_client" else measured.peer
    try:
        figures = side.run(workload, parameters)
    except SideError as error:
        measured.errors.append(str(error))
        figures = {}  # it stays in its place, so that pairs remain pairs
    runs.append(figures)
    if figures.get("note", "").startswith("get_output() had not"):
        side.close()  # that engine's client is in no state to go on
