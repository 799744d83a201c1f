"""BC-17: what cannot be pickled is refused in the call that brings it, and nothing of it is sent or kept."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_client import FinishReason, SerializationError
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.colours import Driven
from helpers.scenes import EACH_COLOUR, Waiter, colours_with
from helpers.timing import DEADLOCK, took_at_most


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
    """Takes a second to pickle, as a word, and says when that has begun."""

    begun = threading.Event()

    def __reduce__(self) -> Any:
        self.begun.set()
        time.sleep(1.0)
        return str, ("arrived",)


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


def begin(client: Any, way: str, value: Any, name: str = "a") -> Any:
    """Send a value to the engine in a call, and return the answer, or in a request of this name."""
    if way == "utility":
        return client.call_utility("echo", value)
    return client.add_request(make_request(name, 1, trace_headers={"x": value}))


def send(client: Any, way: str, value: Any) -> None:
    """Send a value to the engine in a call or in a request, and check that it has been answered."""
    answer = begin(client, way, value)
    if way == "utility":
        assert type(answer) is type(value)
    else:
        assert collect(client, 1)["a"][-1].finish_reason is FinishReason.LENGTH


def check_nothing_is_left(client: Any) -> None:
    """Check that no call, no request and no byte of what was refused is kept here, or has reached the engines."""
    assert client.utility_results == {}
    assert len(session_of(client).in_flight) == 0
    assert sent(client) == 0
    assert client.call_utility("info")["requests"] == []


ways = pytest.mark.parametrize("way", ["utility", "request"])


@pytest.mark.parametrize("name", ["lock", "TextIO", "marker of getstate", "generator"])
@ways
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
    check_nothing_is_left(client)
    client.add_request(make_request("a", 1))
    assert collect(client, 1)["a"][-1].finish_reason is FinishReason.LENGTH


@ways
@pytest.mark.parametrize("value", [lambda: None, local_function()], ids=["lambda", "local"])
def test_bc17_functions_without_a_name_are_refused_by_name(
    client: Any, value: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra `notebook`, a lambda and a local function are refused, with what to do."""
    monkeypatch.setitem(__import__("sys").modules, "cloudpickle", None)
    with pytest.raises((SerializationError, AttributeError), match=r"lambda|inner"):
        begin(client, way, value)
    check_nothing_is_left(client)
    send(client, way, 1)


@ways
def test_bc17_a_value_is_pickled_once(client: Any, way: str) -> None:
    """What can be pickled once arrives; the second call with it is refused, and nothing of that is sent or kept."""
    once = RaisesTheSecondTime()
    send(client, way, once)
    with pytest.raises(ValueError, match="only once"):
        begin(client, way, once)
    check_nothing_is_left(client)
    send(client, way, 1)


def echo_elsewhere(client: Any, value: Any) -> Any:
    """Return the answer to a call of this thread, which has an event loop of its own where the client needs one."""
    if isinstance(client, Driven):
        return asyncio.run(client.asynchronous.call_utility_async("echo", value))
    return client.call_utility("echo", value)


@ways
@colours_with("sync")
def test_bc17_what_is_slow_to_pickle_holds_up_only_its_call(colour: str, way: str) -> None:
    """While a value takes a second in one thread, or event loop, the calls of others are answered; then it arrives.

    A value is pickled where the call is made, so that its errors are raised there: in asyncio, on the event loop.
    """
    Slow.begun.clear()
    with scripted_client(colour=colour) as client:
        slow = Waiter(lambda: begin(client, way, Slow(), "slow"), again=False)
        assert Slow.begun.wait(DEADLOCK)
        with took_at_most(0.8):
            for number in range(5):
                assert echo_elsewhere(client, number) == number
            if colour == "sync":
                send(client, "request", 1)
        assert slow.is_alive()
        slow.join(DEADLOCK)
        assert slow.error is None
        if way == "utility":
            assert slow.result == "arrived"
        else:
            assert collect(client, 1)["slow"][-1].finish_reason is FinishReason.LENGTH


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
