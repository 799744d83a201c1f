"""BC-59, engines that are not trusted: with the restricted codec nothing that they send runs code."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine_client import (
    EngineConfig,
    EngineDeadError,
    FinishReason,
    RemoteCallError,
    SerializationError,
    StartupError,
    register_type,
)
from engine_client.errors import RemoteProtocolError
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.guests import finish, guest_client, launched
from helpers.malicious import PLACES, TARGET, answer, poison_outputs, raise_poison
from helpers.payloads import MIB, pattern
from helpers.scenes import colours, methods

pytestmark = pytest.mark.crash


def malicious(where: str, mark: Path, codec: str, colour: str = "sync") -> Any:
    """Return a client of an engine whose message of this kind is poison."""
    config = EngineConfig(additional_config={"where": where, "mark": str(mark)})
    return scripted_client(config=config, colour=colour, engine_target=TARGET, codec=codec)


def provoke(where: str, mark: Path, codec: str) -> BaseException | None:
    """Have an engine send poison of a kind; return the error that the caller sees."""
    try:
        with malicious(where, mark, codec) as client:
            if where == "REPLY":
                client.call_utility("echo", 1)
            elif where == "DEAD":
                client.call_utility("fail_step", ValueError("dead"))
                client.get_output(timeout=20)
            elif where == "OUTPUTS":
                client.add_request(make_request("a", 1))
                client.get_output(timeout=20)
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return error
    return None


@pytest.mark.parametrize("where", PLACES)
def test_bc59_no_message_runs_code(where: str, tmp_path: Path) -> None:
    """Whichever message is poison: nothing runs, and the start, the call or the engine fails and says why."""
    mark = tmp_path / "mark"
    error = provoke(where, mark, "restricted")
    assert not mark.exists()
    expected: dict[str, Any] = {"REPLY": RemoteCallError, "DEAD": EngineDeadError, "OUTPUTS": EngineDeadError}
    if where == "GOODBYE":
        assert error is None  # it was shut down anyhow
        return
    assert isinstance(error, expected.get(where, StartupError))
    assert "mkdir is not a registered type" in str(error)
    if where == "OUTPUTS":
        assert isinstance(error.__cause__, RemoteProtocolError)
    # The other codec trusts its engines: the poison is real.
    provoke(where, mark, "pickle")
    assert mark.exists()


@colours
def test_bc59_poison_among_values_fails_what_it_belongs_to(colour: str, tmp_path: Path) -> None:
    """A value of a call or an output is that call's or request's error, which names the type; all others go on."""
    mark = str(tmp_path / "mark")
    with scripted_client(colour=colour, codec="restricted") as client:
        with pytest.raises(RemoteCallError, match=r"posix\.mkdir is not a registered type") as caught:
            client.call_utility("collective_rpc", answer, None, (mark,))
        assert isinstance(caught.value.__cause__, SerializationError)
        with pytest.raises(RemoteCallError, match=r"helpers\.malicious\.PoisonedError: .*what has happened") as caught:
            client.call_utility("collective_rpc", raise_poison, None, (mark,))
        assert caught.value.type_name == "helpers.malicious.PoisonedError"
        assert "in raise_poison" in caught.value.remote_traceback
        client.call_utility("collective_rpc", poison_outputs, None, (mark,))
        for index in range(6):
            client.add_request(make_request(f"{'bad' if index % 2 else 'good'}{index}", 3))
        for name, outputs in collect(client, 6).items():
            if name.startswith("good"):
                assert [len(output.new_token_ids) for output in outputs] == [1, 1, 1]
            else:
                assert outputs[-1].finish_reason is FinishReason.ERROR
                assert "mkdir is not a registered type" in str(outputs[-1].stop_reason)
        assert client.call_utility("echo", "still") == "still"
        assert client.is_alive
    assert list(tmp_path.iterdir()) == []


@register_type
@dataclass
class Point:
    x: int
    tags: list[str]


@register_type
class Shade(enum.Enum):
    DARK = "dark"


@register_type
class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Unknown:
    x: int


@methods()
def test_bc59_what_is_plain_or_registered_arrives(method: str) -> None:
    """Plain data, arrays in shared memory and beside it, statistics, and types of the user's own."""
    with scripted_client(start_method=method, codec="restricted", log_stats=True) as client:
        client.add_request(make_request("a", 3))
        assert len(collect(client, 1)["a"]) == 3
        for value in ({"a": [1, (2.5, None)]}, "x" * MIB, b"y" * 100_000, Pair(Point(1, ["t"]), Shade.DARK), {1, 2}):
            assert client.call_utility("echo", value) == value
        for size in (100, 10_000, MIB):
            array = pattern(1, size)
            assert np.array_equal(client.call_utility("echo", array), array)
        with pytest.raises(RemoteCallError, match=r"test_untrusted\.Unknown is not a registered type"):
            client.call_utility("echo", Unknown(1))
        with pytest.raises(RemoteCallError, match="AttributeError: the engine has no utility 'nothing'"):
            client.call_utility("nothing")
        client.check_health()


def test_bc59_a_front_end_of_others_may_restrict_what_it_decodes() -> None:
    """The option is each client's own."""
    with launched(1, 1) as engines, guest_client(engines.endpoints[0], codec="restricted") as client:
        assert finish(client, ["a"], 3)[0] == {"a": 3}
        assert session_of(client).links[0].channel.is_restricted
