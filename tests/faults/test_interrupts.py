"""A call is interrupted, or fails half way: nothing of it reaches the next one (BC-13, BC-50)."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine_client import EngineConfig, EngineDeadError, InprocClient, SyncMPClient
from engine_client.testing.executors import EchoExecutor
from engine_client.testing.scripted import Script
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.interrupts import interrupt_everywhere
from helpers.loans import be_patient, call_until_lent, is_lent
from helpers.procs import run_script
from helpers.scenes import Waiter, interrupt_after, methods
from helpers.timing import DEADLOCK, eventually, took_at_most

STORM = '''
import itertools, linecache, random, signal, sys, threading, time, traceback
import numpy as np
from engine_client.testing.leaks import LeakGuard
from engine_client.testing.scripted import Script
from helpers.clients import collect, make_request, scripted_client

method, what, rounds, signals, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
rng = random.Random(seed)
big = np.arange(1 << 20, dtype=np.uint8)
longest = {"get": 3e-3, "send": 2e-3, "call": 2e-3, "big call": 6e-3, "decode": 4e-3, "abort": 1e-3,
           "lone call": 6e-3, "lone request": 9e-3}[what]
inside = 0
shots = 0


def shoot(number, frame):
    """Be a SIGINT to the microsecond; if there is to be a second one, it comes soon."""
    global shots
    shots += 1
    if shots < signals:
        signal.setitimer(signal.ITIMER_REAL, rng.choice([1e-5, 1e-4, 1e-3]) * rng.random() + 1e-6)
    raise KeyboardInterrupt


signal.signal(signal.SIGALRM, shoot)


def until_interrupted(operation):
    """Repeat an operation until KeyboardInterrupt; tell whether that came inside of the library."""
    global shots
    shots = 0
    delay = rng.uniform(0, longest) if rng.random() < 0.7 else rng.uniform(0, 2e-4)
    error = None
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + delay)
            while True:
                operation()
        except KeyboardInterrupt as caught:
            error = caught
        while shots < signals:
            time.sleep(1e-4)
    except KeyboardInterrupt:
        pass
    while shots < signals:
        pass
    frames = [] if error is None else list(traceback.walk_tb(error.__traceback__))
    frames = [(frame, line) for frame, line in frames if frame.f_code is not shoot.__code__]
    where = [frame for frame, _ in frames if frame.f_code.co_filename.endswith("clients/sync.py")]
    if not where:
        return False
    frame, line = frames[-1]
    # Where a method begins it has done nothing yet: as if the interrupt had come just before it was called.
    text = linecache.getline(frame.f_code.co_filename, line or frame.f_code.co_firstlineno).strip()
    return frame is not where[0] or not text.startswith(("def ", "begun, me = ", "taken: "))


def main():
    global inside
    with LeakGuard(), scripted_client(Script(step_seconds=2e-4), start_method=method) as client:
        names = itertools.count()
        olds = 0 if "lone" in what else 4  # a lone caller reads for itself

        def lone_request():
            client.add_request(make_request(f"name{next(names)}", 1))
            client.get_output()

        if what == "decode":
            client.call_utility("set_echo_tensor", True)
        operations = {
            "get": client.get_output,
            "send": lambda: client.add_request(make_request(f"name{next(names)}", 10**6, None, prompt_embeds=big)),
            "call": lambda: client.call_utility("echo", 1),
            "big call": lambda: client.call_utility("echo", big),
            "decode": client.get_output,
            "abort": lambda: client.abort_requests(["old0", "unknown"]),
            "lone call": lambda: client.call_utility("echo", 1),
            "lone request": lone_request,
        }
        for number in range(rounds):
            for k in range(olds):
                embeds = big if what == "decode" else None
                client.add_request(make_request(f"old{k}", 10**6, prompt_embeds=embeds))
            if olds:
                client.get_output(timeout=20)
            began = time.monotonic()
            clean = until_interrupted(operations[what])
            assert time.monotonic() - began < 1, "the interrupt came late"
            inside += clean
            if not clean or what == "abort":  # it hit this script; or a call that is no part of a generation
                client.abort_requests([f"old{k}" for k in range(olds)])
                client.abort_requests([f"name{n}" for n in range(next(names))])
            client.add_request(make_request("old1", 2))
            client.add_request(make_request(f"new{number}", 3))
            found = collect(client, 2, 20)
            tokens = {name: sum(len(o.new_token_ids) for o in outputs) for name, outputs in found.items()}
            assert tokens == {"old1": 2, f"new{number}": 3}, (number, tokens)
            assert client.call_utility("echo", number, timeout=20) == number
            if number % 10 == 9:
                del found
                session = client._session
                assert len(session.in_flight) == len(session.calls) == 0, session
                deadline = time.monotonic() + 10
                while client.call_utility("info")["requests"] or session.writer.used:
                    assert time.monotonic() < deadline, (client.call_utility("info")["requests"], session.writer)
                    time.sleep(0.005)


main()
print(inside)
'''

KINDS = ["get", "send", "call", "big call", "decode", "abort", "lone call", "lone request"]


@methods()
@pytest.mark.parametrize("what", KINDS)
@pytest.mark.slow
def test_bc13_ctrl_c_at_random_moments_leaves_the_next_call_clean(what: str, method: str) -> None:
    """After an interrupt in any call, old outputs never come, an old id and a new one both work, no memory is lost."""
    result = run_script(STORM, method, what, "30", "1", str(random.random()), timeout=2 * DEADLOCK).check()
    assert int(result.stdout) > 10


@pytest.mark.parametrize("what", KINDS)
@pytest.mark.slow
def test_bc13_two_interrupts_in_a_row_are_no_worse(what: str) -> None:
    """A second Ctrl-C, while the first one is being dealt with, changes nothing of that."""
    run_script(STORM, "exec", what, "30", "2", str(random.random()), timeout=2 * DEADLOCK).check()


@pytest.mark.stress
@pytest.mark.full
@pytest.mark.parametrize("signals", ["1", "2"])
@pytest.mark.parametrize("what", KINDS)
def test_bc13_ctrl_c_two_hundred_times(what: str, signals: str) -> None:
    """The same, two hundred times for each kind of call."""
    run_script(STORM, "exec", what, "200", signals, str(random.random()), timeout=110).check()


# -- at every point ----------------------------------------------------------------------------------------------------

BIG = np.arange(1 << 17, dtype=np.uint8)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[SyncMPClient]:
    """A client, of more ranks if so parametrised, that has done everything once, so that all takes the same way."""
    config = EngineConfig()
    config.parallel_config.data_parallel_size = getattr(request, "param", 1)
    with scripted_client(Script(step_seconds=0.0005), config=config) as made:
        made.call_utility("echo", BIG)
        blocks = [made.allocate(BIG.nbytes) for _ in range(20)]
        del blocks
        made.add_request(make_request("first", 1))
        collect(made, 1)
        yield made


def check_clean(client: SyncMPClient) -> None:
    """Check that nothing of an interrupted call is left, on either side, and that the next ones work."""
    session = session_of(client)
    assert client.call_utility("echo", 7, timeout=DEADLOCK) == 7
    assert (len(session.in_flight), len(session.calls)) == (0, 0)
    ranks = list(session.links)
    assert [info["requests"] for info in client.call_utility("info", timeout=DEADLOCK, ranks=ranks)] == [[]] * len(
        ranks
    )
    client.add_request(make_request("x", 2))
    assert [(name, len(outputs)) for name, outputs in collect(client, 1).items()] == [("x", 2)]
    client.call_utility("info")  # whatever the engine held of the last call is dropped with this one
    eventually(lambda: session.writer is not None and session.writer.used == 0)
    assert not session.callers


OPERATIONS: dict[str, Callable[[SyncMPClient], Any]] = {
    "add": lambda client: client.add_request(make_request("x", 3)),
    "add big": lambda client: client.add_request(make_request("x", 3, None, prompt_embeds=BIG)),
    "call": lambda client: client.call_utility("echo", 1),
    "call while others run": lambda client: client.call_utility("echo", 1),
    "big call": lambda client: client.call_utility("echo", BIG),
    "get": lambda client: client.get_output(timeout=DEADLOCK),
    "abort": lambda client: client.abort_requests(["running"]),
}


OUTSIDE = re.compile(
    r"(sync|inproc|utilities)\.py: (get_output|add_request|abort_requests|call_utility|reset_prefix_cache)"
    r", (its start|after get_ident|its end)"
)
"""As the first thing in a call, or the last one, an interrupt has come before the call, or after it."""


@pytest.mark.parametrize("gap", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3, 5, 8, 13))])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bc50_an_interrupt_at_any_point_takes_the_whole_call_back(
    client: SyncMPClient, operation: str, gap: int
) -> None:
    """Wherever an interrupt comes, and another a few points later: tables, memory and ids are as before the call."""
    do = OPERATIONS[operation]
    with_request = operation in ("get", "abort", "call while others run")

    def prepare() -> None:
        if with_request:
            client.add_request(make_request("running", 10**6))

    def check(where: str) -> None:
        if OUTSIDE.match(where) or operation == "abort":  # which is no part of a generation
            client.abort_requests(["running", "x"])
        check_clean(client)

    assert interrupt_everywhere(lambda: do(client), check, prepare, gap) > 20
    client.abort_requests(["x", "running"])
    check_clean(client)


@pytest.mark.parametrize("gap", [0, 1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3, 5, 8, 13))])
@pytest.mark.parametrize("operation", ["call", "get"])
def test_bc50_an_interrupt_at_any_point_of_a_call_that_reads_its_answer_itself(
    client: SyncMPClient, operation: str, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where the reader stands aside: what the caller had read goes to whom it belongs."""
    be_patient(monkeypatch, short=0.1, tick=0.2)
    lent: list[bool] = []

    def prepare() -> None:
        call_until_lent(client)
        if operation == "get":
            client.add_request(make_request("running", 1))

    def do() -> None:
        lent.append(is_lent(client))
        OPERATIONS[operation](client)

    def check(where: str) -> None:
        if OUTSIDE.match(where):
            client.abort_requests(["running"])
        check_clean(client)

    assert interrupt_everywhere(do, check, prepare, gap) > 20
    assert sum(lent) > 10
    client.abort_requests(["running"])
    check_clean(client)


