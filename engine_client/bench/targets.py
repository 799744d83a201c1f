"""What the figures must reach, as data, and which of it they miss.

Threads: plain data, and pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from engine_client.bench.results import Results, points

__all__ = ["TARGETS", "Target", "Verdict", "judge"]


@dataclass(frozen=True)
class Target:
    """One bound on one figure.

    Args:
        kind: what is held to the bound. ``"ratio"``: ours divided by vLLM's; ``"value"``: ours; of a series,
            ``"spread"``: the largest value divided by the smallest; ``"doubling"``: the most by which a value exceeds
            what it may be, which is twice the value of half the size, or that and the time of one plain copy: a machine
            copies slower once its caches are full.
        most: the bound is the most allowed; else the least.
    """

    workload: str
    figure: str
    kind: str
    bound: float
    most: bool = True

    def __str__(self) -> str:
        relation = "≤" if self.most else "≥"
        what = {
            "ratio": " of vLLM's",
            "value": "",
            "spread": " from least to most",
            "doubling": " of twice the half's, or that and a copy",
        }
        return f"{self.workload} {self.figure.rstrip('/')} {relation} {self.bound:g}{what[self.kind]}"


@dataclass(frozen=True)
class Verdict:
    """What became of a target; ``actual`` is None if it was not measured."""

    target: Target
    actual: float | None

    @property
    def met(self) -> bool:
        """Tell whether the figure is within the bound."""
        if self.actual is None:
            return False
        return self.actual <= self.target.bound if self.target.most else self.actual >= self.target.bound

    def __str__(self) -> str:
        actual = "not measured" if self.actual is None else f"is {self.actual:.3g}"
        return f"{'met   ' if self.met else 'MISSED'}  {self.target}: {actual}"


def _least_ratios(bound: float, figure: str, *workloads: str) -> list[Target]:
    return [Target(workload, figure, "ratio", bound, most=False) for workload in workloads]


TARGETS: Final = (
    Target("utility", "p50_us", "ratio", 0.33),
    Target("first_token", "p50_us", "ratio", 0.33),
    Target("utility_spin", "p50_us", "ratio", 0.10),
    Target("first_token_spin", "p50_us", "ratio", 0.10),
    Target("async_first_token", "p50_us", "ratio", 0.4),
    *_least_ratios(4, "tokens_per_s", "stream_256", "stream_1024", "async_stream_256"),
    *_least_ratios(2, "tokens_per_s", "stream_64"),
    *_least_ratios(1.5, "tokens_per_s", "stream_1"),
    *_least_ratios(2, "requests_per_s", "ingest"),
    *_least_ratios(5, "gib_per_s", *(f"tensor_{way}_{mib}" for way in ("in", "both") for mib in (1, 8, 64))),
    Target("tensor_in_64", "of_memcpy", "value", 0.7, most=False),
    Target("allocated", "us/", "spread", 1.2),
    Target("start_stop", "stop_ms", "ratio", 1),
    Target("start_stop", "start_ms", "value", 150),
    Target("idle_cpu", "cpu_s_in_5_s", "value", 0.01),
    Target("death", "ms", "value", 20),
    Target("payload", "us/", "doubling", 1.2),
    Target("memory", "client_mb", "value", 5),
    Target("memory", "engine_mb", "value", 5),
    Target("scheduler", "waiting_us/", "spread", 1.2),
)
"""Ratios hold against vLLM 0.25.1's clients, measured in the same run."""


def judge(results: Results, targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Return what became of the targets of the workloads that ran; ratios need vLLM as the peer."""
    against_vllm = results.peer is not None and results.peer.get("label") == "vllm"
    return [
        Verdict(target, _actual(results, target))
        for target in targets
        if target.workload in results.workloads and (against_vllm or target.kind != "ratio")
    ]


def _actual(results: Results, target: Target) -> float | None:
    if target.kind == "ratio":
        return results.workloads[target.workload].ratio(target.figure)
    figures = results.figures(target.workload)
    if target.kind == "value":
        return figures.get(target.figure)
    found: dict[float, float] = points(figures, target.figure)
    if len(found) < 2:
        return None
    if target.kind == "spread":
        return max(found.values()) / min(found.values())
    copies: dict[float, float] = points(figures, f"copy_{target.figure}")
    return max(
        late / max(2 * early, early + copies.get(size, 0.0)) for (_, early), (size, late) in pairwise(found.items())
    )
