"""The twin on ZeroMQ and msgpack does the same work as this library, with few repetitions."""

from __future__ import annotations

import builtins

import pytest

from engine_client.bench import life, loops, peer_zmq
from engine_client.bench.peer_zmq import make_side

pytestmark = pytest.mark.usefixtures("zmq_thread")


def test_blocking_client():
    """Calls, tokens and tensors are as on every side."""
    side = make_side()
    assert set(side.about()) == {"pyzmq", "msgspec", "tensors"}
    assert loops.utility(side, times=2)["p50_us"] > 0
    assert loops.stream(side, batch=3, tokens=4, repeats=1)["tokens_per_s"] > 0
    for back in (False, True):
        assert loops.tensor(side, nbytes=1 << 17, back=back, times=2)["ms"] > 0


def test_asyncio_client():
    """The same in an event loop."""
    assert loops.async_stream(make_side(), batch=3, tokens=4, repeats=1)["tokens_per_s"] > 0


def test_tensor_is_what_was_sent():
    """A tensor comes back with its bytes, and the request still has its own."""
    side = make_side()
    client = side.make_client()
    try:
        assert client.call_utility("set_echo_tensor", True) is None
        tensor = memoryview(bytes(range(256)) * 300)
        request = side.make_request("a", 1, tensor)
        client.add_request(request)
        (output,) = client.get_output().outputs
    finally:
        client.shutdown()
    assert output.pooling_output == tensor
    assert request.tensor is tensor


def test_end_of_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch):
    """An engine that does not stop is killed."""
    client = make_side().make_client()
    process, waited = client.process, client.process.wait

    def wait(timeout=None):
        if timeout is not None:
            raise peer_zmq.subprocess.TimeoutExpired("engine", timeout)
        return waited()

    monkeypatch.setattr(process, "wait", wait)
    client.shutdown()
    assert process.returncode is not None


def test_start_and_stop():
    """Engines of the twin start and end."""
    assert life.start_stop(make_side(), times=1)["stop_ms"] > 0


def test_what_it_needs_is_named(monkeypatch: pytest.MonkeyPatch):
    """Without pyzmq or msgspec the error says so."""
    load = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "zmq":
            raise ImportError("No module named 'zmq'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match="the peer zmq needs pyzmq and msgspec: No module named 'zmq'"):
        make_side()
