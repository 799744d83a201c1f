"""Configuration: defaults that work, options that refuse what cannot, and the reference's environment variables."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from engine_client.config import ClientOptions, EngineConfig, ready_timeout, shutdown_grace


def test_engine_config_works_as_it_is():
    """``EngineConfig()`` has every section, and no two of them share one."""
    first, second = EngineConfig(), EngineConfig()
    for section in ("model_config", "cache_config", "parallel_config", "scheduler_config", "additional_config"):
        assert getattr(first, section) is not getattr(second, section)
    assert first == second == copy.deepcopy(first) == pickle.loads(pickle.dumps(first))


def test_options_are_frozen():
    """Options do not change after they were given."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClientOptions().start_method = "fork"


@pytest.mark.parametrize("method", ["exec", "spawn", "fork", "forkserver"])
def test_start_methods(method):
    """There are four start methods."""
    assert ClientOptions(start_method=method).start_method == method


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("start_method", "thread", ValueError),
        ("ready_timeout", -1, ValueError),
        ("ready_timeout", "1", TypeError),
        ("shutdown_timeout", float("nan"), ValueError),
        ("stall_timeout", -0.1, ValueError),
        ("stall_limit", 0, ValueError),
        ("stall_limit", "1", TypeError),
        ("spin_us", -1, ValueError),
        ("spin_us", float("inf"), ValueError),
        ("arena_limit", -1, ValueError),
        ("arena_limit", 1.5, TypeError),
        ("arena_threshold", True, TypeError),
        ("high_water", "1", TypeError),
        ("backlog_limit", -1, ValueError),
        ("on_progress", 1, TypeError),
        ("forward_logs", "INFO", TypeError),
    ],
)
def test_options_that_cannot_work(field, value, error):
    """A value that cannot work is refused where it is given, by the name of its field."""
    with pytest.raises(error, match=field):
        ClientOptions(**{field: value})


def test_options_for_the_engine():
    """What goes to the engine process is everything but the callback, and can be pickled."""
    told = ClientOptions(on_progress=lambda *step: None, spin_us=3).for_engine()
    assert "on_progress" not in told
    assert told["spin_us"] == 3
    assert pickle.loads(pickle.dumps(told)) == told


def test_ready_timeout(monkeypatch):
    """The option comes before the environment, and that before ten minutes."""
    monkeypatch.delenv("VLLM_ENGINE_READY_TIMEOUT_S", raising=False)
    assert ready_timeout(ClientOptions()) == 600
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "12")
    assert ready_timeout(ClientOptions()) == 12
    assert ready_timeout(ClientOptions(ready_timeout=3)) == 3


def test_shutdown_grace(monkeypatch):
    """The argument comes before the option, that before the environment, and that before five seconds."""
    monkeypatch.delenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", raising=False)
    assert shutdown_grace(ClientOptions()) == 5
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "12")
    assert shutdown_grace(ClientOptions()) == 12
    assert shutdown_grace(ClientOptions(shutdown_timeout=3)) == 3
    assert shutdown_grace(ClientOptions(shutdown_timeout=3), 0) == 0
    with pytest.raises(ValueError, match="timeout"):
        shutdown_grace(ClientOptions(), -1)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", ""])
def test_environment_that_cannot_work(monkeypatch, text):
    """A variable that is no number of seconds is a ValueError that names it."""
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="VLLM_ENGINE_READY_TIMEOUT_S"):
        ready_timeout(ClientOptions())
