"""The twin's messages, and its engine process run by threads."""

from __future__ import annotations

import threading

import pytest
import zmq

from engine_client.bench.zmq_engine import STOP, Wire, engine_main

pytestmark = pytest.mark.usefixtures("zmq_thread")


class Frame:
    """A received frame."""

    def __init__(self, data):
        self.buffer = memoryview(data)


def test_outputs_survive_the_way():
    """Outputs arrive as they were; tensors are frames of their own."""
    wire = Wire()
    outputs = wire.Outputs([wire.Output("a", [1]), wire.Output("b", [2], 1, b"tensor")], None, 1.5)
    frames = wire.outputs_frames(outputs)
    assert frames[1:] == [b"tensor"]
    found = wire.read_outputs([Frame(frame) for frame in frames])
    assert (found.timestamp, found.reply) == (1.5, None)
    assert found.outputs[0] == wire.Output("a", [1])
    assert (found.outputs[1].finish_reason, found.outputs[1].pooling_output) == (1, b"tensor")


def test_engine(tmp_path):
    """The engine answers calls at once and requests by one token a step, and ends when told."""
    wire, addresses = Wire(), [f"ipc://{tmp_path}/{name}" for name in ("in", "out")]
    with zmq.Context() as context, context.socket(zmq.PUSH) as requests, context.socket(zmq.PULL) as outputs:
        requests.bind(addresses[0])
        outputs.bind(addresses[1])
        engine = threading.Thread(target=engine_main, args=addresses)
        engine.start()
        for call in (["echo", [5]], ["set_echo_tensor", [True]], ["usage", []]):
            requests.send_multipart((b"U", wire.encode([9, *call])))
        requests.send_multipart(wire.request_frames(wire.Request("a", [1], 2, 1.0, 0.0, b"tensor")))

        def read():
            return wire.read_outputs(outputs.recv_multipart(copy=False))

        assert [read().reply[1] for _ in range(2)] == [5, None]
        assert read().reply[1][1] > 0
        first, last = read().outputs + read().outputs
        assert (first.new_token_ids, first.finish_reason) == ([17], None)
        assert (last.finish_reason, last.pooling_output) == (1, b"tensor")
        requests.send(STOP)
        engine.join()
