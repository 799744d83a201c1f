"""A small model with real weights, and clients of an engine that runs it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tqdm

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, ModelConfig
from engine_client.executors.transformers import TransformersExecutor
from helpers.smollm import make_smollm

# Transformers' own bars, in this process, leave no thread and no semaphore behind.
tqdm.tqdm.monitor_interval = 0
tqdm.tqdm.set_lock(threading.RLock())


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder of SmolLM2-135M-Instruct; ``ENGINE_CLIENT_TEST_SMOLLM`` names one that is there already."""
    ready = os.environ.get("ENGINE_CLIENT_TEST_SMOLLM")
    return Path(ready) if ready else make_smollm(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture
def make(smollm: Path) -> Iterator[Callable[..., Any]]:
    """Give a function that makes a client: multi-process or not, with sections of the configuration changed."""
    with ExitStack() as stack:

        def make(multiprocess: bool = False, options: ClientOptions | None = None, **sections: Any) -> Any:
            config = EngineConfig(model_config=ModelConfig(model=str(smollm), max_model_len=2048), **sections)
            config.additional_config.setdefault("kv_cache_bytes", 1 << 28)
            client = EngineCoreClient.make_client(
                multiprocess, False, config, TransformersExecutor, False, options=options
            )
            stack.callback(client.shutdown)
            return client

        yield make
