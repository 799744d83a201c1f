"""Which workloads there are, and which of them run."""

from __future__ import annotations

import json

import pytest

from engine_client.bench import life, loops
from engine_client.bench.ours import Ours
from engine_client.bench.workloads import DEFAULT, GROWTH, WORKLOADS, choose, figures_of
from helpers.tree import TESTS


def test_reference_names_are_there():
    """The workloads that vLLM was measured by have their names, and death is the last of all."""
    names = [workload.name for workload in DEFAULT]
    assert {
        *("utility", "first_token", "stream_1", "stream_64", "stream_256", "stream_1024", "ingest"),
        *("tensor_in_1", "tensor_in_8", "tensor_in_64", "tensor_both_1", "tensor_both_8", "tensor_both_64"),
        *("async_first_token", "async_stream_256", "start_stop", "idle_cpu", "death"),
    } <= set(names)
    assert names[-1] == "death"
    assert len(WORKLOADS) == len(DEFAULT) + len(GROWTH)


def test_every_kind_can_be_run():
    """Each workload's function exists and takes its parameters, which are JSON; peers have those that they need."""
    for workload in WORKLOADS.values():
        everywhere = {**loops.KINDS, **life.KINDS}
        function = everywhere[workload.kind] if workload.peer else Ours.kinds[workload.kind]
        parameters = {**workload.parameters, **workload.quick}
        assert json.loads(json.dumps(parameters)) == parameters
        assert set(parameters) <= set(function.__code__.co_varnames[: function.__code__.co_argcount])


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_described(name: str):
    """The page on performance has every workload in one of its tables."""
    page = (TESTS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    assert any(f"`{name}`" in line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))


def test_choice():
    """No name means all that is usual, growth what grows, and names are run with death at the end."""
    assert choose([]) == list(DEFAULT)
    assert choose([], growth=True) == list(GROWTH)
    assert [workload.name for workload in choose(["death", "utility", "batch"])] == ["batch", "utility", "death"]
    assert [w.name for w in choose(["utility"], growth=True)] == [*(w.name for w in GROWTH), "utility"]
    with pytest.raises(ValueError, match="there is no workload 'uttility'; there are floor, utility, "):
        choose(["uttility"])


def test_series_are_expanded():
    """A figure that is a series is shown for each of its points, others as they are."""
    names = ["us/1", "us/2", "note"]
    assert [name for _, name in figures_of(WORKLOADS["allocated"], names)] == ["us/1", "us/2"]
    assert [name for _, name in figures_of(WORKLOADS["utility"], [])] == ["p50_us", "p99_us"]


def test_titles():
    """A figure is told by its unit, and by what sets it apart; a point of a series by where it stands."""
    (figure,) = WORKLOADS["allocated"].figures
    assert figure.title("us/64") == "µs at 64 MiB"
    assert WORKLOADS["utility"].figures[1].title("p99_us") == "p99, µs"
    assert WORKLOADS["scheduler"].figures[1].title("waiting_us/100") == "64 running, µs/token at 100 waiting"
