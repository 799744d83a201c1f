"""Profiles of the engine's thread."""

from __future__ import annotations

import pstats

import pytest

from engine_client.engine.profile import Profiler


@pytest.fixture
def profiler():
    profiler = Profiler()
    yield profiler
    if profiler.is_running:
        profiler.stop()


def busy_with_something():
    return sorted(range(1000))


def test_writes_what_ran(profiler, tmp_path):
    """The file has the functions that ran between start and stop; its path is what both return."""
    path = profiler.start(str(tmp_path / "mine"))
    assert profiler.is_running
    busy_with_something()
    assert profiler.stop() == path
    assert path.startswith(str(tmp_path / "mine-"))
    assert any(name == "busy_with_something" for _, _, name in pstats.Stats(path).stats)


def test_every_profile_has_its_own_file(profiler, tmp_path, monkeypatch):
    """Without a prefix files go to the working directory, one each."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        profiler.start()
        profiler.stop()
    assert [path.suffix for path in tmp_path.glob("engine-*")] == [".prof", ".prof"]


def test_start_and_stop_alternate(profiler, tmp_path):
    """A second start, and a stop without a start, are refused and change nothing."""
    with pytest.raises(ValueError, match="no profile is being taken"):
        profiler.stop()
    profiler.start(str(tmp_path / "p"))
    with pytest.raises(ValueError, match="a profile is being taken already"):
        profiler.start(str(tmp_path / "q"))
    profiler.stop()
    assert not profiler.is_running


def test_missing_directory_is_refused_at_the_start(profiler, tmp_path):
    """A prefix in a directory that does not exist is refused before anything is profiled."""
    with pytest.raises(NotADirectoryError, match="nowhere"):
        profiler.start(str(tmp_path / "nowhere" / "p"))
    assert not profiler.is_running
