"""The engine core that every measurement of this library runs on."""

from __future__ import annotations

import os

from engine_client import FinishReason
from engine_client.bench.ours import Ours
from engine_client.bench.stub import TOKEN, build_engine, resident_bytes, usage
from engine_client.interfaces import EngineContext

make_request = Ours().make_request


def engine(rank=0):
    return build_engine(None, None, False, EngineContext(rank))


def add(core, *args):
    core.add_request(*core.preprocess_add_request(make_request(*args)))


def test_one_token_a_step():
    """Every request gets one constant token in each step, until it has as many as it asked for."""
    core = engine(rank=3)
    add(core, "a", 2)
    add(core, "b", 1)
    assert (core.has_work(), core.counts()) == (True, (0, 2))
    outputs, ran = core.step_fn()
    assert ran
    assert outputs[0].engine_index == 3
    told = [(output.request_id, output.new_token_ids, output.finish_reason) for output in outputs[0].outputs]
    assert told == [("a", [TOKEN], None), ("b", [TOKEN], FinishReason.LENGTH)]
    outputs, _ = core.step_fn()
    assert [(output.request_id, output.finish_reason) for output in outputs[0].outputs] == [("a", FinishReason.LENGTH)]
    assert not core.has_work()
    assert core.take_outputs() == {}


def test_tensor_comes_back_if_asked_for():
    """The last output has the request's tensor once ``set_echo_tensor`` was called, and not before."""
    core = engine()
    for back in (False, True, False):
        core.utilities()["set_echo_tensor"](back)
        add(core, "a", 1, b"tensor")
        (output,) = core.step_fn()[0][0].outputs
        assert output.pooling_output == (b"tensor" if back else None)


def test_aborts_leave_nothing():
    """Aborted requests get no more output; unknown ones are ignored."""
    core = engine()
    for name in "abc":
        add(core, name, 9)
    core.abort_requests(["a", "x"])
    assert core.counts() == (0, 2)
    assert repr(core) == "<StubCore rank=0 requests=2>"
    core.abort_all()
    core.post_step(model_executed=False)
    core.shutdown()
    assert not core.has_work()


def test_usage_is_of_this_process():
    """``usage`` tells pid, CPU time and memory; ``echo`` its argument."""
    pid, seconds, memory = usage()
    assert pid == os.getpid()
    assert seconds > 0
    assert memory > 1 << 20
    assert resident_bytes() > 1 << 20
    assert engine().utilities()["echo"](7) == 7
    assert engine().ready_response().vllm_version == "bench"


def test_memory_where_the_system_does_not_tell(monkeypatch):
    """Without ``/proc`` the memory is 0."""

    def refuse(*args, **kwargs):
        raise FileNotFoundError("/proc")

    monkeypatch.setattr("builtins.open", refuse)
    assert resident_bytes() == 0
