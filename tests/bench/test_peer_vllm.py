"""vLLM's side, against stand-ins for its modules; tests of the real one need vLLM."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from engine_client import messages, params
from engine_client.bench.peer_vllm import make_side


class EngineCore:
    """Stands for the class whose methods are replaced."""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch):
    """Have modules under the names that the side imports; engine and parameters have this library's classes."""

    def module(name, **members):
        made = ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    core_class = type("EngineCore", (EngineCore,), {})
    clients = {name: lambda *args, name=name: (name, args) for name in ("SyncMPClient", "AsyncMPClient")}
    core = module("vllm.v1.engine.core", EngineCore=core_class)
    core_client = module("vllm.v1.engine.core_client", **clients)
    names = ("EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequest", "FinishReason")
    found = {name: getattr(messages, name) for name in names}
    engine = module("vllm.v1.engine", core=core, core_client=core_client, **found)
    module("vllm.v1", engine=engine)
    module("vllm.sampling_params", SamplingParams=params.SamplingParams)
    module("vllm", __version__="0.25.1")
    module("zmq", __version__="27")
    module("torch", __version__="2", float32="float32", ones=lambda number, dtype: (number, dtype))
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("ENGINE_CLIENT_VLLM", "1")
    return SimpleNamespace(core_class=core_class)


def test_what_computes_is_replaced(vllm):
    """The engine core that vLLM would start does what this library's stub does."""
    side = make_side()
    core = vllm.core_class(None, object, False)
    for name, tokens in (("a", 2), ("b", 1)):
        core.add_request(*core.preprocess_add_request(side.make_request(name, tokens, "tensor")))
    assert core.scheduler.has_requests()
    core.set_echo_tensor(True)
    outputs, ran = core.step_fn()
    core.post_step(ran)
    told = [(o.request_id, o.new_token_ids, o.finish_reason, o.pooling_output) for o in outputs[0].outputs]
    assert told == [("a", [17], None, None), ("b", [17], messages.FinishReason.LENGTH, "tensor")]
    assert core.scheduler.get_num_unfinished_requests() == 1
    core.abort_requests(["a", "unknown"])
    assert not core.scheduler.has_unfinished_requests()
    core.add_request(side.make_request("c", 1))
    assert core.scheduler.finish_requests(None, None) == []
    assert core.step_fn()[0][0].outputs == []
    core.shutdown()


def test_utilities(vllm):
    """The engine answers what the workloads ask."""
    make_side()
    core = vllm.core_class(None)
    assert core.echo(5) == 5
    assert core.usage()[0] == os.getpid()


def test_clients_are_vllm_s(vllm):
    """Both clients are those of vLLM, with a configuration that has one rank; other clients' options do not matter."""
    side = make_side()
    name, (config, *_) = side.make_client(spin_us=7)
    assert name == "SyncMPClient"
    assert config.parallel_config.data_parallel_size == 1
    assert side.make_client(use_asyncio=True)[0] == "AsyncMPClient"


def test_it_runs_without_this_library(vllm):
    """A plug-in of this library that may be installed there is not asked for, and the engine is a fork."""
    side = make_side()
    assert "ENGINE_CLIENT_VLLM" not in os.environ
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert side.about() == {"vllm": "0.25.1", "pyzmq": "27", "tensors": "torch 2"}


def test_requests_and_tensors(vllm):
    """They are as those of the other sides: 128 prompt tokens, float32 numbers."""
    side = make_side()
    request = side.make_request("a", 3)
    assert (request.prompt_token_ids, request.params.max_tokens) == (list(range(128)), 3)
    assert side.make_tensor(4096) == (1024, "float32")
