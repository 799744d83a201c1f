"""Around every test: nothing may be left when it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from engine_client.testing.leaks import LeakGuard
from helpers.procs import stop_multiprocessing_daemons

# tox has an environment of its own for these.
collect_ignore = [] if find_spec("torch") else ["with_torch"]

settings.register_profile(
    "engine_client",
    deadline=None,  # a shared machine is slow now and then
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the leak guard is one; it is around all examples
    max_examples=int(os.environ.get("ENGINE_CLIENT_TEST_EXAMPLES", "100")),
    print_blob=True,
)
settings.load_profile("engine_client")


@pytest.fixture(autouse=True)
def leak_guard() -> Iterator[LeakGuard]:
    """Fail the test if a process, thread, descriptor or shared memory of it is left ten seconds after its end."""
    with LeakGuard() as guard:
        yield guard
    stop_multiprocessing_daemons()


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> None:
    """Take away what the machine's owner may have set and the tests are not about."""
    for name in ("VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"):
        os.environ.pop(name, None)
