"""The interfaces are satisfied by the classes that stand for them."""

from __future__ import annotations

import inspect
import multiprocessing
import subprocess
import sys

import pytest

from engine_client import EngineConfig, EngineCore as OwnEngineCore
from engine_client.interfaces import EngineContext, EngineCore, ProcessHandle
from engine_client.ipc.handle import ChildHandle
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import ScriptedCore


def members(protocol):
    return {name for name in dir(protocol) if not name.startswith("_")} | set(protocol.__annotations__)


@pytest.mark.parametrize(
    "engine",
    [OwnEngineCore(EngineConfig(), EchoExecutor, False), ScriptedCore(EngineConfig(), False, EngineContext())],
    ids=lambda engine: type(engine).__name__,
)
def test_engines(engine):
    """Both engines have every member of the interface, with parameters of the same names."""
    for name in members(EngineCore):
        ours = getattr(engine, name)
        declared = getattr(EngineCore, name, None)
        if inspect.isfunction(declared):
            expected = list(inspect.signature(declared).parameters)[1:]
            assert list(inspect.signature(ours).parameters)[: len(expected)] == expected, name


def test_handles():
    """A handle has the interface of ``multiprocessing.Process``."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        handle = ChildHandle("engine 0", child.pid)
        assert members(ProcessHandle) <= set(dir(handle)) & set(dir(multiprocessing.Process()))
        handle.close()


def test_context_has_defaults():
    """A context works as it is: rank 0, and progress goes nowhere."""
    context = EngineContext()
    assert context.rank == 0
    assert context.progress("loading", 1, 2) is None
    assert context.options == {}
