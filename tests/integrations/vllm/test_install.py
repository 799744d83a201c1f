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
    theirs = told(run_vllm(tmp_path, GENERATE, install=False, patience=20))
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
