"""Where there is pyzmq: the same answers as vLLM's own client gives over its sockets, and the plugin."""

from __future__ import annotations

import pytest

from helpers.vllm_scripts import CHAT, GENERATE, run_vllm, told


def told_by_vllm(folder, source, **options):
    """Return what a script tells that runs vLLM as it is; its own client leaves a little behind."""
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **options.pop("env", {})}  # for functions in collective_rpc
    theirs = told(run_vllm(folder, source, install=False, patience=20, env=env, **options), clean=False)
    assert theirs.pop("client") == "vllm.v1.engine.core_client"
    return theirs


@pytest.mark.slow
def test_the_same_tokens_as_over_zmq(dummy_answers, tmp_path):
    """Without pyzmq ``LLM.generate`` gives the tokens that it gives with vLLM's own client over pyzmq."""
    theirs = told_by_vllm(tmp_path, GENERATE)
    assert theirs["stubs"] == [False, False]
    assert dummy_answers["stubs"] == [True, True]
    assert dummy_answers["client"] == "engine_client.clients.sync"
    assert dummy_answers["tokens"] == theirs["tokens"]
    assert dummy_answers["kinds"] == theirs["kinds"]


@pytest.mark.slow
def test_real_weights_over_zmq(smollm, smollm_answers, tmp_path):
    """Without pyzmq SmolLM2 answers in the words that come by vLLM's own client over pyzmq."""
    theirs = told_by_vllm(tmp_path, CHAT, model=smollm)
    assert {**theirs, "client": "engine_client.clients.sync"} == smollm_answers


@pytest.mark.slow
def test_the_plugin(dummy_answers, tmp_path):
    """``ENGINE_CLIENT_VLLM=1`` alone puts this library in place, beside pyzmq; without it the plugin does nothing."""
    unchanged = told(run_vllm(tmp_path, GENERATE, install=False, env={"ENGINE_CLIENT_VLLM": "1"}))
    assert unchanged == {**dummy_answers, "stubs": [False, False]}


WORKERS = """
if __name__ == "__main__":
    import zmq
    from vllm import LLM
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{sys.argv[1]}/e"}
    llm = LLM(**SETTINGS, tensor_parallel_size=2, block_size=16, kv_events_config=events)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.RCVTIMEO, 30_000)
        socket.connect(events["endpoint"])
        time.sleep(1)
        tell(tokens=generate(llm, max_tokens=40), client=type(llm.llm_engine.engine_core).__module__)
        tell(event=b"BlockStored" in b"".join(socket.recv_multipart()))
"""


@pytest.mark.slow
def test_what_needs_pyzmq_has_it(tmp_path):
    """Several workers and published KV events work on this library where there is pyzmq, as with vLLM's own client."""
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ours = told(run_vllm(tmp_path, WORKERS, env=threads))
    assert ours["client"] == "engine_client.clients.sync"
    assert ours["event"] is True
    assert told_by_vllm(tmp_path, WORKERS, env=threads)["tokens"] == ours["tokens"]
