"""vLLM's engine core behind this library's loop, as AsyncLLM sees it: streams and death."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from engine_client.integrations.vllm import engine as engines
from engine_client.integrations.vllm.engine import VllmEngine, build_engine
from engine_client.interfaces import EngineContext
from helpers.vllm_scripts import ASYNC, run_vllm, told

SCRIPT = (
    ASYNC
    + """
async def outcome(awaitable):
    try:
        return await awaitable
    except Exception as error:
        return [type(error).__name__, str(error).splitlines()[0]]

def slow(worker):
    time.sleep(600)

def columns():
    import numpy
    from engine_client.protocol import batch, output_fields
    from engine_client.protocol.outputs import outputs_from
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
    rows = [EngineCoreOutput("a", [1]), EngineCoreOutput("b", [2, 3], finish_reason=FinishReason.STOP, stop_reason="x"),
            EngineCoreOutput("c", [], routed_experts=numpy.arange(6).reshape(2, 3)),
            EngineCoreOutput("d", [4], num_nans_in_logits=2)]
    differs = output_fields.comparison(EngineCoreOutput)
    frame, finished = batch.encode_outputs(EngineCoreOutputs(outputs=rows), {name: ord(name) for name in "abcd"})
    decoded, _ = batch.with_values(batch.decode_columns(frame))
    outputs, _ = outputs_from(decoded, {ord(name): name for name in "abcd"})
    same = [getattr(new, name) == getattr(old, name) for new, old in zip(outputs.outputs, rows, strict=True)
            for name in EngineCoreOutput.__struct_fields__ if name != "routed_experts"]
    experts = [output.routed_experts for output in outputs.outputs]
    tell(differ=[differs(row) for row in rows], finished=finished, fields=[len(same), all(same)])
    tell(experts=[None if array is None else array.tolist() for array in experts])

async def streams(llm):
    together = await asyncio.gather(*[one(llm, number) for number in range(4)])
    alone = [await one(llm, number) for number in range(4)]
    seen = []
    task = asyncio.create_task(one(llm, 0, 4000, seen))
    await advance(seen)
    task.cancel()
    await asyncio.wait([task])
    deadline = time.monotonic() + 60
    while (busy := llm.engine_core.engine_status()[0].running) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    tell(same=together == alone, lengths=[len(row) for _, row in alone], cancelled=task.cancelled(), busy=busy)

async def cancellations(llm):
    processor, left, cancelled = llm.output_processor, [], 0
    for turns in range(40):
        task = asyncio.create_task(one(llm, turns % 4, 4000))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        left.append(len(processor.request_states) + len(processor.external_req_ids))
    tell(cancelled_at=cancelled, left=sum(left), same_after=await one(llm, 0) == await one(llm, 0))

async def death(llm):
    seen = []
    stream = asyncio.create_task(outcome(one(llm, 1, 4000, seen)))
    await advance(seen)
    call = asyncio.create_task(outcome(llm.collective_rpc(slow)))
    await asyncio.sleep(0.5)
    kill_engine()
    began = time.monotonic()
    tell(stream=await stream, call=await call, seconds=time.monotonic() - began, errored=llm.errored)
    tell(later=await outcome(llm.collective_rpc(slow)), refused=await outcome(one(llm, 2)))

async def main(llm):
    columns()
    await streams(llm)
    await cancellations(llm)
    await death(llm)

if __name__ == "__main__":
    run(main)
