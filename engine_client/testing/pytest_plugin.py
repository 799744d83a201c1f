"""The pytest plugin: a leak guard around tests, and clients of scripted engines; off until it is asked for.

pytest loads it wherever this library is installed.  Until a test asks for one of its fixtures, or the guard is turned
on for all tests, it loads nothing of the library and changes nothing::

    [tool.pytest.ini_options]                # pyproject.toml
    engine_client_leak_guard = true          # or: pytest --engine-client-leak-guard

``leak_guard`` as a fixture (``pytest.mark.usefixtures("leak_guard")``) guards single tests, classes or modules;
``@pytest.mark.no_leak_guard`` leaves a test out.

Threads: pytest's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from engine_client.deadline import check_timeout

if TYPE_CHECKING:
    from engine_client.testing.leaks import LeakGuard

__all__ = ["GuardEverywhere", "leak_guard", "pytest_addoption", "pytest_configure", "scripted_engine"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer what turns the guard on for all tests."""
    what = "fail tests that leave a process, thread, descriptor or shared memory behind"
    parser.getgroup("engine_client").addoption("--engine-client-leak-guard", action="store_true", help=what)
    parser.addini("engine_client_leak_guard", what, type="bool", default=False)
    parser.addini("engine_client_leak_patience", "seconds that what was ended gets to disappear", default="10")


def pytest_configure(config: pytest.Config) -> None:
    """Turn the guard on, if that is wanted.

    Raises:
        pytest.UsageError: the patience is no number of seconds.
    """
    config.addinivalue_line("markers", "no_leak_guard: engine_client's leak guard leaves this test out")
    _patience(config)
    if config.getoption("--engine-client-leak-guard") or config.getini("engine_client_leak_guard"):
        config.pluginmanager.register(GuardEverywhere(), "engine_client_leak_guard")


class GuardEverywhere:
    """Has every test use ``leak_guard``; registered with pytest while the guard is on."""

    @pytest.fixture(autouse=True)
    def _leak_guard_everywhere(self, request: pytest.FixtureRequest) -> None:
        if request.node.get_closest_marker("no_leak_guard") is None:
            request.getfixturevalue("leak_guard")


@pytest.fixture
def leak_guard(request: pytest.FixtureRequest) -> Iterator[LeakGuard]:
    """Fail the test if a process, thread, descriptor or shared memory of it is left after its end.

    What fixtures of modules and sessions hold was there before the test, and may stay.
    """
    from engine_client.testing.leaks import LeakGuard  # noqa: PLC0415  # see the module docstring

    with LeakGuard(_patience(request.config)) as guard:
        yield guard


@pytest.fixture
def scripted_engine() -> Iterator[Callable[..., Any]]:
    """Return a function that makes clients of scripted engines; what it made is shut down when the test ends.

    ``scripted_engine(script=None, kind="sync", config=None, **options)``: how the engine behaves (``testing.Script``),
    the client (``"sync"`` or ``"async"``), its configuration, and fields of ``ClientOptions``.
    """
    from engine_client.testing.clients import make_client  # noqa: PLC0415  # see the module docstring

    clients: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        clients.append(make_client(*args, **kwargs))
        return clients[-1]

    yield make
    for client in reversed(clients):
        client.shutdown()


def _patience(config: pytest.Config) -> float:
    text = config.getini("engine_client_leak_patience")
    try:
        seconds = check_timeout(float(text), "engine_client_leak_patience")
    except ValueError:
        raise pytest.UsageError(f"engine_client_leak_patience must be a number of seconds, not {text!r}") from None
    return 0.0 if seconds is None else seconds
