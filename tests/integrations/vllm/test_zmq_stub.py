"""The stand-in for pyzmq: names for imports, and one clear error for everything else."""

from __future__ import annotations

import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from engine_client.integrations.vllm import zmq_stub
from engine_client.integrations.vllm.zmq_stub import ZMQUnavailableError, is_stub, provide


@pytest.fixture
def stub():
    """Give the stub for the time of a test, whether pyzmq is installed or not."""
    with mock.patch.dict(sys.modules), mock.patch.object(zmq_stub, "find_spec", return_value=None):
        for name in [name for name in sys.modules if name.partition(".")[0] == "zmq"]:
            del sys.modules[name]
        assert provide()
        yield importlib.import_module("zmq")


def test_what_vllm_imports(stub):
    """The names that vLLM's modules use at their top are there, submodules included."""
    importlib.import_module("zmq.asyncio")
    importlib.import_module("zmq.utils.monitor")
    assert is_stub()
    assert (stub.PUB, stub.SUBSCRIBE, stub.POLLIN) == (1, 6, 1)
    assert bytes | stub.Frame | stub.asyncio.Socket
    assert issubclass(stub.Again, stub.ZMQError)


@pytest.mark.parametrize("name", ["Context", "Poller", "Socket", "asyncio.Context"])
def test_nothing_can_be_made(stub, name):
    """Contexts, sockets and pollers raise an error that says who wanted them and what to do."""
    module, _, kind = name.rpartition(".")
    with pytest.raises(ZMQUnavailableError, match=rf"zmq\.{kind}.*install pyzmq"):
        getattr(stub.asyncio if module else stub, kind)()
    with pytest.raises(ZMQUnavailableError, match="install pyzmq"):
        stub.Context.instance()
    with pytest.raises(ZMQUnavailableError, match="install pyzmq"):
        stub.utils.monitor.recv_monitor_message(None)


@pytest.mark.parametrize(
    ("module", "feature"),
    [
        ("vllm.distributed.device_communicators.shm_broadcast", "several workers"),
        ("vllm.distributed.kv_events", "KV cache events"),
        ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils", "a KV connector"),
        ("vllm.v1.engine.coordinator", "data-parallel coordinator"),
    ],
)
def test_the_error_names_the_feature(stub, module, feature):
    """The error names the feature of vLLM whose module asked, also by way of vLLM's helpers."""
    helper = {"__name__": "vllm.utils.network_utils", "zmq": stub}
    exec("def make():\n    return zmq.Context()", helper)
    with pytest.raises(ZMQUnavailableError, match=feature):
        exec("make()", {"__name__": module, "make": helper["make"]})


def test_pyzmq_comes_first():
    """Where there is a zmq, it stays."""
    with mock.patch.dict(sys.modules, {"zmq": mock.Mock(__spec__=None)}):
        assert not provide()


def used_names():
    """Return the names of zmq, dotted, that the files of the installed vLLM use or import."""
    names = set()
    for folder in find_spec("vllm").submodule_search_locations:
        for file in Path(folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if "zmq" in text:
                names.update(name for node in ast.walk(ast.parse(text)) for name in names_of(node))
    return {name for name in names if name.startswith("zmq.")}


def names_of(node):
    """Return the names, dotted, that a piece of code says: those of an import, or of an access to attributes."""
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [chain_of(node)] if isinstance(node, ast.Attribute) else []


def chain_of(node):
    """Return ``"a.b.c"`` for an access to attributes of a name."""
    inner = chain_of(node.value) if isinstance(node, ast.Attribute) else getattr(node, "id", "?")
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) else inner


def test_no_name_is_missing(stub):
    """Whatever vLLM's code says of zmq, anywhere, is there: it fails with the stub's own error or not at all."""
    names = used_names()
    assert {"zmq.Context", "zmq.asyncio.Context", "zmq.ROUTER", "zmq.IPV6", "zmq.utils.monitor"} <= names
    missing = []
    for name in sorted(names):
        value = stub
        for part in name.split(".")[1:]:
            value = getattr(value, part, None)
        missing += [name] if value is None else []
    assert missing == []
