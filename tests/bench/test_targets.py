"""Targets: what is held to a bound, and when it is missed."""

from __future__ import annotations

import pytest

from engine_client.bench.results import Measured, Results
from engine_client.bench.targets import TARGETS, Target, judge
from engine_client.bench.workloads import WORKLOADS


def results(label: str | None = "vllm", **workloads: Measured) -> Results:
    return Results(peer=None if label is None else {"label": label}, workloads=workloads)


def test_every_target_is_of_a_figure_that_exists():
    """Each target names a workload and one of its figures, with a series where it is about one."""
    for target in TARGETS:
        figures = [figure.name for figure in WORKLOADS[target.workload].figures]
        assert target.figure in figures
        assert target.figure.endswith("/") == (target.kind in ("spread", "doubling"))


@pytest.mark.parametrize(("ours", "met"), [(3.0, True), (3.3, True), (3.4, False)])
def test_ratio(ours: float, met: bool):
    """A ratio counts against vLLM's figure in the same run."""
    (verdict,) = judge(results(utility=Measured([{"p50_us": ours}], [{"p50_us": 10.0}])))
    assert verdict.met is met
    assert verdict.actual == pytest.approx(ours / 10)


def test_ratio_that_must_be_high():
    """Of rates the bound is the least that is allowed."""
    (verdict,) = judge(results(stream_256=Measured([{"tokens_per_s": 39.0}], [{"tokens_per_s": 10.0}])))
    assert not verdict.met
    assert str(verdict) == "MISSED  stream_256 tokens_per_s ≥ 4 of vLLM's: is 3.9"


@pytest.mark.parametrize("label", [None, "zmq"])
def test_ratios_need_vllm(label: str | None):
    """With another peer, or none, only what needs no peer is judged."""
    measured = Measured([{"start_ms": 100.0, "stop_ms": 9.0}], [{"start_ms": 1.0, "stop_ms": 1.0}])
    (verdict,) = judge(results(label, start_stop=measured))
    assert str(verdict) == "met     start_stop start_ms ≤ 150: is 100"


def test_spread_and_doubling():
    """A spread is from the least to the most, a doubling is the worst of neighbours, both of medians."""
    figures = {"us/1": 10.0, "us/2": 8.0, "us/4": 24.0, "us/8": 40.0}
    targets = [Target("payload", "us/", "spread", 4), Target("payload", "us/", "doubling", 1.2)]
    spread, doubling = judge(results(payload=Measured([figures])), targets)
    assert (spread.actual, spread.met) == (5, False)
    assert (doubling.actual, doubling.met) == (1.5, False)
    assert str(spread.target) == "payload us ≤ 4 from least to most"


@pytest.mark.parametrize(("copy", "actual"), [(7.0, 1.5), (16.0, 1.0), (24.0, 0.75)])
def test_doubling_on_a_machine_whose_caches_end(copy: float, actual: float):
    """Where a plain copy alone takes longer than the half did, that much may be added."""
    measured = Measured([{"us/1": 8.0, "us/2": 24.0, "copy_us/1": 1.0, "copy_us/2": copy}])
    (verdict,) = judge(results(payload=measured))
    assert verdict.actual == pytest.approx(actual)


def test_what_failed_is_missed():
    """A workload that ran and has no figure misses its target; one that was not asked for has none."""
    (death,) = judge(results(death=Measured([{"ms": None}])))
    assert str(death) == "MISSED  death ms ≤ 20: not measured"
    assert not judge(results(payload=Measured([{"us/1": 1.0}])))[0].met
    assert judge(results()) == []