@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("operation", ["call", "big call"])
@pytest.mark.parametrize("client", [2], indirect=True)
def test_bc50_an_interrupt_at_any_point_of_a_call_to_two_ranks(client: SyncMPClient, operation: str, gap: int) -> None:
    """The same of a call that goes to several engines: sent to one of them or to both, nothing of it is left."""
    count = interrupt_everywhere(lambda: OPERATIONS[operation](client), lambda _: check_clean(client), gap=gap)
    assert count > 20


def test_bc13_requests_of_other_threads_lose_nothing_to_an_interrupt(client: SyncMPClient) -> None:
    """A batch that an interrupted get_output had in hand is delivered to the next one, final outputs included."""

    def prepare() -> None:
        thread = threading.Thread(target=lambda: client.add_request(make_request("other", 3)))
        thread.start()
        thread.join()

    def check(where: str) -> None:
        if where == "sync.py: get_output, its end":  # the outputs were returned
            client.abort_requests(["other"])
            return
        assert [(name, len(outputs)) for name, outputs in collect(client, 1).items()] == [("other", 3)], where
        assert len(session_of(client).in_flight) == 0

    count = interrupt_everywhere(lambda: client.get_output(timeout=DEADLOCK), check, prepare)
    assert count > 20


# -- at the beginning and at the end of a client -----------------------------------------------------------------------

