"""What the hot paths cost, in calls of functions: a number that does not depend on the machine, or on what else runs.

A limit is a little above what was counted when it was set.  Whoever passes one has made a path longer: is it worth it?
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine_client import EngineCoreOutput, EngineCoreOutputs, FinishReason
from engine_client.clients.in_flight import InFlight
from engine_client.ipc.arena import ArenaReader, ArenaWriter, create_memory
from engine_client.ipc.channel import Channel
from engine_client.protocol.batch import decode_columns, encode_outputs
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import decode_add, encode_add
from helpers.clients import make_request, scripted_client
from helpers.engines import add, make_core, step

LONG = 1_000_000


def calls_of(function: Callable[[], Any]) -> int:
    """Return how many functions, of Python and of C, this thread calls meanwhile."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    old = sys.getprofile()
    gc.disable()  # a finalizer in between would count
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(old)
        gc.enable()
    return count


def test_a_request_costs_the_same_however_many_are_in_flight() -> None:
    """Checked, encoded and written by a hundred calls, be there one other or a thousand."""
    with scripted_client() as client:
        client.pause_scheduler("keep")  # nothing is read meanwhile
        costs = []
        for count in (1, 200, 1000):
            for number in range(count):
                client.add_request(make_request(f"{count}-{number}", LONG))
            request = make_request(f"{count}", LONG)
            costs.append(calls_of(lambda: client.add_request(request)))  # noqa: B023  # called at once
    assert max(costs) - min(costs) <= 2, costs
    assert max(costs) <= 120, costs


def test_a_call_costs_little() -> None:
    """What the calling thread does for a utility and its answer."""
    with scripted_client() as client:
        client.call_utility("echo", 1)
        assert min(calls_of(lambda: client.call_utility("echo", 1)) for _ in range(3)) <= 150


def batch(rows: int) -> tuple[EngineCoreOutputs, dict[str, int], InFlight]:
    """Return a step's outputs of a token each, the keys that they travel under, and the client's table of them."""
    table = InFlight()
    keys = {f"r{row}": table.add(f"r{row}") for row in range(rows)}
    return EngineCoreOutputs(0, [EngineCoreOutput(name, [7]) for name in keys]), keys, table


def per_row(cost: Callable[[int], int]) -> float:
    """Return what one row more costs."""
    return (cost(512) - cost(256)) / 256


def test_a_token_costs_a_handful_of_calls_on_each_side() -> None:
    """Encoded, and made an output again; everything else of a frame is paid once a step."""

    def encode(rows: int) -> int:
        outputs, keys, _ = batch(rows)
        return calls_of(lambda: encode_outputs(outputs, keys))

    def decode(rows: int) -> int:
        outputs, keys, table = batch(rows)
        frame, _ = encode_outputs(outputs, keys)
        assert frame is not None
        return calls_of(lambda: table.outputs(decode_columns(frame)))

    assert per_row(encode) <= 8
    assert per_row(decode) <= 4
    assert encode(1) <= 60
    assert decode(1) <= 40


def test_an_output_that_ends_its_request_costs_little_more() -> None:
    """It says two things more than others; all other fields are not even looked at."""
    outputs, keys, _ = batch(1)
    plain = calls_of(lambda: encode_outputs(outputs, keys))
    outputs.outputs[0].finish_reason = FinishReason.LENGTH
    assert calls_of(lambda: encode_outputs(outputs, keys)) - plain <= 18


def test_an_array_of_a_request_costs_little_more() -> None:
    """Neither side looks up what it is made of, or asks a pickler of ours about each part."""
    request = make_request("r", 1)
    prompt = array("I", request.prompt_token_ids or [])
    plain = calls_of(lambda: encode_add(1, request, prompt))
    request.prompt_embeds = np.zeros(30_000, np.float32)
    assert calls_of(lambda: encode_add(1, request, prompt)) - plain <= 24
    frame = encode_add(1, request, prompt)
    assert calls_of(lambda: decode_add(frame)) <= 30


def test_many_outputs_are_not_searched_for_garbage() -> None:
    """An engine of a thousand requests makes three objects a token, which are gone after the step."""
    with scripted_client() as client:
        for number in range(1000):
            client.add_request(make_request(f"r{number}", LONG))
        before = client.collective_rpc(searches)[0]
        tokens = 0
        while tokens < 50_000:
            tokens += len(client.get_output(timeout=20.0).outputs)
        assert client.collective_rpc(searches)[0] - before <= 3  # 177 with Python's own threshold


def searches(worker: Any) -> int:
    """Return how often garbage was looked for in an engine."""
    return sum(generation["collections"] for generation in gc.get_stats())


@pytest.mark.parametrize(("buffers", "limit"), [(0, 28), (1, 95)])
def test_a_frame_costs_little_to_send_and_to_receive(buffers: int, limit: int) -> None:
    """One system call each, and few steps around them, also where a buffer is placed in shared memory."""
    left, right = socket.socketpair()
    fd = create_memory("test")
    writer, reader = ArenaWriter(os.dup(fd), limit=1 << 30), ArenaReader(fd)
    sender = Channel(left.detach(), name="right", writer=writer, threshold=65536)
    receiver = Channel(right.detach(), name="left", reader=reader)
    frame = Frame(Kind.UTILITY, 0, 1, b"header", [memoryview(bytes(100_000))] * buffers)
    try:
        for _ in range(2):  # the first one makes memory
            costs = calls_of(lambda: sender.send(frame)), calls_of(receiver.receive)
            gc.collect()
    finally:
        for made in (sender, receiver, writer, reader):
            made.close()
    assert max(costs) <= limit, costs


@pytest.mark.parametrize("running", [1, 64])
def test_a_step_of_the_scheduler_costs_the_same_however_many_wait(running: int) -> None:
    """It looks at those that wait only when there is room for one."""

    def cost(waiting: int) -> int:
        core = make_core(max_num_seqs=running)
        for number in range(running + waiting):
            add(core, f"r{number}", [1], max_tokens=50)
        step(core)
        return calls_of(lambda: step(core))

    assert abs(cost(1000) - cost(1)) <= 2
