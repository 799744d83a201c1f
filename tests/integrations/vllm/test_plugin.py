"""The plugin: what vLLM calls by itself, after its own modules were imported and after the program has begun."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from engine_client import ClientOptions
from engine_client.integrations.vllm.install import general_plugin, install


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