BUILD = """
import random, signal, sys, time
from engine_client.testing.leaks import LeakGuard
from engine_client.testing.scripted import Script
from helpers.clients import scripted_client

method, rounds = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGALRM, signal.default_int_handler)
outcomes = set()
for number in range(rounds):
    with LeakGuard():
        client = None
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + 0.15 * number / rounds)
            client = scripted_client(Script(start_seconds=0.05), start_method=method)
            outcomes.add("built")
            time.sleep(1)
        except KeyboardInterrupt:
            outcomes.add("interrupted")
        began = time.monotonic()
        if client is not None:
            client.shutdown()
        assert time.monotonic() - began < 2
        del client
assert "interrupted" in outcomes
"""

END = """
import random, signal, sys, time
from engine_client.testing.leaks import LeakGuard
from engine_client.testing.scripted import Script
from helpers.clients import make_request, scripted_client

rounds, signals = int(sys.argv[1]), int(sys.argv[2])
shots = 0


def shoot(number, frame):
    global shots
    shots += 1
    if shots < signals:
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
    raise KeyboardInterrupt


signal.signal(signal.SIGALRM, shoot)
for number in range(rounds):
    with LeakGuard():
        client = scripted_client(Script(step_seconds=1e-3), shutdown_timeout=3)
        client.add_request(make_request("a", 10**6))
        shots = 0
        began = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + 0.06 * number / rounds)
            client.shutdown()
            time.sleep(0.1)
        except KeyboardInterrupt:
            pass
        while shots < signals:
            try:
                time.sleep(1e-3)
            except KeyboardInterrupt:
                pass
        client.shutdown()
        assert time.monotonic() - began < 4
        try:
            client.get_output()
        except Exception as error:
            assert type(error).__name__ == "ClosedError", error
        del client
"""


