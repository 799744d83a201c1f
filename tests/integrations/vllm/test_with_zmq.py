"""Where there is pyzmq: the same answers as vLLM's own client gives over its sockets, and the plugin."""

from __future__ import annotations

import pytest

from helpers.vllm_scripts import CHAT, GENERATE, run_vllm, told


def told_by_vllm(folder, source, **options):
    """Return what a script tells that runs vLLM as it is; its own client leaves a little behind."""
    theirs = told(run_vllm(folder, source, install=False, patience=20, **options), clean=False)
    assert theirs.pop("client") == "vllm.v1.engine.core_client"
    return theirs


@pytest.mark.slow
def test_the_same_tokens_as_over_zmq(dummy_answers, tmp_path):
    """``LLM.generate`` gives the tokens that it gives with vLLM's own client."""
    assert dummy_answers["client"] == "engine_client.clients.sync"
    assert dummy_answers["tokens"] == told_by_vllm(tmp_path, GENERATE)["tokens"]


@pytest.mark.slow
def test_real_weights_over_zmq(smollm, smollm_answers, tmp_path):
    """SmolLM2 answers in the words that come by vLLM's own client."""
    theirs = told_by_vllm(tmp_path, CHAT, model=smollm)
    assert {**theirs, "client": "engine_client.clients.sync"} == smollm_answers


@pytest.mark.slow
def test_the_plugin(dummy_answers, tmp_path):
    """``ENGINE_CLIENT_VLLM=1`` alone puts this library in place; without it the plugin does nothing."""
    unchanged = told(run_vllm(tmp_path, GENERATE, install=False, env={"ENGINE_CLIENT_VLLM": "1"}))
    assert unchanged == dummy_answers
