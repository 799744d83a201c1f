"""vLLM's engine core behind this library's loop, as AsyncLLM sees it: streams, utilities, pauses, death."""

from __future__ import annotations

import gc
from unittest import mock

import pytest

from engine_client.integrations.vllm.engine import VllmEngine
from helpers.vllm_scripts import run_vllm, told

SETUP = """
import asyncio

async def one(llm, number, max_tokens=12):
    got = []
    async for output in llm.generate(PROMPTS[number], params(max_tokens), request_id=f"{number}-{time.monotonic_ns()}"):
        got = list(output.outputs[0].token_ids)
    return got

async def outcome(awaitable):
    try:
        return await awaitable
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]

def load(worker):
    return worker.rank + 41

def nested(worker):
    return {"rows": [(1, 2.5), {"inner": worker.parallel_config.world_size}]}

def bad(worker):
    raise LookupError("no such thing", 7)

def slow(worker):
    time.sleep(60)

def run(main):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS))
    asyncio.run(main(llm))
    llm.shutdown()
    del llm  # its finalizer does not bear the interpreter's end
"""


def test_counts_and_outputs_are_in_this_librarys_order():
    """Waiting comes before running, and nothing is to be taken when nothing was aborted."""
    core = mock.Mock(batch_queue=None)
    core.scheduler.get_request_counts.return_value = (3, 5)
    core.scheduler.has_requests.return_value = False
    engine = VllmEngine(core)
    assert engine.counts() == (5, 3)
    assert not engine.has_work()
    assert engine.take_outputs() == {}


def test_the_end_is_not_held_up():
    """After the shutdown nothing is searched for garbage: the process ends next."""
    core = mock.Mock()
    gc.unfreeze()
    try:
        VllmEngine(core).shutdown()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    core.shutdown.assert_called_once_with()


@pytest.mark.slow
def test_streams(tmp_path):
    """Streams that run at once give the tokens that each gives alone; one that is cancelled is aborted."""
    result = run_vllm(
        tmp_path,
        SETUP
        + """
async def main(llm):
    together = await asyncio.gather(*[one(llm, number) for number in range(4)])
    alone = [await one(llm, number) for number in range(4)]
    task = asyncio.create_task(one(llm, 0, 4000))
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait([task])
    deadline = time.monotonic() + 60
    while (busy := llm.engine_core.engine_status()[0].running) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    tell(same=together == alone, lengths=[len(row) for row in alone], cancelled=task.cancelled(), busy=busy)

if __name__ == "__main__":
    run(main)
""",
    )
    assert told(result) == {"same": True, "lengths": [12] * 4, "cancelled": True, "busy": 0}


@pytest.mark.slow
def test_utilities(tmp_path):
    """Every utility of the surface reaches vLLM's engine; values, types of errors and pauses come back."""
    result = run_vllm(
        tmp_path,
        SETUP
        + """
async def pause(llm, mode):
    task = asyncio.create_task(one(llm, 1, 1000))
    await asyncio.sleep(0.3)
    await llm.pause_generation(mode=mode)
    paused, done = await llm.is_paused(), task.done()
    await llm.resume_generation()
    return [paused, await llm.is_paused(), len(await task) == 1000]

async def traceback_of(awaitable):
    try:
        await awaitable
    except Exception as error:
        import traceback
        return [type(error).__name__, error.args, "".join(traceback.format_exception(error))]

async def main(llm):
    core = llm.engine_core
    tell(nested=await llm.collective_rpc(nested), raised=await traceback_of(llm.collective_rpc(bad)))
    tell(**{f"pause_{mode}": await pause(llm, mode) for mode in ("abort", "wait", "keep")})
    for name in ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "get_supported_tasks", "list_loras"):
        tell(**{name: await outcome(getattr(llm, name)())})
    tell(rpc=await llm.collective_rpc(load))
    tell(by_name=await llm.collective_rpc("check_health"), bad_rpc=await outcome(llm.collective_rpc("nonsense")))
    tell(remove=await outcome(llm.remove_lora(3)), pin=await outcome(llm.pin_lora(3)))
    tell(profile=await outcome(llm.start_profile()), bad=await outcome(core.call_utility_async("shutdown")))
    tell(groups=await core.call_utility_async("get_kv_cache_group_metadata"))
    await core.execute_dummy_batch_async()
    os.mkdir(sys.argv[1] + "/sharded")
    await core.save_sharded_state_async(sys.argv[1] + "/sharded")
    tell(files=len(os.listdir(sys.argv[1] + "/sharded")))
    await llm.sleep(0)
    asleep = await llm.is_sleeping()
    await llm.wake_up(["scheduling"])
    tell(sleep=[asleep, await llm.is_sleeping()], after=len(await one(llm, 2)))

if __name__ == "__main__":
    run(main)
""",
    )
    values = told(result)
    assert values["pause_abort"] == [True, False, False]
    assert values["pause_wait"] == values["pause_keep"] == [True, False, True]
    assert values["reset_prefix_cache"] is True
    assert values["reset_mm_cache"] is values["reset_encoder_cache"] is None
    assert values["get_supported_tasks"] == ["generate"]
    for name in ("list_loras", "remove", "pin"):
        assert values[name] == ["RuntimeError", "LoRA is not enabled. Use --enable-lora to enable LoRA."]
    assert values["rpc"] == [41]
    assert values["by_name"] == [None]
    assert values["nested"] == [{"rows": [[1, 2.5], {"inner": 1}]}]
    assert values["raised"][:2] == ["LookupError", ["no such thing", 7]]
    assert "in bad" in values["raised"][2]
    assert values["bad_rpc"][0] == "NotImplementedError"
    assert values["profile"] == ["RuntimeError", "Profiler is not enabled."]
    assert values["bad"][0] == "AttributeError"
    assert values["groups"][0]["kind"] == "full_attention"
    assert values["files"] > 0
    assert values["sleep"] == [True, False]
    assert values["after"] == 12


@pytest.mark.slow
@pytest.mark.crash
def test_death(tmp_path):
    """An engine that is killed ends streams and pending calls with the error that vLLM's handlers know."""
    result = run_vllm(
        tmp_path,
        SETUP
        + """
async def main(llm):
    stream = asyncio.create_task(outcome(one(llm, 1, 4000)))
    await asyncio.sleep(0.5)
    call = asyncio.create_task(outcome(llm.collective_rpc(slow)))
    await asyncio.sleep(0.5)
    kill_engine()
    tell(stream=await stream, call=await call, errored=llm.errored)

if __name__ == "__main__":
    run(main)
""",
        env={"VLLM_LOGGING_LEVEL": "CRITICAL"},
    )
    values = told(result)
    for name in ("stream", "call"):
        assert values[name][0] == "EngineDeadError"
        assert "SIGKILL" in values[name][1]
    assert values["errored"] is True
