"""The messages of the protocol, each there and back."""

from __future__ import annotations

import sys
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from engine_client.errors import RemoteProtocolError
from engine_client.messages import EngineCoreReadyResponse, EngineCoreRequest
from engine_client.params import PoolingParams, SamplingParams
from engine_client.protocol import arrays, codec, wire
from engine_client.protocol.codec import dumps, loads
from engine_client.protocol.frames import Flag, Frame, Kind


def request(**fields: Any) -> EngineCoreRequest:
    values: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    values |= {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "sampling_params": SamplingParams(max_tokens=4),
        "arrival_time": 1.25,
    }
    return EngineCoreRequest(**(values | fields))


def through(message: Any) -> EngineCoreRequest:
    ids = message.prompt_token_ids
    return wire.decode_add(wire.encode_add(7, message, None if ids is None else array("I", ids)))


@given(
    st.text(min_size=1, max_size=10),
    st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.integers(-5, 5),
    st.none() | st.text(max_size=3),
    st.booleans(),
)
def test_a_request_arrives_equal(
    request_id: str, prompt: list[int] | None, priority: int, salt: str | None, resumable: bool
) -> None:
    """Every field of a request arrives as it was."""
    message = request(
        request_id=request_id, prompt_token_ids=prompt, priority=priority, cache_salt=salt, resumable=resumable
    )
    assert through(message) == message


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": list(range(50_000))},
        {"sampling_params": SamplingParams(stop=["x"])},
        {"sampling_params": SamplingParams(seed=2**70, stop_token_ids=[1])},
        {"sampling_params": None, "pooling_params": PoolingParams(task="embed")},
        {"trace_headers": {"a": "b"}, "priority": 3},
        {"cache_salt": "s" * 70_000},
        {"arrival_time": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_request_arrives_equal_by_either_codec(fields: dict[str, Any]) -> None:
    """What is short and plain goes without the general codec, the rest by it; the result does not tell by which."""
    message = request(**fields)
    arrived = through(message)
    assert arrived == message
    assert vars(arrived).keys() == vars(message).keys()


@pytest.mark.parametrize(
    "embeds",
    [
        np.arange(3000.0, dtype=np.float32).reshape(30, 100),
        np.arange(3000.0, dtype=np.float32).reshape(30, 100)[:, ::2],
        np.asfortranarray(np.arange(3000.0).reshape(30, 100)),
        np.zeros(2000, ">i4"),
        np.zeros(2000, "M8[s]"),
        np.zeros(2000, [("a", "i4"), ("b", "f8")]),
        np.zeros((0, 5), np.float32),
        np.zeros(5, np.float32),
        np.array(["a", None] * 2000, dtype=object),
        array("d", range(2000)),
        memoryview(bytes(70_000)),
        memoryview(bytes(80_000)).cast("d"),
        memoryview(np.zeros(2000, complex)),  # of a format that only numpy rebuilds
        [1.0, 2.0],
        b"x" * 70_000,
    ],
    ids=lambda embeds: str(getattr(embeds, "dtype", type(embeds).__name__)),
)
@pytest.mark.parametrize("salt", [None, "salt", "long" * 10_000])
def test_a_request_with_an_array_arrives_equal(embeds: Any, salt: str | None) -> None:
    """Arrays of common kinds go as they are beside what is plain, all others by the general codec."""
    message = request(prompt_token_ids=None, prompt_embeds=embeds, cache_salt=salt)
    arrived = through(message)
    found = arrived.prompt_embeds
    assert type(found) is type(embeds)
    assert bool(np.array_equal(np.asarray(found), np.asarray(embeds)))
    assert getattr(found, "dtype", None) == getattr(embeds, "dtype", None)
    assert getattr(found, "format", None) == getattr(embeds, "format", None)
    found, arrived.prompt_embeds, message.prompt_embeds = None, None, None
    assert arrived == message
    assert vars(arrived).keys() == vars(message).keys()


def test_an_array_of_a_request_is_not_copied_and_needs_no_name() -> None:
    """Its memory is beside the header, in which neither side has to look anything up."""
    embeds = np.zeros(3000, np.float32)
    frame = wire.encode_add(7, request(prompt_embeds=embeds), array("I", [1]))
    (buffer,) = frame.buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), embeds)
    assert b"engine_client" not in frame.header
    assert not wire.decode_add(frame).prompt_embeds.flags.writeable


