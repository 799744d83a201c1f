"""The messages and the engine process of ``peer_zmq``.

Run by its path as that process: only the standard library, pyzmq and msgspec are imported, nothing of the package.

Threads: one reads, one writes, the main thread does the steps.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

__all__ = ["STOP", "Wire", "engine_main"]

STOP = b"stop"
_TOKEN = 17
_LENGTH = 1


class Wire:
    """The messages: msgspec structs, their encoder and decoders.  Tensors are numbered frames behind them."""

    def __init__(self) -> None:
        import msgspec  # noqa: PLC0415  # optional, as zmq

        compact = {"array_like": True, "omit_defaults": True, "gc": False}
        self.Request: Any = msgspec.defstruct(
            "Request",
            [
                ("request_id", str),
                ("prompt_token_ids", list[int]),
                ("max_tokens", int),
                ("temperature", float, 1.0),
                ("arrival_time", float, 0.0),
                ("tensor", Any, None),
            ],
            **compact,
        )
        output_class: Any = msgspec.defstruct(
            "Output",
            [
                ("request_id", str),
                ("new_token_ids", list[int]),
                ("finish_reason", Any, None),
                ("pooling_output", Any, None),
            ],
            **compact,
        )
        self.Output = output_class
        self.Outputs: Any = msgspec.defstruct(
            "Outputs", [("outputs", list[output_class]), ("reply", Any, None), ("timestamp", float, 0.0)], **compact
        )
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode_request = msgspec.msgpack.Decoder(self.Request).decode
        self.decode_outputs = msgspec.msgpack.Decoder(self.Outputs).decode
        self.decode_call = msgspec.msgpack.Decoder().decode

    def request_frames(self, request: Any) -> list[Any]:
        """Return what to send; the tensor of the caller's request stays where it is."""
        tensor, request.tensor = request.tensor, None if request.tensor is None else 0
        try:
            return [b"A", self.encode(request), *(() if tensor is None else (tensor,))]
        finally:
            request.tensor = tensor

    def outputs_frames(self, outputs: Any) -> list[Any]:
        """Return what to send of a step's outputs."""
        tensors = []
        for output in outputs.outputs:
            if output.pooling_output is not None:
                tensors.append(output.pooling_output)
                output.pooling_output = len(tensors) - 1
        return [self.encode(outputs), *tensors]

    def read_outputs(self, frames: list[Any]) -> Any:
        """Return the outputs of received frames."""
        outputs = self.decode_outputs(frames[0].buffer)
        if len(frames) > 1:
            for output in outputs.outputs:
                if output.pooling_output is not None:
                    output.pooling_output = frames[1 + output.pooling_output].buffer
        return outputs


def engine_main(requests_address: str, outputs_address: str) -> None:
    """Serve one client until it says stop."""
    import zmq  # noqa: PLC0415  # optional

    context, wire = zmq.Context(), Wire()
    inbox: queue.Queue[Any] = queue.Queue()
    outbox: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        with context.socket(zmq.PULL) as socket:
            socket.connect(requests_address)
            while True:
                kind, *frames = socket.recv_multipart(copy=False)
                if kind.bytes == STOP:
                    inbox.put(None)
                    return
                decode = wire.decode_request if kind.bytes == b"A" else wire.decode_call
                message = decode(frames[0].buffer)
                if kind.bytes == b"A" and message.tensor is not None:
                    message.tensor = frames[1].buffer
                inbox.put(message)

    def write() -> None:
        with context.socket(zmq.PUSH) as socket:
            socket.connect(outputs_address)
            while (outputs := outbox.get()) is not None:
                socket.send_multipart(wire.outputs_frames(outputs), copy=False)

    threads = [threading.Thread(target=target, daemon=True) for target in (read, write)]
    for thread in threads:
        thread.start()
    _Loop(wire, inbox, outbox).run()
    for thread in threads:
        thread.join()
    context.destroy(linger=0)


class _Loop:
    """What the reference's busy loop does: take what came, do a step, pass the outputs on."""

    def __init__(self, wire: Wire, inbox: queue.Queue[Any], outbox: queue.Queue[Any]) -> None:
        self._wire = wire
        self._inbox = inbox
        self._outbox = outbox
        self._running: dict[str, list[Any]] = {}
        self._echoes_tensor = False

    def run(self) -> None:
        """Work until the inbox says stop."""
        while True:
            while not self._running or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    self._outbox.put(None)
                    return
                self._take(message)
            self._outbox.put(self._step())

    def _take(self, message: Any) -> None:
        if isinstance(message, self._wire.Request):
            self._running[message.request_id] = [message.max_tokens, message]
            return
        call_id, method, arguments = message
        result = None
        if method == "echo":
            result = arguments[0]
        elif method == "set_echo_tensor":
            self._echoes_tensor = arguments[0]
        elif method == "usage":
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            result = [os.getpid(), time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")]
        self._outbox.put(self._wire.Outputs([], [call_id, result]))

    def _step(self) -> Any:
        output_class = self._wire.Output
        outputs, ended = [], []
        for request_id, state in self._running.items():
            state[0] -= 1
            if state[0] > 0:
                outputs.append(output_class(request_id, [_TOKEN]))
            else:
                outputs.append(
                    output_class(request_id, [_TOKEN], _LENGTH, state[1].tensor if self._echoes_tensor else None)
                )
                ended.append(request_id)
        for request_id in ended:
            del self._running[request_id]
        return self._wire.Outputs(outputs, None, time.monotonic())


if __name__ == "__main__":
    engine_main(*sys.argv[1:])
