"""Around every test: nothing may be left when it ends."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from helpers.procs import stop_multiprocessing_daemons

pytest_plugins = ["engine_client.testing.pytest_plugin"]
"""Where the library is not installed, or as it was before; setup.cfg turns its leak guard on."""

# tox has an environment of its own for these.
collect_ignore = [f"with_{name}" for name in ("torch", "transformers", "uvloop") if not find_spec(name)]
if not find_spec("transformers"):
    collect_ignore += [
        f"executors/test_{name}.py" for name in ("paged_cache", "torch_sampling", "transformers_progress")
    ]
if not find_spec("vllm"):
    collect_ignore.append("integrations")

settings.register_profile(
    "engine_client",
    deadline=None,  # a shared machine is slow now and then
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the leak guard is one; it is around all examples
    max_examples=int(os.environ.get("ENGINE_CLIENT_TEST_EXAMPLES", "100")),
    print_blob=True,
)
settings.load_profile("engine_client")


def pytest_configure() -> None:
    """Undo what a shell does to jobs in the background, and nohup: signals that tests send must not be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--share``; see run_shares.py."""
    parser.addoption("--share", metavar="K/N", default="1/1", help="run the K-th of N parts of the tests")


FAULTS = Path(__file__).parent / "faults"


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the fault scenarios, and leave out the tests of other shares."""
    for item in items:
        if FAULTS in item.path.parents:
            item.add_marker("fault")
    part, parts = map(int, config.getoption("--share").split("/"))
    mine = [zlib.crc32(item.nodeid.encode()) % parts == part - 1 for item in items]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, mine, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, mine, strict=True) if keep]


def pytest_collection_finish() -> None:
    """Leave the thousands of collected tests out of every garbage collection; many tests make some."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_daemons() -> Iterator[None]:
    """End what the standard library starts once and keeps, so that the next test is on its own."""
    yield
    stop_multiprocessing_daemons()


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> None:
    """Take away what the machine's owner may have set and the tests are not about."""
    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"):
        os.environ.pop(name, None)
