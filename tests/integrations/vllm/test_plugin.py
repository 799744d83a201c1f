"""The plugin: what vLLM calls by itself, after its own modules were imported and after the program has begun."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from engine_client import ClientOptions
from engine_client.integrations.vllm.install import general_plugin, install
from helpers.vllm_scripts import run_vllm, told


@pytest.fixture
def actions(monkeypatch):
    """Give the calls of ``after_import`` in a process that wants the plugin, and has nothing installed."""
    monkeypatch.setenv("ENGINE_CLIENT_VLLM", "1")
    module = sys.modules[install.__module__]
    monkeypatch.setattr(module, "_installed", False)
    with mock.patch.object(module, "after_import") as after_import:
        yield after_import


def test_the_plugin_installs(actions, monkeypatch):
    """It does what ``install()`` does if the environment says so, and nothing otherwise."""
    monkeypatch.setenv("ENGINE_CLIENT_VLLM", "0")
    general_plugin()
    assert not actions.called
    monkeypatch.setenv("ENGINE_CLIENT_VLLM", "1")
    general_plugin()
    assert actions.called


def test_the_programs_options_stay(actions):
    """Where the program has called ``install()`` itself, the plugin changes nothing."""
    install(ClientOptions(ready_timeout=7))
    actions.reset_mock()
    general_plugin()
    assert not actions.called


KILLED = """
if __name__ == "__main__":
    from engine_client.integrations.vllm.zmq_stub import provide
    provide()  # vLLM's modules are imported before the plugin is loaded
    from vllm import LLM
    from vllm.v1.engine.exceptions import EngineDeadError
    import vllm.v1.engine.exceptions
    from engine_client.integrations.vllm.install import general_plugin
    general_plugin()
    tell(late=EngineDeadError is not vllm.v1.engine.exceptions.EngineDeadError)
    expected = (OSError, EngineDeadError)
    del EngineDeadError
    llm = LLM(**SETTINGS)
    threading.Timer(1.0, kill_engine).start()
    try:
        generate(llm, max_tokens=4000)
    except expected as error:
        tell(exit_name=error.exit_name, told="SIGKILL(-9)" in str(error), name=type(error).__module__)
    try:
        generate(llm)
    except expected as error:
        tell(again=type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.crash
def test_an_error_that_the_program_had_before(tmp_path):
    """A program that has vLLM's ``EngineDeadError`` from before the plugin catches with it what this library raises."""
    caught = told(run_vllm(tmp_path, KILLED, install=False, env={"ENGINE_CLIENT_VLLM": "1"}))
    assert caught == {
        "late": True,
        "exit_name": "SIGKILL(-9)",
        "told": True,
        "name": "engine_client.errors",
        "again": "EngineDeadError",
    }
