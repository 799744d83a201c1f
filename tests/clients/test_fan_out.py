"""One call to several engines: done when all have answered, and an error names who has failed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client import EngineStalledError, RemoteCallError
from engine_client.clients.calls import PendingCalls
from engine_client.clients.fan_out import FanOut, value_of
from engine_client.deadline import Deadline
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import encode_reply
from helpers.timing import DEADLOCK


def call_to(*ranks: int) -> tuple[PendingCalls, FanOut]:
    """Return a table and a call in it to these ranks."""
    calls = PendingCalls()
    links: list[Any] = [SimpleNamespace(rank=rank, title=f"engine core {rank} (pid {rank + 100})") for rank in ranks]
    fan_out = FanOut(calls, links, "the utility 'x'")
    for index in range(len(ranks)):
        assert fan_out.register(index) == fan_out.ids[index]
    return calls, fan_out


def answer(calls: PendingCalls, call_id: int, value: Any = None, error: BaseException | None = None) -> None:
    """Answer one call as the reader does."""
    calls.settle(call_id, result=encode_reply(call_id, value, error))


def test_the_values_come_in_the_order_of_the_engines() -> None:
    """Whoever answers first: the wait ends when all have answered."""
    calls, fan_out = call_to(0, 1, 2)
    assert repr(fan_out) == "<FanOut the utility 'x' 0 of 3 answered>"
    assert [reply.rank for reply in fan_out.replies] == [0, 1, 2]
    for index in (2, 0):
        answer(calls, fan_out.ids[index], f"value {index}")
    late = threading.Timer(0.02, answer, (calls, fan_out.ids[1], "value 1"))
    late.start()
    assert fan_out.wait(Deadline(DEADLOCK)) == ["value 0", "value 1", "value 2"]
    late.join()
    assert len(calls) == 0
    assert "3 of 3" in repr(fan_out)


def test_an_error_names_the_engines_that_have_failed() -> None:
    """The first one's error is raised, with its rank and a note that names all; the others' values are given up."""
    calls, fan_out = call_to(0, 1, 2)
    answer(calls, fan_out.ids[0], 0)
    answer(calls, fan_out.ids[1], error=KeyError("one"))
    answer(calls, fan_out.ids[2], error=KeyError("two"))
    with pytest.raises(KeyError, match="one") as caught:
        fan_out.wait(Deadline(DEADLOCK))
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert caught.value.__notes__ == [
        "Raised by engine core 1 (pid 101), engine core 2 (pid 102), of 3 engines.",
    ]


def test_the_error_of_a_single_engine_is_left_as_it_is() -> None:
    """Where only one engine was called there is nothing to tell apart."""
    calls, fan_out = call_to(4)
    answer(calls, fan_out.ids[0], error=KeyError("marker"))
    with pytest.raises(KeyError) as caught:
        fan_out.wait(Deadline(DEADLOCK))
    assert not hasattr(caught.value, "rank")
    assert not hasattr(caught.value, "__notes__")


class Closed(Exception):
    """Takes no attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError(name)


class Ranked(Exception):
    """Has a rank and notes of its own."""

    rank = 7
    __notes__ = ["mine"]  # noqa: RUF012


def test_an_error_s_own_facts_are_kept() -> None:
    """One that has a rank or notes keeps them, and one that takes no attributes is raised all the same."""
    calls, fan_out = call_to(0, 1)
    for call_id in fan_out.ids:
        calls.settle(call_id, error=Ranked())
    with pytest.raises(Ranked) as caught:
        fan_out.wait(Deadline(DEADLOCK))
    assert caught.value.rank == 7
    assert caught.value.__notes__[0] == "mine"
    assert "of 2 engines" in caught.value.__notes__[1]
    assert Ranked.__notes__ == ["mine"]
    calls, fan_out = call_to(0, 1)
    for call_id in fan_out.ids:
        calls.settle(call_id, error=Closed())
    with pytest.raises(Closed):
        fan_out.wait(Deadline(DEADLOCK))


