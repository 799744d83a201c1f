"""vLLM's LLM on this library: the same tokens, and an end to every call."""

from __future__ import annotations

import signal
from importlib.util import find_spec

import pytest

from helpers.vllm_scripts import run_vllm, told

GENERATE = """
if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(**SETTINGS)
    tell(tokens=generate(llm), client=type(llm.llm_engine.engine_core).__module__)
    import zmq
    tell(stub=zmq.__spec__.origin == "engine_client")
"""


@pytest.mark.slow
def test_the_same_tokens_as_in_process(tmp_path):
    """``LLM.generate`` in an engine process gives the tokens that it gives in process, without pyzmq too."""
    inside = told(run_vllm(tmp_path, GENERATE, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}))
    outside = told(run_vllm(tmp_path, GENERATE))
    assert inside["client"] == "vllm.v1.engine.core_client"
    assert outside["client"] == "engine_client.clients.sync"
    assert outside["tokens"] == inside["tokens"]
    assert [len(tokens) for tokens in outside["tokens"]] == [12] * 4
    assert outside["stub"] is (find_spec("zmq") is None)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("zmq") is None, reason="pyzmq is not installed")
def test_the_same_tokens_as_over_zmq(tmp_path):
    """``LLM.generate`` gives the tokens that it gives with vLLM's own client."""
    theirs = told(run_vllm(tmp_path, GENERATE, install=False, patience=20), clean=False)
    assert theirs["client"] == "vllm.v1.engine.core_client"
    assert told(run_vllm(tmp_path, GENERATE))["tokens"] == theirs["tokens"]


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_engine_ends_generate(tmp_path):
    """An engine that is killed during ``LLM.generate`` ends it with the error that vLLM knows for it."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    from vllm.v1.engine.exceptions import EngineDeadError
    llm = LLM(**SETTINGS)
    threading.Timer(1.0, kill_engine).start()
    try:
        generate(llm, max_tokens=4000)
    except EngineDeadError as error:
        tell(error=str(error), exit_name=error.exit_name)
""",
    )
    assert told(result)["exit_name"] == "SIGKILL(-9)"


@pytest.mark.slow
@pytest.mark.crash
def test_an_interrupt_leaves_nothing(tmp_path):
    """After Ctrl-C in ``LLM.generate`` the next one returns its own outputs, and nothing of the last."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(**SETTINGS)
    before = generate(llm)
    threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
    try:
        generate(llm, max_tokens=4000)
    except KeyboardInterrupt:
        tell(interrupted=True, left=llm.llm_engine.get_num_unfinished_requests())
    tell(same=generate(llm) == before)
""",
    )
    assert told(result) == {"interrupted": True, "left": 0, "same": True}


@pytest.mark.slow
@pytest.mark.crash
def test_no_orphan(tmp_path):
    """When the process of ``LLM`` is killed, its engine ends."""
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    llm = LLM(**SETTINGS)
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    generate(llm, max_tokens=4000)
""",
    )
    result.check(-signal.SIGKILL, stderr=result.stderr)


@pytest.mark.slow
def test_one_clear_error_for_what_needs_zmq(tmp_path):
    """Tensor parallelism over vLLM's own executor fails at the start; without pyzmq the error names it and why."""
    if find_spec("zmq") is not None:
        pytest.skip("pyzmq is installed")
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    try:
        LLM(**SETTINGS, tensor_parallel_size=2)
    except RuntimeError as error:
        tell(kind=type(error).__name__, error=str(error), cause=repr(error.__cause__))
""",
        env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )
    error = told(result)
    assert "several workers" in error["error"] + error["cause"]
    assert "pyzmq is not installed" in error["error"] + error["cause"]


CHAT = """
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], enforce_eager=True, dtype="float32", max_model_len=1024)
    questions = [[{"role": "user", "content": f"What is the capital of {name}?"}] for name in ("France", "Italy")]
    outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    tell(texts=[o.outputs[0].text for o in outputs], tokens=[list(o.outputs[0].token_ids) for o in outputs])
"""


@pytest.mark.slow
def test_real_weights(smollm, tmp_path):
    """SmolLM2 knows the capital of France, in the same words as in process, and as over ZMQ where there is pyzmq."""
    ours = told(run_vllm(tmp_path, CHAT, model=smollm))
    assert "Paris" in ours["texts"][0]
    assert told(run_vllm(tmp_path, CHAT, model=smollm, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})) == ours
    if find_spec("zmq") is not None:
        assert told(run_vllm(tmp_path, CHAT, model=smollm, install=False, patience=20), clean=False) == ours


EMBEDDINGS = """
if __name__ == "__main__":
    import torch
    from vllm import LLM
    llm = LLM(**SETTINGS, enable_prompt_embeds=True)
    torch.manual_seed(3)
    prompts = [{"prompt_embeds": torch.randn(600, 64)}]
    outputs = llm.generate(prompts, params(), use_tqdm=False)
    tell(tokens=list(outputs[0].outputs[0].token_ids))
"""


@pytest.mark.slow
def test_prompt_embeddings(tmp_path):
    """Prompt embeddings, larger than what the pipe carries, arrive equal: the model goes on from them as in process."""
    inside = told(run_vllm(tmp_path, EMBEDDINGS, env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}))
    assert told(run_vllm(tmp_path, EMBEDDINGS)) == inside
    assert len(inside["tokens"]) == 12


@pytest.mark.slow
def test_kv_events_are_refused(tmp_path):
    """Publishing KV events fails at the start; without pyzmq the error names it and why."""
    if find_spec("zmq") is not None:
        pytest.skip("pyzmq is installed")
    result = run_vllm(
        tmp_path,
        """
if __name__ == "__main__":
    from vllm import LLM
    try:
        LLM(**SETTINGS, kv_events_config={"enable_kv_cache_events": True})
    except RuntimeError as error:
        tell(kind=type(error).__name__, error=str(error) + repr(error.__cause__))
""",
    )
    error = told(result)
    assert error["kind"] == "StartupError"
    assert "publishing KV cache events needs ZMQ" in error["error"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("zmq") is None, reason="vLLM loads its plugins after what needs zmq")
def test_the_plugin(tmp_path):
    """``ENGINE_CLIENT_VLLM=1`` alone puts this library in place; without it the plugin does nothing."""
    unchanged = told(run_vllm(tmp_path, GENERATE, install=False, env={"ENGINE_CLIENT_VLLM": "1"}))
    assert unchanged["client"] == "engine_client.clients.sync"


@pytest.mark.slow
@pytest.mark.crash
def test_a_kill_at_the_start(tmp_path):
    """An engine that is killed while it loads fails the start at once, by name."""
    result = run_vllm(
        tmp_path,
        """
def kill_when_it_is_there():
    import psutil
    while not any("engine_client" in " ".join(child.cmdline()) for child in psutil.Process().children()):
        time.sleep(0.05)
    time.sleep(1.0)
    kill_engine()

if __name__ == "__main__":
    from vllm import LLM
    threading.Thread(target=kill_when_it_is_there, daemon=True).start()
    try:
        LLM(**SETTINGS)
    except RuntimeError as error:
        tell(kind=type(error).__name__, error=str(error))
""",
    )
    error = told(result)
    assert error["kind"] == "StartupError"
    assert "SIGKILL(-9)" in error["error"]