@methods("spawn")
@pytest.mark.slow
def test_bc13_an_interrupt_of_the_constructor_leaves_no_engine(method: str) -> None:
    """Whenever Ctrl-C comes, the constructor raises it or is done, and the engine can always be ended."""
    run_script(BUILD, method, "15", timeout=2 * DEADLOCK).check()


@pytest.mark.parametrize("signals", ["1", "2"])
@pytest.mark.slow
def test_bc13_an_interrupt_of_the_shutdown_ends_it_all_the_same(signals: str) -> None:
    """Whenever Ctrl-C comes, the engine is gone when the next shutdown returns, within the bound."""
    run_script(END, "15", signals, timeout=2 * DEADLOCK).check()


def test_bc13_ctrl_c_reaches_whoever_waits_for_room() -> None:
    """With an engine that reads nothing, the senders that wait at the high-water mark can be interrupted (BC-33)."""
    with scripted_client(arena_limit=0, high_water=1 << 20) as client:
        waiter = Waiter(lambda: client.call_utility("wait", 2), again=False)
        eventually(lambda: client.utility_results)
        client.add_request(make_request("fits", 1, None, prompt_embeds=bytes(8 << 20)))
        with took_at_most(1.5), interrupt_after(0.3), pytest.raises(KeyboardInterrupt):
            client.add_request(make_request("waits", 1, None, prompt_embeds=bytes(8 << 20)))
        assert len(session_of(client).in_flight) == 0
        waiter.end(time.monotonic(), DEADLOCK)
        client.add_request(make_request("fits", 1))
        assert list(collect(client, 1)) == ["fits"]


# -- failures half way -------------------------------------------------------------------------------------------------


class Unpicklable:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise OSError("not this one")


@pytest.mark.parametrize("failing", range(4))
def test_bc50_of_four_siblings_one_cannot_be_encoded(client: SyncMPClient, failing: int) -> None:
    """The id of that one is free and its memory too; the ones already sent can be aborted, and are, in the engine."""
    for number in range(4):
        extra = {"x": Unpicklable()} if number == failing else None
        request = make_request(f"sibling{number}", 10**6, prompt_embeds=BIG, trace_headers=extra)
        if number == failing:
            with pytest.raises(OSError, match="not this one"):
                client.add_request(request)
        else:
            client.add_request(request)
    assert len(session_of(client).in_flight) == 3
    began = time.monotonic()
    client.abort_requests([f"sibling{number}" for number in range(4)])
    assert client.call_utility("info")["requests"] == []
    assert time.monotonic() - began < 1
    client.add_request(make_request(f"sibling{failing}", 1))
    assert list(collect(client, 1)) == [f"sibling{failing}"]
    check_clean(client)


