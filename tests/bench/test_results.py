"""What was measured: medians, ratios of pairs, unsteadiness, and the way through JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_client.bench.results import Measured, Results, points, unsteadiness


def some_results() -> Results:
    runs = Measured([{"p50_us": 10.0, "note": "x"}, {"p50_us": 30.0}], [{"p50_us": 20.0}, {"p50_us": 40.0}], ["oh"])
    series = Measured([{"us/1": 1.0, "us/2": 2.0}])
    return Results(
        "2026-01-02T03:04:05Z",
        "engine-client bench",
        {"cpus": "2"},
        {"engine_client": "1"},
        {"label": "vllm"},
        {"utility": runs, "allocated": series},
    )


def test_medians_are_of_each_side():
    """A figure's median is that of one side's runs which have it."""
    measured = some_results().workloads["utility"]
    assert (measured.median("ours", "p50_us"), measured.median("peer", "p50_us")) == (20, 30)
    assert measured.median("ours", "other") is None


def test_ratio_is_the_median_of_pairs():
    """Neighbouring runs are compared, not medians: 10/20 and 30/40, hence 0.625."""
    assert some_results().workloads["utility"].ratio("p50_us") == pytest.approx(0.625)


def test_ratio_without_a_pair():
    """A run that failed, has no figure or no partner takes no part."""
    measured = Measured([{"ms": 1.0}, {}, {"ms": 3.0}, {"ms": 9.0}], [{"ms": None}, {"ms": 2.0}, {"ms": 6.0}])
    assert measured.ratio("ms") == pytest.approx(0.5)
    assert Measured([{"ms": 1.0}], []).ratio("ms") is None


def test_unsteadiness():
    """It is the quartile range as a part of the median, and unknown for two values."""
    assert unsteadiness([1.0, 1.0]) is None
    assert unsteadiness([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    assert unsteadiness([0.0, 0.0, 0.0]) is None


def test_json_round_trip(tmp_path: Path):
    """What was saved is loaded as it was."""
    path = tmp_path / "results.json"
    results = some_results()
    results.save(path)
    assert Results.load(path) == results


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 7}', '{"format": 1, "workloads": {"a": {"x": 1}}}'])
def test_other_files_are_refused(text: str, tmp_path: Path):
    """A file that is something else is named in the error."""
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no result of engine-client bench --json"):
        Results.load(path)


def test_figures_and_points():
    """A workload's medians, without remarks; a series by its points, in their order."""
    results = some_results()
    assert results.figures("utility") == {"p50_us": 20}
    assert results.figures("unknown") == {}
    assert points({"us/10": 3.0, "us/2": 1.0, "x": 0}, "us/") == {2.0: 1.0, 10.0: 3.0}
    assert results.workloads["utility"].names() == ["p50_us", "note"]
    assert results.workloads["utility"].note("ours") == ""
    assert Measured([{"note": "x"}]).note("ours") == "x"
