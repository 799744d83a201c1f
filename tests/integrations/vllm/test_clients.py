"""The factories that vLLM's front-ends call: what they make, and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_client.integrations.vllm.clients import factories
from helpers.vllm_scripts import run_vllm, told


def config(**parallel):
    """Return what the factories look at."""
    values = {"data_parallel_size": 1, "data_parallel_size_local": 1, **parallel}
    return SimpleNamespace(parallel_config=SimpleNamespace(**values), model_config=SimpleNamespace(is_moe=True))


def test_engines_in_process_are_left_to_vllm():
    """Without multiprocessing vLLM's own factory is asked."""
    make_client, _ = factories(lambda *args: args)
    assert make_client(False, False, "config", "executor", True) == (False, False, "config", "executor", True)


def test_what_is_not_carried():
    """Several API servers, several hosts and mixtures of experts in lock-step are refused by name."""
    _, make_async = factories(lambda *args: args)
    with pytest.raises(NotImplementedError, match="several API servers"):
        make_async(config(), None, False, {"input_address": "tcp://"}, 2, 0)
    with pytest.raises(NotImplementedError, match="mixture of experts"):
        make_async(config(data_parallel_size=2, data_parallel_size_local=2), None, False)
    several_hosts = config(data_parallel_size=2)
    several_hosts.model_config.is_moe = False
    with pytest.raises(NotImplementedError, match="several hosts"):
        make_async(several_hosts, None, False)


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """``AsyncLLM`` with two ranks of a dense model spreads its requests over both."""
    result = run_vllm(
        tmp_path,
        """
import asyncio

async def one(llm, prompt):
    async for output in llm.generate(prompt, params(200), request_id=str(prompt)):
        pass
    return list(output.outputs[0].token_ids)

async def main(llm):
    tokens = await asyncio.gather(*[one(llm, prompt) for prompt in PROMPTS])
    steps = [status.steps for status in llm.engine_core.engine_status()]
    tell(steps=steps, lengths=[len(row) for row in tokens], client=type(llm.engine_core).__name__)

if __name__ == "__main__":
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS, data_parallel_size=2))
    asyncio.run(main(llm))
    llm.shutdown()
    del llm
""",
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    values = told(result)
    assert values["client"] == "DPLBAsyncMPClient"
    assert values["lengths"] == [200] * 4
    assert min(values["steps"]) >= 200