def test_one_array_in_two_fields_arrives_as_one() -> None:
    """As one object in two places does anywhere else."""
    embeds = np.zeros(3000, np.float32)
    arrived = through(request(prompt_embeds=embeds, pooling_params=embeds))
    assert arrived.pooling_params is arrived.prompt_embeds


class Record(np.record):
    """The type of a structured array's elements, which goes by its name."""


def test_types_without_a_plain_name_go_by_the_general_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows where they come from: here from what is the program's own file."""
    monkeypatch.setattr(Record, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Record", Record, raising=False)
    embeds = np.zeros(2000, np.dtype((Record, [("a", "i4")])))
    frame = wire.encode_add(7, request(prompt_embeds=embeds), array("I", [1]))
    assert frame.flags == Flag.NEEDS_MAIN
    assert wire.decode_add(frame).prompt_embeds.dtype == embeds.dtype


def test_an_array_beside_a_long_prompt_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit a row is known before an array is made ready, which may copy it."""
    looked_at: list[object] = []
    monkeypatch.setitem(
        vars(codec)["_REDUCERS"], np.ndarray, lambda value: arrays.reduce_ndarray(looked_at.append(1) or value)
    )
    embeds = np.zeros((3000, 2), np.float32)[:, 0]
    assert through(request(prompt_embeds=embeds, prompt_token_ids=[1] * 10_000)).prompt_embeds.shape == (3000,)
    assert looked_at == [1]


def test_a_row_that_lacks_a_buffer_is_an_error() -> None:
    """It is one of that request, whose other buffers are its sender's again."""
    frame = wire.encode_add(7, request(prompt_embeds=np.zeros(3000, np.float32)), array("I", [1]))
    buffers = [*frame.buffers, *frame.buffers]
    with pytest.raises(ValueError, match="longer"):
        wire.decode_add(frame._replace(buffers=buffers))
    assert not buffers


def test_a_call_arrives_equal_by_either_codec() -> None:
    """So do a call's arguments."""
    for args in ((), (1, "a", None, 2.5, True), ("x" * 70_000,), ([1], {"a": b"b"}), (b"bytes",)):
        assert wire.decode_utility(wire.encode_utility(3, "echo", args)) == ("echo", args)


def test_parameters_with_an_attribute_of_their_own_keep_it() -> None:
    """They are no longer just the values of the known names."""
    parameters = SamplingParams(max_tokens=4)
    parameters.mark = "kept"  # type: ignore[attr-defined]
    arrived = through(request(sampling_params=parameters)).sampling_params
    assert vars(arrived) == vars(parameters)
    del parameters.seed
    arrived = through(request(sampling_params=parameters)).sampling_params
    assert vars(arrived) == vars(parameters)


def test_a_request_of_another_class_is_read_by_attribute() -> None:
    """Missing attributes count as defaults."""
    sparse = SimpleNamespace(
        request_id="r",
        prompt_token_ids=[9],
        sampling_params=None,
        pooling_params=PoolingParams(task="embed"),
        arrival_time=0.0,
    )
    assert through(sparse) == request(
        prompt_token_ids=[9], sampling_params=None, pooling_params=PoolingParams(task="embed"), arrival_time=0.0
    )


def test_the_key_of_a_request_stands_outside_of_the_pickle() -> None:
    """The key and the call id are readable without decoding."""
    assert wire.encode_add(7, request(), array("I", [1])).ref == 7
    assert wire.encode_utility(8, "echo", (1,)).ref == 8
    assert wire.encode_reply(9, 1).ref == 9


@given(st.lists(st.integers(0, 2**64 - 1), max_size=10))
def test_aborts_carry_keys(keys: list[int]) -> None:
    """An abort carries any number of keys."""
    assert wire.decode_abort(wire.encode_abort(keys)) == keys


def test_utility_calls_and_replies() -> None:
    """Arguments, results and exceptions arrive."""
    assert wire.decode_utility(wire.encode_utility(1, "echo", [{1, 2}, "x"])) == ("echo", ({1, 2}, "x"))
    assert wire.decode_reply(wire.encode_reply(1, {3})) == (False, {3})
    failed, error = wire.decode_reply(wire.encode_reply(1, error=KeyError("k")))
    assert failed
    assert isinstance(error, KeyError)
    assert error.args == ("k",)


def test_the_handshake() -> None:
    """Each message of the start carries what it says."""
    version, pid = wire.decode_text(wire.encode_hello(42))
    assert (version, pid) == (wire.PROTOCOL_VERSION, 42)
    payload = dumps(({"a": 1}, int, True))
    init = wire.Init("token", 2, "m:f", ["/p"], ["argv"], {"kind": "none"}, {"arena_limit": 0}, payload)
    again = wire.decode_init(wire.encode_init(init))
    assert (again.token, again.rank, again.sys_path, again.options) == ("token", 2, ["/p"], {"arena_limit": 0})
    assert loads(again.payload.header, again.payload.buffers) == ({"a": 1}, int, True)
    assert wire.decode_status(wire.encode_status("loading weights", 3, 12)) == ("loading weights", 3, 12)
    response = EngineCoreReadyResponse(1, 2, 3, None, "auto", "0.1", 1, 1)
    assert wire.decode_ready(wire.encode_ready("token", response)) == ("token", response)


@pytest.mark.parametrize("encode", [wire.encode_dead, wire.encode_failed])
def test_last_words_carry_the_cause(encode: Any) -> None:
    """DEAD and FAILED carry the exception and the phase."""
    try:
        raise ValueError("marker")
    except ValueError as error:
        frame = encode(error, "serving")
    again, phase = wire.decode_dead(frame)
    assert isinstance(again, ValueError)
    assert "marker" in str(again)
    assert "test_last_words_carry_the_cause" in again.remote_traceback  # type: ignore[attr-defined]
    assert phase == "serving"


def test_a_sentence() -> None:
    """SHUTDOWN and GOODBYE carry a sentence."""
    assert wire.decode_text(wire.encode_text(Kind.GOODBYE, "bye")) == "bye"


def test_a_frame_that_lost_its_buffers_raises_why() -> None:
    """What kept a frame's buffers from being mapped is raised when it is decoded."""
    frame = wire.encode_text(Kind.GOODBYE, "bye")._replace(error=OSError("no memory"))
    with pytest.raises(OSError, match="no memory"):
        wire.decode_text(frame)


def test_objects_of_main_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload that names an object of ``__main__`` says so in its flags."""
    import __main__

    monkeypatch.setattr(__main__, "Marked", type("Marked", (), {"__module__": "__main__"}), raising=False)
    frame = wire.encode_utility(1, "echo", (__main__.Marked,))
    assert frame.flags & Flag.NEEDS_MAIN


class Explosive:
    """Cannot be restored."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.data = bytearray(100_000)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise state["error"]


@pytest.mark.parametrize("error", [ValueError("lost"), SystemExit("lost"), KeyboardInterrupt()])
@pytest.mark.parametrize("buffers", [list, tuple])
def test_a_frame_that_cannot_be_decoded_gives_back_its_buffers(error: BaseException, buffers: Any) -> None:
    """Nothing of the exception that is kept holds a buffer, unless it was an interrupt: then one may try again."""
    frame = wire.encode_reply(1, (memoryview(bytes(100_000)), Explosive(error), memoryview(bytes(100_000))))
    owners = [bytearray(view) for view in frame.buffers]
    frame = frame._replace(buffers=buffers(map(memoryview, owners)))
    with pytest.raises(type(error)) as caught:
        wire.decode_reply(frame)
    assert caught.value.__traceback__ is not None
    if isinstance(error, KeyboardInterrupt) or buffers is tuple:
        assert len(frame.buffers) == 3
        return
    assert frame.buffers == []
    for owner in owners:
        owner.append(1)  # which raises BufferError while there is a view


@pytest.mark.parametrize("decode", [wire.decode_status, wire.decode_dead, wire.decode_log])
def test_a_message_of_other_parts_is_refused(decode: Any) -> None:
    """Nothing that has arrived is made a text or a number: it is one, or the message is none."""
    for value in ((1, 2, 3), ("a", "b", "c"), (1, "phase"), (ValueError(), 7)):
        with pytest.raises((RemoteProtocolError, ValueError)):
            decode(Frame(Kind.STATUS, 0, 0, dumps(value).header))
