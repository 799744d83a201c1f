"""BC-17: what cannot be pickled is refused in the call that brings it, and nothing of it is sent or kept."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_client import FinishReason, SerializationError
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.scenes import EACH_COLOUR
from helpers.timing import took_at_most


class RaisesInGetstate:
    """Cannot be pickled, and says why."""

    def __getstate__(self) -> Any:
        raise ValueError("marker of getstate")


class RaisesTheSecondTime:
    """Can be pickled once."""

    def __init__(self) -> None:
        self.count = 0

    def __getstate__(self) -> Any:
        self.count += 1
        if self.count > 1:
            raise ValueError("only once")
        return {"count": 0}


class Slow:
    """Takes a while to pickle."""

    def __getstate__(self) -> Any:
        time.sleep(0.3)
        return {"slow": True}


def local_function() -> Callable[[], None]:
    """Return a function that no other process can find."""

    def inner() -> None:
        """Do nothing."""

    return inner


def unsendable() -> dict[str, Any]:
    """Return a value of each kind that cannot be pickled, by what names it in the error."""
    return {
        "lock": threading.Lock(),
        "TextIO": open(os.devnull, encoding="utf-8"),  # closed by the test
        "marker of getstate": RaisesInGetstate(),
        "generator": (x for x in ()),
    }


@pytest.fixture(params=EACH_COLOUR)
def client(request):
    """Yield a client of scripted engines."""
    with scripted_client(colour=request.param) as made:
        yield made


def sent(client: Any) -> int:
    """Return how many bytes wait for the engines."""
    return sum(link.channel.backlog for link in session_of(client).links.values())


@pytest.mark.parametrize("name", ["lock", "TextIO", "marker of getstate", "generator"])
@pytest.mark.parametrize("way", ["utility", "request"])
def test_bc17_what_cannot_be_pickled_is_refused_in_the_call(client: Any, name: str, way: str) -> None:
    """The call raises and names the culprit; no id, no future, no byte of it stays; the next call works."""
    values = unsendable()
    value = values[name]
    with took_at_most(2.0), pytest.raises((TypeError, ValueError), match=name):
        if way == "utility":
            client.call_utility("echo", [1, value])
        else:
            client.add_request(make_request("a", 1, trace_headers={"x": value}))
    values["TextIO"].close()
    assert client.utility_results == {}
    assert len(session_of(client).in_flight) == 0
    assert sent(client) == 0
    assert client.call_utility("info")["requests"] == []
    client.add_request(make_request("a", 1))
    assert collect(client, 1)["a"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("value", [lambda: None, local_function()], ids=["lambda", "local"])
def test_bc17_functions_without_a_name_are_refused_by_name(
    client: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra `notebook`, a lambda and a local function are refused, with what to do."""
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises((SerializationError, AttributeError), match=r"lambda|inner"):
        client.call_utility("echo", value)
    assert client.utility_results == {}
    assert client.call_utility("echo", 1) == 1


def test_bc17_a_value_is_pickled_once(client: Any) -> None:
    """What can be pickled once arrives; the second call is refused; what is slow to pickle holds up only its call."""
    once = RaisesTheSecondTime()
    assert isinstance(client.call_utility("echo", once), RaisesTheSecondTime)
    with pytest.raises(ValueError, match="only once"):
        client.call_utility("echo", once)
    assert isinstance(client.call_utility("echo", Slow()), Slow)


def test_bc17_many_threads_fail_at_the_same_time(client: Any) -> None:
    """Each gets its own error, and those that send good values their answers."""
    wrong: list[Any] = []

    def work(number: int) -> None:
        for index in range(20):
            try:
                if number % 2:
                    client.call_utility("echo", threading.Lock())
                    wrong.append("not refused")
                elif client.call_utility("echo", (number, index)) != (number, index):
                    wrong.append("another's answer")
            except TypeError:
                if not number % 2:
                    wrong.append("a good value refused")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert client.utility_results == {}


def test_bc17_a_result_that_cannot_be_pickled_fails_its_call_alone(client: Any) -> None:
    """The caller learns why; another call that waits meanwhile is answered."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(client.call_utility("deferred", "mine", 0.2)))
    thread.start()
    with took_at_most(2.0), pytest.raises(SerializationError, match="lock"):
        client.call_utility("unpicklable")
    thread.join(30)
    assert answers == ["mine"]


def test_bc17_shutdown_is_normal_afterwards() -> None:
    """After refusals a client ends as any other."""
    with scripted_client() as client:
        for _ in range(3):
            with pytest.raises(TypeError):
                client.call_utility("echo", threading.Lock())
        with took_at_most(1.0):
            client.shutdown()