def test_bc50_a_transport_that_breaks_at_the_third_write(client: SyncMPClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call whose write fails, and every later one, gets EngineDeadError; nothing waits or stays registered."""
    session = session_of(client)
    (link,) = session.links.values()
    send = link.channel.send
    count = 0

    def break_at_the_third(frame: Any) -> bool:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(link.pid, 9)
            raise BrokenPipeError("the third write")
        return send(frame)

    monkeypatch.setattr(link.channel, "send", break_at_the_third)
    for number in range(2):
        client.add_request(make_request(f"r{number}", 10**6))
    with took_at_most(2.0), pytest.raises(EngineDeadError, match="SIGKILL"):
        client.add_request(make_request("r2", 10**6))
    assert session.in_flight.keys_of(["r2"]) == {}
    for call in (lambda: client.call_utility("echo", 1), lambda: client.add_request(make_request("r3"))):
        with pytest.raises(EngineDeadError):
            call()
    assert len(session.calls) == 0


@pytest.mark.parametrize("exhausted", [MemoryError("no memory"), OSError(28, "no space")], ids=["memory", "space"])
def test_bc50_a_failure_while_the_payload_is_placed(
    client: SyncMPClient, monkeypatch: pytest.MonkeyPatch, exhausted: Exception
) -> None:
    """An error between encoding and sending reaches the caller; the id is free, and so is the memory."""
    writer = session_of(client).writer
    assert writer is not None
    put = writer.put

    def fail_at_the_second(*args: Any) -> Any:
        if writer.used:
            raise exhausted
        return put(*args)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "put", fail_at_the_second)
        with pytest.raises(type(exhausted)):
            client.add_request(make_request("x", 1, None, prompt_embeds=(BIG, BIG.copy())))
    check_clean(client)


# -- in process --------------------------------------------------------------------------------------------------------


def drain(client: InprocClient, count: int) -> dict[str, int]:
    """Step until ``count`` requests have ended; return the number of tokens of each."""
    found: dict[str, int] = {}
    for _ in range(100):
        for output in client.get_output().outputs:
            found[output.request_id] = found.get(output.request_id, 0) + len(output.new_token_ids)
            count -= output.finished
        if not count:
            break
    return found


LATE = make_request("late", 3, range(40))
IN_PROCESS: dict[str, Callable[[InprocClient], Any]] = {
    "add": lambda client: client.add_request(LATE),
    "first step": lambda client: client.get_output(),
    "a later step": lambda client: client.get_output(),
    "abort": lambda client: client.abort_requests(["old0"]),
    "call": lambda client: client.reset_prefix_cache(reset_running_requests=True),
}


@pytest.mark.parametrize("gap", [0, 1, 3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 5, 8))])
@pytest.mark.parametrize("operation", IN_PROCESS)
def test_bc13_in_process_the_next_call_is_clean_too(operation: str, gap: int) -> None:
    """Wherever an interrupt comes in a step or another call: old outputs never come, and all KV blocks are free."""
    with InprocClient(EngineConfig(), EchoExecutor, False) as client:

        def prepare() -> None:
            client.abort_requests([f"old{n}" for n in range(4)])
            for number in range(4):
                client.add_request(make_request(f"old{number}", 1000, range(1, 50)))
            if operation != "first step":
                client.get_output()

        def check(where: str) -> None:
            if OUTSIDE.match(where):
                client.abort_requests(["late", *(f"old{n}" for n in range(4))])
            client.add_request(make_request("old1", 2))
            client.add_request(make_request("new", 3))
            assert drain(client, 2) == {"old1": 2, "new": 3}
            assert client.engine_core.scheduler.cache.usage == 0
            assert client.engine_core.counts() == (0, 0)

        assert interrupt_everywhere(lambda: IN_PROCESS[operation](client), check, prepare, gap) > 10