def test_those_who_are_late_are_named() -> None:
    """A call that is not answered in time says by whom; to one engine it says how long that was."""
    calls, fan_out = call_to(0, 1, 2)
    answer(calls, fan_out.ids[1], 1)
    with pytest.raises(TimeoutError, match=r"the utility 'x' was not answered within 0\.01 s by the ranks \[0, 2\]"):
        fan_out.wait(Deadline(0.01))
    _, fan_out = call_to(3)
    with pytest.raises(TimeoutError, match=r"the utility 'x' was not answered within 0\.01 s$"):
        fan_out.wait(Deadline(0.01))


def test_engines_that_do_not_respond_are_described() -> None:
    """A question about health that was not answered tells, of each that is late, what it was last seen doing."""
    calls, fan_out = call_to(0, 1)
    for link in fan_out.links:
        status = SimpleNamespace(describe=lambda rank=link.rank: f"doing {rank}")
        link.status = SimpleNamespace(snapshot=lambda status=status: status)  # type: ignore[assignment]
    answer(calls, fan_out.ids[0], "pong")
    assert fan_out.late == fan_out.links[1:]
    text = r"not responding: no answer within 0\.5 s; engine core 1 \(pid 101\): doing 1$"
    with pytest.raises(EngineStalledError, match=text):
        raise fan_out.stalled_error(Deadline(0.5))
    unsent = FanOut(calls, fan_out.links, "unsent")
    assert unsent.late == fan_out.links


def test_a_call_that_is_given_up_leaves_no_entry() -> None:
    """Before it is sent, in the middle, and after it was answered, ``discard`` takes all of it out of the table."""
    calls, fan_out = call_to(0, 1)
    other, _ = calls.new()
    fan_out.fail(0, KeyError("gone"))
    assert isinstance(fan_out.replies[0].exception(0), KeyError)
    fan_out.discard()
    fan_out.discard()
    assert list(calls.replies) == [other]
    assert not fan_out.replies[1].done()
    unsent = FanOut(calls, fan_out.links, "unsent")
    unsent.discard()
    assert unsent.size == 0
    assert list(calls.replies) == [other]


def test_the_size_is_that_of_the_answers_that_are_there() -> None:
    """Bytes of header and buffers; what failed or has not come has none."""
    calls, fan_out = call_to(0, 1, 2)
    assert fan_out.size == 0
    answer(calls, fan_out.ids[0], bytes(1 << 20))
    assert 1 << 20 <= fan_out.size < (1 << 20) + 1000
    fan_out.fail(1, KeyError())
    assert fan_out.size < (1 << 20) + 1000


class Bomb:
    """Raises SystemExit when it is unpickled."""

    def __reduce__(self) -> Any:
        return exit, ()


def interrupt() -> None:
    """Raise as Ctrl-C does."""
    raise KeyboardInterrupt


class Interrupted:
    """Is interrupted when it is unpickled."""

    def __reduce__(self) -> Any:
        return interrupt, ()


def test_a_reply_becomes_its_value_or_an_error() -> None:
    """What is no plain exception, or cannot be decoded, is a RemoteCallError; an interrupt is the caller's own."""
    assert value_of(encode_reply(1, {1, 2})) == {1, 2}
    with pytest.raises(KeyError, match="theirs"):
        value_of(encode_reply(1, error=KeyError("theirs")))
    with pytest.raises(RemoteCallError, match=r"^SystemExit: 3") as caught:
        value_of(encode_reply(1, error=SystemExit(3)))
    assert isinstance(caught.value.__cause__, SystemExit)
    with pytest.raises(RemoteCallError, match=r"cannot be decoded: SystemExit"):
        value_of(encode_reply(1, Bomb()))
    with pytest.raises(RemoteCallError, match=r"cannot be decoded: UnpicklingError"):
        value_of(Frame(Kind.REPLY, 0, 1, b"no pickle"))
    with pytest.raises(KeyboardInterrupt):
        value_of(encode_reply(1, Interrupted()))
