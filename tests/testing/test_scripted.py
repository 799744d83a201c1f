"""The scripted engine answers, starts and fails as it is told (here in this process; the clients' tests launch it)."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import wait

import pytest

from engine_client.config import EngineConfig
from engine_client.interfaces import EngineContext
from engine_client.messages import EngineCoreRequest, FinishReason
from engine_client.params import PoolingParams, SamplingParams
from engine_client.testing.inventory import key_of
from engine_client.testing.scripted import Script, build_engine
from helpers.procs import run_script


def build(script=None, *, log_stats=False, **context):
    config = EngineConfig(additional_config={"script": script} if script else {})
    return build_engine(config, None, log_stats, EngineContext(**context))


def request(request_id="r", *, max_tokens=3, pooling=False, prompt=(1, 2), **fields):
    sampling = None if pooling else SamplingParams(max_tokens=max_tokens)
    pooled = PoolingParams() if pooling else None
    return EngineCoreRequest(request_id, list(prompt), None, sampling, pooled, 0.0, None, None, None, **fields)


def add(core, message):
    core.add_request(*core.preprocess_add_request(message))


def run(core):
    """Step until there is no work; return the outputs."""
    outputs = []
    while core.has_work():
        by_client, executed = core.step_fn()
        core.post_step(executed)
        outputs += [output for batch in by_client.values() for output in batch.outputs]
    return outputs


def call(core, name, *args):
    return core.utilities()[name](*args)


def test_constant_answer():
    """A request gets one constant token per step, and ends by its length."""
    core = build(Script(token=7))
    add(core, request(max_tokens=3))
    assert core.counts() == (0, 1)
    outputs = run(core)
    assert [output.new_token_ids for output in outputs] == [[7], [7], [7]]
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert repr(core) == "<ScriptedCore running rank=0 requests=0 steps=3>"
    assert core.step_fn() == (None, False)


def test_several_tokens_per_step():
    """The last step gives what is left; without a limit there are sixteen tokens."""
    core = build(Script(tokens_per_step=10, step_seconds=0.001))
    add(core, request(max_tokens=None))
    assert [len(output.new_token_ids) for output in run(core)] == [10, 6]


def test_outputs_go_to_their_client():
    """Outputs are grouped by client; each group has the rank, and statistics if they were asked for."""
    core = build(log_stats=True, rank=5)
    add(core, request("a", client_index=0))
    add(core, request("b", client_index=1))
    by_client, _ = core.step_fn()
    assert {index: [o.request_id for o in batch.outputs] for index, batch in by_client.items()} == {0: ["a"], 1: ["b"]}
    assert all(batch.engine_index == 5 for batch in by_client.values())
    assert by_client[0].scheduler_stats.num_running_reqs == 2


def test_pooling_echoes_the_prompt():
    """A pooling request ends after one step with its prompt's embeddings; others too, once that is asked for."""
    core = build()
    add(core, request("p", pooling=True, prompt=(), prompt_embeds=[0.5]))
    (output,) = run(core)
    assert output.pooling_output == [0.5]
    assert output.finished
    call(core, "set_echo_tensor", True)
    add(core, request("g", prompt_embeds=[0.25], max_tokens=1))
    assert [output.pooling_output for output in run(core)] == [[0.25]]


@pytest.mark.parametrize("message", [request(prompt=()), request("used")])
def test_refused_requests(message):
    """A request without a prompt, or with an id in use, is a ValueError."""
    core = build()
    add(core, request("used"))
    with pytest.raises(ValueError, match=r"has no prompt|already running"):
        core.preprocess_add_request(message)


def test_aborts():
    """Aborted requests end in silence; ``abort_all`` says so, once."""
    core = build()
    for name in "abc":
        add(core, request(name))
    core.abort_requests(["a", "unknown"])
    core.abort_all()
    assert not core.has_work()
    (batch,) = core.take_outputs().values()
    assert [(output.request_id, output.finish_reason) for output in batch.outputs] == [
        ("b", FinishReason.ABORT),
        ("c", FinishReason.ABORT),
    ]
    assert core.take_outputs() == {}


def test_start_as_scripted():
    """The start reports progress, starts grandchildren and takes its time."""
    seen = []
    script = Script(
        progress=(("loading", 1, 2),), grandchildren=1, start_seconds=0.01, start_holds_gil=True, ready={"dtype": "x"}
    )
    core = build(script, progress=lambda *step: seen.append(step))
    (pid,) = call(core, "info")["grandchildren"]
    assert key_of(pid)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert seen == [("loading", 1, 2)]
    assert core.ready_response().dtype == "x"