"""
)


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """Tell what ``AsyncLLM`` has met with an engine that at last was killed."""
    return told(run_vllm(tmp_path_factory.mktemp("lived"), SCRIPT, env={"VLLM_LOGGING_LEVEL": "CRITICAL"}))


def test_counts_and_outputs_are_in_this_librarys_order():
    """Waiting comes before running, and nothing is to be taken when nothing was aborted."""
    core = mock.Mock(batch_queue=None)
    core.scheduler.get_request_counts.return_value = (3, 5)
    core.scheduler.has_requests.return_value = False
    engine = VllmEngine(core)
    assert engine.counts() == (5, 3)
    assert not engine.has_work()
    assert engine.take_outputs() == {}


def built(rank, **parallel):
    """Return the configuration with which a rank's engine core was built, and the name of the process in vLLM's log."""
    names = ("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_index")
    values = {**dict.fromkeys(names, rank), "data_parallel_rank_local": None, "data_parallel_external_lb": False}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**values, **parallel}), kv_transfer_config=SimpleNamespace(engine_id="e")
    )
    core, logs = ModuleType("vllm.v1.engine.core"), ModuleType("vllm.utils.system_utils")
    core.EngineCore, logs.decorate_logs = mock.Mock(), mock.Mock()
    modules = {module.__name__: module for module in (core, logs)}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(engines, "_without_queue"):
        build_engine(config, None, False, EngineContext(rank=rank))
    assert core.EngineCore.call_args.args[0] is config
    return config, logs.decorate_logs.call_args.args


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_can_be_told_apart(size):
    """Each of several ranks has a name for transfers, one for the log and its place on this host; else it is alone."""
    for rank in range(size):
        config, names = built(rank, data_parallel_size=size)
        parallel = config.parallel_config
        assert names == (f"EngineCore_DP{rank}" if size > 1 else "EngineCore",)
        assert config.kv_transfer_config.engine_id == (f"e_dp{rank}" if size > 1 else "e")
        assert parallel.data_parallel_rank_local == (rank if size > 1 else None)
        assert (parallel.data_parallel_size, parallel.data_parallel_rank, parallel.data_parallel_index) == (1, 0, rank)


@pytest.mark.parametrize("local", [None, 1])
def test_a_rank_that_somebody_else_balances(local):
    """A rank with a client of its own is the first of this host, unless its user says which one it is."""
    config, _ = built(2, data_parallel_size=3, data_parallel_external_lb=True, data_parallel_rank_local=local)
    assert config.parallel_config.data_parallel_rank_local == (local or 0)
    assert config.kv_transfer_config.engine_id == "e_dp2"


@pytest.mark.parametrize("caches", [True, False])
def test_what_the_cache_keeps_is_copied(caches):
    """Multimodal inputs are copied, however they are nested, if the engine caches them; what it has comes without."""
    core = mock.Mock(mm_receiver_cache=mock.Mock() if caches else None)
    tensors = [mock.Mock(spec=["clone"]) for _ in range(3)]
    elements = {"a": mock.Mock(data=tensors[0]), "b": mock.Mock(data=[tensors[1], (tensors[2], 7)])}
    request = mock.Mock(mm_features=[mock.Mock(data=elements), mock.Mock(data=None)])
    VllmEngine(core).preprocess_add_request(request)
    kept = [tensor.clone() if caches else tensor for tensor in tensors]
    assert elements["a"].data is kept[0]
    assert elements["b"].data == [kept[1], (kept[2], 7)]


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


WITHOUT_GUARD = """
with open(sys.argv[1] + "/ran", "a") as file:
    print(__name__, file=file)

def answer(worker):
    return __name__

from vllm import LLM
llm = LLM(**SETTINGS)

def runs():
    with open(sys.argv[1] + "/ran") as file:
        return file.read().split()

expected, before = generate(llm), runs()
(named,) = llm.collective_rpc(answer)
tell(before=before, named=named, after=runs(), same=generate(llm) == expected)
"""


@pytest.mark.slow
def test_a_program_without_a_guard(tmp_path):
    """The engine does not run the program, unless it gets a function of it: then as far as where the engine is made."""
    assert told(run_vllm(tmp_path, WITHOUT_GUARD)) == {
        "before": ["__main__"],
        "named": "__mp_main__",
        "after": ["__main__", "__mp_main__"],
        "same": True,
    }


@pytest.mark.slow
def test_vllms_outputs(lived):
    """vLLM's class of outputs tells at once which have more than tokens; all that they say arrives."""
    assert lived["differ"] == [False, True, True, True]
    assert lived["finished"] == ["b"]
    assert lived["fields"] == [48, True]
    assert lived["experts"] == [None, None, [[0, 1, 2], [3, 4, 5]], None]


@pytest.mark.slow
def test_streams(lived):
    """Streams that run at once give the tokens that each gives alone; one that is cancelled is aborted."""
    assert lived["same"] is lived["cancelled"] is True
    assert lived["lengths"] == [12] * 4
    assert lived["busy"] == 0


@pytest.mark.slow
def test_cancelled_at_any_turn(lived):
    """A stream that is cancelled at whatever turn of the event loop, also while it is sent, leaves nothing in vLLM."""
    assert lived["cancelled_at"] == 40
    assert lived["left"] == 0
    assert lived["same_after"] is True


@pytest.mark.slow
@pytest.mark.crash
def test_death(lived):
    """An engine that is killed ends streams and pending calls, at once, with the error that vLLM's handlers know."""
    for name in ("stream", "call", "later", "refused"):
        assert lived[name][0] == "EngineDeadError"
    for name in ("stream", "call"):
        assert "SIGKILL" in lived[name][1]
    assert lived["errored"] is True
    assert lived["seconds"] < 30
