"""Which workloads there are: what each does, how often, and which figures it yields.

A workload names a *kind*, a function of ``loops`` or of one side, and its parameters; both travel to the measured
process as JSON.  A figure whose name ends in ``/`` is a series: the process returns ``name/point`` for every point.

Threads: plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["DEFAULT", "GROWTH", "WORKLOADS", "Figure", "Workload", "choose", "figures_of"]

_KIB: Final = 1024
_MIB: Final = 1024 * 1024
SPIN_US: Final = 1000


@dataclass(frozen=True)
class Figure:
    """One number that a workload yields, such as ``p50_us``.

    Args:
        text: which of several figures of this unit it is.
        at: of a series, what its points are.
    """

    name: str
    unit: str
    text: str = ""
    at: str = ""

    def title(self, name: str) -> str:
        """Return for example ``p50, µs``, or, of the point ``us/64`` of a series, ``µs at 64 MiB``."""
        point = name.removeprefix(self.name)
        return f"{self.text}{self.text and ', '}{self.unit}" + (f" at {point} {self.at}" if self.at else "")


@dataclass(frozen=True)
class Workload:
    """One piece of work.

    Args:
        kind: the function that does it.
        figures: what the table shows; the process may return more.
        parameters: of the function.
        quick: what differs with ``--quick``.
        peer: whether peers can do it, too.
        rounds: at most so many rounds of the peer; 0: as many as are asked for.
        seconds: that one run may take before it is given up.
    """

    name: str
    kind: str
    figures: tuple[Figure, ...]
    parameters: dict[str, Any] = field(default_factory=dict)
    quick: dict[str, Any] = field(default_factory=dict)
    peer: bool = True
    rounds: int = 0
    seconds: float = 300.0


_LATENCY: Final = (Figure("p50_us", "µs", "p50"), Figure("p99_us", "µs", "p99"))
_RATE: Final = (
    Figure("tokens_per_s", "tokens/s"),
    Figure("client_us_per_token", "µs of CPU/token", "client"),
    Figure("engine_us_per_token", "µs of CPU/token", "engine"),
)
_TENSOR: Final = (Figure("ms", "ms"), Figure("gib_per_s", "GiB/s"))


def _stream(batch: int, tokens: int) -> Workload:
    quick = {"tokens": max(2, tokens // 20), "repeats": 2}
    return Workload(f"stream_{batch}", "stream", _RATE, {"batch": batch, "tokens": tokens, "repeats": 3}, quick)


def _tensor(mib: int, *, back: bool) -> Workload:
    figures = _TENSOR if back else (*_TENSOR, Figure("of_memcpy", "of a memcpy's speed"))
    parameters = {"nbytes": mib * _MIB, "back": back, "times": 200 if mib < 64 else 12}
    return Workload(f"tensor_{'both' if back else 'in'}_{mib}", "tensor", figures, parameters, {"times": 5})


def _latencies() -> list[Workload]:
    """Return the workloads of one message at a time, each also with sides that always poll."""
    found = []
    for name, times in (("utility", 5000), ("first_token", 3000)):
        parameters = {"times": times}
        found.append(Workload(name, name, _LATENCY, parameters, {"times": 200}))
        spinning = {**parameters, "options": {"spin_us": SPIN_US}}
        found.append(Workload(f"{name}_spin", name, _LATENCY, spinning, {"times": 200}))
    return found


DEFAULT: Final = (
    Workload(
        "floor",
        "floor",
        (Figure("p50_us", "µs", "p50"), Figure("thread_us", "µs", "by a thread"), Figure("spin_us", "µs", "polling")),
        {"times": 5000},
        {"times": 200},
        peer=False,
    ),
    *_latencies(),
    *(_stream(batch, tokens) for batch, tokens in ((1, 5000), (64, 1000), (256, 400), (1024, 100))),
    Workload(
        "ingest",
        "ingest",
        (Figure("requests_per_s", "requests/s"),),
        {"count": 5000, "repeats": 3},
        {"count": 500, "repeats": 2},
    ),
    *(_tensor(mib, back=back) for back in (False, True) for mib in (1, 8, 64)),
    Workload(
        "allocated",
        "allocated",
        (Figure("us/", "µs", at="MiB"),),
        {"mib": [1, 2, 4, 8, 16, 32, 64], "times": 400},
        {"mib": [1, 2], "times": 5},
        peer=False,
    ),
    Workload("async_first_token", "async_first_token", _LATENCY, {"times": 2000}, {"times": 200}),
    Workload(
        "async_stream_256",
        "async_stream",
        _RATE,
        {"batch": 256, "tokens": 400, "repeats": 3},
        {"tokens": 20, "repeats": 2},
    ),
    Workload(
        "start_stop",
        "start_stop",
        (Figure("start_ms", "ms", "start"), Figure("stop_ms", "ms", "stop")),
        {"times": 5},
        {"times": 1},
    ),
    Workload("idle_cpu", "idle_cpu", (Figure("cpu_s_in_5_s", "s of CPU in 5 s"),), {"seconds": 5}, {"seconds": 0.5}),
    Workload("death", "death", (Figure("ms", "ms"),), {"patience": 20}, {"patience": 5}, rounds=1),
)
"""What runs when nothing is named; death is last, since a peer may not recover from it."""

GROWTH: Final = (
    Workload(
        "batch",
        "batch",
        (
            Figure("client_us_per_token/", "µs of CPU/token", "client", at="requests"),
            Figure("engine_us_per_token/", "µs of CPU/token", "engine", at="requests"),
        ),
        {"batches": [2**i for i in range(13)], "total": 200_000, "most": 10_000},
        {"batches": [1, 16, 256], "total": 2000, "most": 100},
    ),
    Workload(
        "payload",
        "payload",
        (Figure("us/", "µs", at="KiB"), Figure("copy_us/", "µs", "plain copy", at="KiB")),
        {"sizes": [_KIB << i for i in range(19)], "budget": 1 << 30},
        {"sizes": [_KIB << i for i in range(0, 13, 3)], "budget": 1 << 24},
    ),
    Workload(
        "ranks",
        "ranks",
        (
            Figure("tokens_per_s/", "tokens/s", at="ranks"),
            Figure("client_us_per_token/", "µs of CPU/token", "client", at="ranks"),
        ),
        {"ranks": [1, 2, 4, 8, 16], "batch": 64, "tokens": 400, "repeats": 3},
        {"ranks": [1, 2], "batch": 4, "tokens": 20, "repeats": 1},
        peer=False,
    ),
    Workload(
        "memory",
        "memory",
        (Figure("client_mb", "MB more", "client"), Figure("engine_mb", "MB more", "engine")),
        {"messages": 10_000_000},
        {"messages": 20_000},
        peer=False,
        seconds=1800.0,
    ),
    Workload(
        "scheduler",
        "scheduler",
        (
            Figure("us_per_token/", "µs/token", at="running"),
            Figure("waiting_us/", "µs/token", "64 running", at="waiting"),
        ),
        {"running": [2**i for i in range(11)], "waiting": [0, 100, 1000, 10_000, 100_000], "total": 50_000},
        {"running": [1, 16], "waiting": [0, 100], "total": 500},
        peer=False,
    ),
)
"""What runs with ``--growth``."""

WORKLOADS: Final = {workload.name: workload for workload in (*DEFAULT, *GROWTH)}


def choose(names: Sequence[str], *, growth: bool = False) -> list[Workload]:
    """Return the workloads of these names, in the order in which they run; none named: all of the chosen kind.

    Raises:
        ValueError: there is no workload of a name.
    """
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise ValueError(f"there is no workload {unknown[0]!r:.60}; there are {', '.join(WORKLOADS)}")
    if not names:
        return list(GROWTH if growth else DEFAULT)
    ordered = (*GROWTH, *DEFAULT)  # death last
    return [workload for workload in ordered if workload.name in names or (growth and workload in GROWTH)]


def figures_of(workload: Workload, names: Sequence[str]) -> list[tuple[Figure, str]]:
    """Return the figures to show and the name of each; a series becomes one figure for each point in ``names``."""
    found = []
    for figure in workload.figures:
        if figure.name.endswith("/"):
            found += [(figure, name) for name in names if name.startswith(figure.name)]
        else:
            found.append((figure, figure.name))
    return found
