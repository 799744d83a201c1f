"""vLLM's LLM on this library: the same tokens, the guide, and the end of the interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from engine_client import ClientOptions
from engine_client.integrations.vllm import clients
from engine_client.integrations.vllm.install import install
from helpers.vllm_scripts import CHAT, GENERATE, HAS_ZMQ, run_vllm, told

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
GUIDE = Path(__file__).parents[3] / "docs" / "drop-in.md"


def test_the_last_options_count():
    """A second ``install()`` replaces the options of the first, and engines in process stay vLLM's."""

    class Interface:
        @staticmethod
        def make_client(*args):
            return "vLLM's"

    def act(name, action):
        if name.endswith("core_client"):
            action(SimpleNamespace(EngineCoreClient=Interface))

    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))
    with (
        mock.patch("engine_client.integrations.vllm.install.after_import", side_effect=act),
        mock.patch.object(clients, "EngineCoreClient") as ours,
    ):
        install(ClientOptions(ready_timeout=7))
        install(ClientOptions(ready_timeout=8))
        assert Interface.make_client(False, False, config, None, True) == "vLLM's"
        Interface.make_client(True, False, config, None, True)
        Interface.make_async_mp_client(config, None, True)
    assert [call.kwargs["options"].ready_timeout for call in ours.make_client.call_args_list] == [8, 8]


@pytest.mark.slow
def test_the_guide(smollm, tmp_path):
    """The program in the guide runs as it stands there, with the model from a folder."""
    program = re.search(r"^```py\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in program
    program = program.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(smollm))
    result = run_vllm(tmp_path, program, install=False)
    told(result)
    assert "Paris" in result.stdout


@pytest.mark.slow
def test_the_same_tokens_as_in_process(dummy_answers, tmp_path):
    """``LLM.generate`` in an engine process gives the tokens that it gives in process, and needs no pyzmq for it."""
    inside = told(run_vllm(tmp_path, GENERATE, env=IN_PROCESS))
    assert inside["client"] == "vllm.v1.engine.core_client"
    assert dummy_answers["client"] == "engine_client.clients.sync"
    assert dummy_answers["tokens"] == inside["tokens"]
    assert dummy_answers["kinds"] == inside["kinds"]
    assert [len(tokens) for tokens in inside["tokens"]] == [12] * 4
    assert dummy_answers["stubs"] == [True, True]
    assert inside["stubs"] == [not HAS_ZMQ] * 2


@pytest.mark.slow
def test_real_weights(smollm, smollm_answers, tmp_path):
    """SmolLM2 knows the capital of France, in the same words as in process."""
    assert "Paris" in smollm_answers["texts"][0]
    assert smollm_answers["client"] == "engine_client.clients.sync"
    inside = told(run_vllm(tmp_path, CHAT, model=smollm, env=IN_PROCESS))
    assert inside == {**smollm_answers, "client": "vllm.v1.engine.core_client"}


@pytest.mark.slow
def test_an_engine_that_nobody_shuts_down(tmp_path):
    """An ``AsyncLLM`` that lives until the interpreter's exit ends in silence, and its engine with it."""
    result = run_vllm(
        tmp_path,
        """
async def first(llm):
    async for output in llm.generate(PROMPTS[0], params(), request_id="0"):
        pass
    tell(length=len(output.outputs[0].token_ids))

if __name__ == "__main__":
    import asyncio
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS))
    asyncio.run(first(llm))
""",
    )
    assert told(result) == {"length": 12}


@pytest.mark.slow
def test_a_connector_without_sockets(tmp_path):
    """A KV connector that keeps blocks in files works: what it has stored is there, and the tokens stay the same."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    store = {"kv_connector_extra_config": {"shared_storage_path": sys.argv[1] + "/store"}}
    llm = LLM(**SETTINGS, kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both", **store})
    prompt = {"prompt_token_ids": [5 + number % 300 for number in range(400)]}
    first, second = ([list(o.outputs[0].token_ids) for o in llm.generate([prompt], params(), use_tqdm=False)]
                     for _ in range(2) if llm.reset_prefix_cache())
    tell(same=first == second, files=sum(len(files) for _, _, files in os.walk(sys.argv[1] + "/store")) > 0)
""",
    )
    assert told(result) == {"same": True, "files": True}
