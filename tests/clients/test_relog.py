"""What engines log is logged again here, and one knows by which."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from engine_client import ClientOptions, EngineConfig, EngineCoreClient, ParallelConfig
from helpers.clients import pids_of
from helpers.engines import Recording
from helpers.timing import DEADLOCK, eventually


class Talking(Recording):
    def __init__(self, vllm_config: Any = None) -> None:
        super().__init__(vllm_config)
        logging.getLogger("my.executor").info("loading")

    def talk(self) -> None:
        logging.getLogger("my.executor").warning("rank %d talks", self.vllm_config.parallel_config.data_parallel_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_records_come_with_rank_and_pid(ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the start and later ones, of each rank, under their own loggers and levels."""
    caplog.set_level(logging.INFO)
    config = EngineConfig(parallel_config=ParallelConfig(data_parallel_size=ranks))
    options = ClientOptions(forward_logs=logging.INFO)
    with EngineCoreClient.make_client(True, ranks > 1, config, Talking, False, options=options) as client:
        prefixes = [f"(EngineCore_DP{rank} pid={pid})" for rank, pid in enumerate(pids_of(client))]

        def found() -> set[tuple[str, int, str]]:
            return {record for record in caplog.record_tuples if record[0] == "my.executor"}

        assert {("my.executor", logging.INFO, f"{prefix} loading") for prefix in prefixes} <= found()
        if ranks == 1:
            client.collective_rpc("talk")
        else:
            asyncio.run(client.collective_rpc_async("talk"))
        said = {("my.executor", logging.WARNING, f"{p} rank {rank} talks") for rank, p in enumerate(prefixes)}
        eventually(lambda: said <= found(), DEADLOCK)


def test_without_the_option_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    """By default an engine's log stays in its process."""
    caplog.set_level(logging.INFO)
    with EngineCoreClient.make_client(True, False, EngineConfig(), Talking, False) as client:
        client.collective_rpc("talk")
        client.check_health()
    assert "talks" not in caplog.text


def test_a_handler_that_fails_is_no_fault_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """What a handler of the program raises ends no engine, and is told; one that fails on that, too, likewise."""
    options = ClientOptions(forward_logs=logging.WARNING)
    logger = logging.getLogger("my.executor")
    with EngineCoreClient.make_client(True, False, EngineConfig(), Talking, False, options=options) as client:

        def fail(record: logging.LogRecord) -> bool:
            raise RuntimeError("a broken filter")

        logger.addFilter(fail)
        try:
            client.collective_rpc("talk")
            eventually(lambda: "a broken filter" in caplog.text, DEADLOCK)
            assert "of 'my.executor' failed on what engine core 0" in caplog.text
            logging.getLogger("engine_client").addFilter(fail)
            logging.getLogger("engine_client.clients.relog").addFilter(fail)
            client.collective_rpc("talk")
            client.check_health()
        finally:
            for name in ("my.executor", "engine_client", "engine_client.clients.relog"):
                logging.getLogger(name).removeFilter(fail)
        client.collective_rpc("talk")
        eventually(lambda: "talks" in caplog.text, DEADLOCK)
