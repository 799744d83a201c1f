"""The factories that vLLM's front-ends call: what they make, and what they refuse."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest import mock

import pytest

from engine_client.integrations.vllm import clients
from engine_client.integrations.vllm.clients import factories
from engine_client.integrations.vllm.refusals import UnsupportedError
from engine_client.integrations.vllm.zmq_stub import ZMQUnavailableError
from helpers.vllm_scripts import ASYNC, run_vllm, told


def config(**parallel):
    """Return what the factories look at."""
    values = {"data_parallel_size": 1, "data_parallel_size_local": 1, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**values), model_config=SimpleNamespace(is_moe=True))


def test_engines_in_process_are_left_to_vllm():
    """Without multiprocessing vLLM's own factory is asked."""
    make_client, _ = factories(lambda *args: args)
    assert make_client(False, False, "config", "executor", True) == (False, False, "config", "executor", True)


def test_what_is_not_carried():
    """Several API servers, several hosts, Ray and mixtures of experts in lock-step are refused by name."""
    _, make_async = factories(lambda *args: args)
    with pytest.raises(UnsupportedError, match="several API servers"):
        make_async(config(), None, False, {"input_address": "tcp://"}, 2, 0)
    with pytest.raises(UnsupportedError, match="mixture of experts"):
        make_async(config(data_parallel_size=2, data_parallel_size_local=2), None, False)
    with pytest.raises(UnsupportedError, match="backend 'ray'"):
        make_async(config(data_parallel_backend="ray"), None, False)
    several_hosts = config(data_parallel_size=2)
    several_hosts.model_config.is_moe = False
    with pytest.raises(UnsupportedError, match="several hosts"):
        make_async(several_hosts, None, False)


@pytest.mark.parametrize("stub", [True, False])
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector"])
def test_connectors_that_would_wait_for_ever(name, several, stub):
    """A KV connector that opens its socket in a thread is refused by name without pyzmq, inside of another too."""
    inner = {"kv_connector": name, "kv_connector_extra_config": {}}
    several_of_them = {"connectors": [{"kv_connector": "ExampleConnector"}, inner]}
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": several_of_them} if several else inner
    asks = config()
    asks.kv_transfer_config = SimpleNamespace(**transfer)
    with (
        mock.patch.object(clients, "is_stub", return_value=stub),
        mock.patch.object(clients, "EngineCoreClient") as ours,
    ):
        _, make_async = factories(lambda *args: args)
        if stub:
            with pytest.raises(ZMQUnavailableError, match=f"the KV connector {name} needs ZMQ sockets"):
                make_async(asks, None, False)
        else:
            make_async(asks, None, False)
    assert ours.make_client.called is not stub


RANKS = (
    ASYNC
    + """
def leave_a_mark(worker, folder):
    print("leaves a mark", flush=True)
    with open(f"{folder}/rank-{os.getpid()}", "w"):
        return os.getpid()

def slow(worker):
    time.sleep(600)

async def stream(llm, name, number, max_tokens=300, rank=None):
    ask = llm.generate(PROMPTS[number % 4], params(max_tokens), request_id=name, data_parallel_rank=rank)
    async for output in ask:
        pass
    return list(output.outputs[0].token_ids)

def begin(llm, *names, **options):
    return [asyncio.create_task(stream(llm, name, index, **options)) for index, name in enumerate(names)]

async def held(llm, total):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        counts = [status.waiting for status in llm.engine_core.engine_status()]
        if sum(counts) == total:
            return counts
        await asyncio.sleep(0.01)
    return counts

async def balance(llm):
    alone = [await stream(llm, f"alone-{index}", index) for index in range(4)]
    await llm.pause_generation(mode="keep")  # what is held back can be counted
    tasks = begin(llm, *[f"even-{index}" for index in range(16)])
    tell(even=await held(llm, 16))
    await llm.resume_generation()
    together = await asyncio.gather(*tasks)
    tell(same=[row == alone[index % 4] for index, row in enumerate(together)])
    await llm.pause_generation(mode="keep")
    busy = begin(llm, *[f"busy-{index}" for index in range(8)], rank=1)
    tell(busy=await held(llm, 8))
    more = begin(llm, *[f"more-{index}" for index in range(4)])
    tell(filled=await held(llm, 12))
    for task in busy + more:
        task.cancel()
    await asyncio.wait(busy + more)
    tell(empty=await held(llm, 0))
    await llm.resume_generation()

async def utilities(llm):
    os.mkdir(f"{sys.argv[1]}/marks")
    (pid,) = await llm.collective_rpc(leave_a_mark, None, (f"{sys.argv[1]}/marks",))
    await llm.pause_generation(mode="keep")
    paused = [status.is_paused for status in llm.engine_core.engine_status()]
    await llm.resume_generation()
    tell(marks=sorted(os.listdir(f"{sys.argv[1]}/marks")), pid=pid, paused=paused)

async def death(llm):
    import psutil
    call = asyncio.create_task(llm.collective_rpc(slow))
    tasks = begin(llm, "one", "two", max_tokens=3000)
    await asyncio.sleep(0.5)
    ranks = [child for child in psutil.Process().children() if "engine_client" in " ".join(child.cmdline())]
    ranks[0].kill()
    outcomes = await asyncio.gather(call, *tasks, return_exceptions=True)
    tell(ranks=len(ranks), outcomes=[type(outcome).__name__ for outcome in outcomes], errored=llm.errored)

async def main(llm):
    tell(client=type(llm.engine_core).__name__)
    await balance(llm)
    await utilities(llm)
    await death(llm)

if __name__ == "__main__":
    run(main, data_parallel_size=2)
"""
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Tell what ``AsyncLLM`` has met with two ranks of a dense model, one of which was killed at last."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    result = run_vllm(tmp_path_factory.mktemp("ranks"), RANKS, env=environment)
    return {**told(result), "log": [line for line in result.stdout.splitlines() if "leaves a mark" in line]}


@pytest.mark.slow
def test_two_ranks_are_balanced(ranks):
    """Requests go where there is less to do, evenly if all is equal; each gives the tokens that it gives alone."""
    assert ranks["client"] == "DPLBAsyncMPClient"
    assert ranks["even"] == [8, 8]
    assert ranks["same"] == [True] * 16
    assert ranks["busy"] == [0, 8], "a request can choose its rank"
    assert ranks["filled"] == [4, 8]
    assert ranks["empty"] == [0, 0]


@pytest.mark.slow
def test_utilities_reach_two_ranks(ranks):
    """A utility runs on both ranks; its result is one of theirs, as with vLLM's client."""
    assert len(ranks["marks"]) == 2
    assert f"rank-{ranks['pid']}" in ranks["marks"]
    assert ranks["paused"] == [True, True]


@pytest.mark.slow
def test_ranks_in_the_log(ranks):
    """Each line of a rank says which one it is of, and which process, as with vLLM's own client."""
    pids = [mark.removeprefix("rank-") for mark in ranks["marks"]]
    lines = [re.fullmatch(r"\(EngineCore_DP([01]) pid=(\d+)\) leaves a mark", line) for line in ranks["log"]]
    assert sorted(line[1] for line in lines) == ["0", "1"]
    assert sorted(line[2] for line in lines) == sorted(pids)


@pytest.mark.slow
@pytest.mark.crash
def test_death_of_a_rank(ranks):
    """A rank that is killed ends calls and streams of both with the error that vLLM's handlers know."""
    assert ranks["ranks"] == 2
    assert ranks["outcomes"] == ["EngineDeadError"] * 3
    assert ranks["errored"] is True