def test_start_that_fails():
    """The scripted error is raised."""
    with pytest.raises(KeyError, match="marker"):
        build(Script(start_error=KeyError("marker")))


@pytest.mark.crash
def test_start_that_dies():
    """The scripted death ends the process."""
    run_script("""
        from engine_client import EngineConfig
        from engine_client.interfaces import EngineContext
        from engine_client.testing.scripted import Script, build_engine
        config = EngineConfig(additional_config={"script": Script(start_death="exit3")})
        build_engine(config, None, False, EngineContext())
    """).check(3)


def test_a_rank_in_lock_step():
    """Dummy steps are counted and take their time; a pause is answered when the group is idle."""
    core = build(Script(step_seconds=0.01))
    before = time.monotonic()
    core.execute_dummy_batch()
    assert time.monotonic() - before >= 0.01
    assert call(core, "info")["dummy_steps"] == 1
    idle: list[int] = []
    core.group_is_idle = lambda: bool(idle)
    future = call(core, "pause_scheduler", "abort")
    core.post_step(False)
    assert not future.done()
    idle.append(1)
    core.post_step(False)
    assert future.result(0) is None


def test_pause_and_resume():
    """A paused engine has no work; pausing with ``abort`` ends what runs, with ``keep`` it goes on afterwards."""
    core = build()
    add(core, request("a"))
    call(core, "pause_scheduler", "keep")
    assert not core.has_work()
    assert core.step_fn() == (None, False)
    assert call(core, "is_scheduler_paused")
    assert "paused" in repr(core)
    call(core, "resume_scheduler")
    assert core.has_work()
    call(core, "sleep")
    assert call(core, "is_sleeping")
    assert core.take_outputs()[0].outputs[0].finish_reason is FinishReason.ABORT
    call(core, "wake_up")
    assert not call(core, "is_sleeping")


def test_plain_utilities():
    """What clients call by name has a plain answer."""
    core = build()
    assert call(core, "get_supported_tasks") == ("generate",)
    assert call(core, "list_loras") == set()
    assert call(core, "profile", True, None) is None
    assert call(core, "reset_prefix_cache") is True
    assert call(core, "add_lora", object()) is call(core, "remove_lora", 1) is call(core, "pin_lora", 1) is True


def test_echo():
    """One argument comes back as it is, several as a tuple."""
    core = build()
    assert call(core, "echo", {1}) == {1}
    assert call(core, "echo", 1, 2) == (1, 2)


def test_failing_utility():
    """The given exception is raised."""
    with pytest.raises(LookupError):
        call(build(), "fail", LookupError("x"))


def test_failing_step():
    """The next step raises the given exception, with or without requests."""
    core = build()
    call(core, "fail_step", LookupError("x"))
    assert core.has_work()
    with pytest.raises(LookupError):
        core.step_fn()


def test_deferred():
    """An answer comes later, as a value or an exception, or never."""
    core = build()
    value = call(core, "deferred", 5, 0.01)
    error = call(core, "deferred", LookupError("x"), 0.01)
    never = call(core, "deferred")
    late = call(core, "deferred", 1, 60)
    wait([value, error])
    assert value.result() == 5
    assert isinstance(error.exception(), LookupError)
    assert not never.done()
    core.shutdown()
    assert not late.done()


def test_collective_rpc():
    """A function runs with the engine as its first argument."""
    assert call(build(rank=3), "collective_rpc", lambda core, a, b: (core.rank, a, b), None, (1,), {"b": 2}) == [
        (3, 1, 2)
    ]
    assert call(build(rank=3), "collective_rpc", lambda core: core.rank) == [3]


def test_changes_and_facts(caplog, capsys):
    """The script can be changed, facts of the process asked for, and lines logged and printed."""
    core = build()
    call(core, "set_script", {"token": 9})
    add(core, request("a", max_tokens=1, current_wave=4))
    assert call(core, "last_request").current_wave == 4
    assert call(core, "info")["requests"] == ["a"]
    assert call(core, "info")["pid"] == os.getpid()
    assert run(core)[0].new_token_ids == [9]
    call(core, "log", "a line", logging.ERROR)
    assert caplog.messages == ["a line"]
    call(core, "write", "stderr", "printed")
    assert capsys.readouterr().err == "printed\n"


def test_grandchild_on_request():
    """A grandchild is started when asked for."""
    pid = call(build(), "start_grandchild")
    os.kill(pid, 9)
    os.waitpid(pid, 0)
