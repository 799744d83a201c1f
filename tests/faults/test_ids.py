"""Ids that are unknown, over, or taken: nobody but their user notices (BC-22, BC-23)."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest

from engine_client import FinishReason, InprocClient
from engine_client.ipc.channel import Channel
from engine_client.protocol.wire import encode_abort
from engine_client.testing.faults import frozen
from helpers.clients import make_request, pid_of, pids_of, scripted_client, session_of
from helpers.inside import tables
from helpers.procs import run_script
from helpers.scenes import client_of, colours
from helpers.timing import DEADLOCK, eventually, took_at_most

LENGTH = 20
NUMBER = 50

OF_PROCESSES = ["exec", "dp", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("async", "fork"))]
kinds = pytest.mark.parametrize("kind", ["inproc", *OF_PROCESSES])
two_kinds = pytest.mark.parametrize("kind", OF_PROCESSES)


class Reader:
    """Reads a client's outputs, and keeps what each request got."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, Any] = {}

    def read(self) -> None:
        if isinstance(self.client, InprocClient):
            outputs = self.client.get_output().outputs
        else:
            outputs = self.client.get_output(timeout=20).outputs
        for output in outputs:
            assert output.request_id not in self.ended
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                self.ended[output.request_id] = output.finish_reason

    def read_until(self, names: Iterable[str]) -> None:
        wanted = set(names)
        began = time.monotonic()
        while not wanted <= set(self.ended):
            assert time.monotonic() - began < DEADLOCK
            self.read()

    def forget(self, name: str) -> None:
        self.tokens.pop(name, None)
        self.ended.pop(name, None)


@contextmanager
def served(kind: str) -> Iterator[tuple[Any, Reader]]:
    """Yield a client of a real engine core; check that both sides are empty in the end."""
    with client_of(kind) as client:
        yield client, Reader(client)
        if isinstance(client, InprocClient):
            assert client.collective_rpc(tables) == [(0, False)]
            return
        assert len(session_of(client).in_flight) == 0
        assert client.utility_results == {}
        ranks = list(session_of(client).links)
        for left in client.call_utility("collective_rpc", tables, None, (), None, ranks=ranks):
            assert left == [(0, False)]


@contextmanager
def all_frozen(client: Any) -> Iterator[None]:
    """Stop all engines of a client for the length of the block."""
    with ExitStack() as stack:
        for pid in pids_of(client):
            stack.enter_context(frozen(pid))
        yield


def channels_of(client: Any) -> list[Channel]:
    """Return the channels to all engines; an engine in this process has none."""
    return [] if isinstance(client, InprocClient) else [link.channel for link in session_of(client).links.values()]


def request(name: str, length: int = LENGTH) -> Any:
    """Return a request whose every token is made of its name."""
    return make_request(name, length, [1, token_of(name)])


def token_of(name: str) -> int:
    return 1 + sum(map(ord, name[:100])) % 1000


@kinds
def test_bc22_aborts_of_whatever_is_not_there(kind: str) -> None:
    """Aborts of ids never added, finished, doubled, strange or many: the other requests get all of their tokens."""
    names = [f"r{n}" for n in range(NUMBER)]
    with served(kind) as (client, reader):
        gone = names[:10]
        client.add_request(request("short", 1))
        for name in names:
            client.add_request(request(name, 4000 if name in gone else LENGTH))  # not over before it is aborted
        reader.read_until(["short"])
        strange: list[Any] = [
            ["never added"],
            ["short"],
            [gone[0], gone[0]],
            [gone[0]],
            [f"x{n}" for n in range(1000)],
            [*[f"y{n}" for n in range(990)], *gone],
            [],
            [7],
            [None],
            [["a list"]],
            [{}, b"bytes", 1.5, float("nan")],
            ["\ud800", "", "null\0byte", "x" * (1 << 20)],
            (gone[0],),
            iter([gone[0]]),
        ]
        for ids in strange:
            client.abort_requests(ids)
            got = {name: len(reader.tokens.get(name, ())) for name in gone}
            reader.read()
            if ids and gone[-1] in ids:
                before = got
        reader.read_until(names[10:])
        for name in names[10:]:
            assert reader.tokens[name] == [token_of(name)] * LENGTH
            assert reader.ended[name] is FinishReason.LENGTH
        assert {name: len(reader.tokens.get(name, ())) for name in gone} == before
        assert not set(gone) & set(reader.ended)
        assert client.is_sleeping() is False


def test_bc22_a_string_of_an_id_is_one_id() -> None:
    """An id given without a list aborts that request, and not those that are named as its letters are."""
    for kind in ("inproc", "exec", "dp"):
        with served(kind) as (client, reader):
            for name in ("ab", "a", "b"):
                client.add_request(request(name))
            client.abort_requests("ab")
            reader.read_until(["a", "b"])
            assert "ab" not in reader.tokens


@two_kinds
def test_bc22_an_abort_before_its_add(kind: str) -> None:
    """An abort that reaches the engine before the request that it names leaves that one alone."""
    with served(kind) as (client, reader):
        key = session_of(client).in_flight.new_key() + 1
        for channel in channels_of(client):
            channel.send(encode_abort([key, key + 1, 2**63, 0]))
        client.add_request(request("a"))
        reader.read_until(["a"])
        assert reader.tokens["a"] == [token_of("a")] * LENGTH


@two_kinds
def test_bc22_add_abort_and_add_again_in_one_read(kind: str) -> None:
    """Of a request that is aborted while it is still in the pipe nothing comes; the next of its id gets its own."""
    with served(kind) as (client, reader):
        with all_frozen(client):
            for length in (50, 40, 30):
                client.add_request(request("a", length))
                client.add_request(request(f"b{length}", 5))
                client.abort_requests(["a"])
            client.add_request(request("a", 7))
        reader.read_until(["a", "b50", "b40", "b30"])
        assert len(reader.tokens["a"]) == 7


@kinds
def test_bc22_aborts_race_completions(kind: str) -> None:
    """Requests are aborted at the moment that they end, again and again; the others end as they should."""
    rng = random.Random(22)
    with served(kind) as (client, reader):
        client.add_request(request("long", 3000))
        for turn in range(60):
            names = [f"{turn}-{n}" for n in range(10)]
            for name in names:
                client.add_request(request(name, rng.randint(1, 6)))
            for _ in range(rng.randint(0, 6)):
                reader.read()
            client.abort_requests(rng.sample(names, 7))
            client.abort_requests(names[:1])
            client.abort_requests(names)
            before = {name: len(reader.tokens.get(name, ())) for name in names}
            reader.read()
            assert before == {name: len(reader.tokens.get(name, ())) for name in names}
        client.abort_requests(["long"])


@pytest.mark.parametrize("kind", ["exec", "dp"])
def test_bc22_aborts_from_other_threads(kind: str) -> None:
    """Threads abort what another one reads: each request ends or is silent, and no table keeps anything."""
    with served(kind) as (client, reader):
        stop = threading.Event()
        errors: list[BaseException] = []

        def disturb(seed: int) -> None:
            rng = random.Random(seed)
            try:
                while not stop.is_set():
                    client.abort_requests([f"{rng.randrange(200)}-{rng.randrange(2)}", "never", seed])
                    time.sleep(rng.random() * 1e-3)
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=disturb, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for turn in range(200):
            for part in range(3):  # only the first two are aborted
                client.add_request(request(f"{turn}-{part}", 5))
            reader.read_until([f"{turn}-2"])
        stop.set()
        for thread in threads:
            thread.join(DEADLOCK)
        client.abort_requests([f"{turn}-{part}" for turn in range(200) for part in range(2)])
        assert errors == []
        assert all(len(reader.tokens[f"{turn}-2"]) == 5 for turn in range(200))
        assert all(len(tokens) <= 5 for tokens in reader.tokens.values())


@pytest.mark.crash
@colours
@pytest.mark.parametrize("known", [False, True])
def test_bc22_aborts_after_the_death(known: bool, colour: str) -> None:
    """They raise nothing and take no time, whether the death is known yet or not."""
    client = scripted_client(colour=colour)
    for n in range(NUMBER):
        client.add_request(make_request(f"r{n}", 10**6))
    client.get_output(timeout=20)
    os.kill(pid_of(client), signal.SIGKILL)
    if known:
        eventually(lambda: not client.is_alive)
    with took_at_most(2.0):
        client.abort_requests(["r0"])
        client.abort_requests(["r0", "never"])
        client.abort_requests([f"r{n}" for n in range(NUMBER)])
    assert len(session_of(client).in_flight) == 0
    client.shutdown()
    client.abort_requests(["r0"])


SHUTDOWN = """
import atexit, sys, threading
from engine_client.testing.leaks import LeakGuard
from helpers.clients import make_request
from helpers.scenes import client_of

client = client_of(sys.argv[1])
atexit.register(lambda: (client.abort_requests(["a", "b"]), print("aborted at exit")))

def generate(name):
    client.add_request(make_request(name, 10**6))
    try:
        while True:
            yield client.get_output()
    finally:
        client.abort_requests([name])
        print("aborted", name)

first, second = generate("a"), generate("b")
next(first), next(second)
if sys.argv[2] == "shutdown":
    thread = threading.Thread(target=client.shutdown)
    thread.start()
    first.close()
    thread.join()
    second.close()
del first
print("end")
"""


@pytest.mark.parametrize("kind", ["inproc", "exec", pytest.param("fork", marks=pytest.mark.full)])
@pytest.mark.parametrize("way", ["shutdown", "exit"])
def test_bc22_aborts_from_finally_blocks_at_the_end(kind: str, way: str) -> None:
    """A generator that is closed during a shutdown, after it, or by the interpreter's end, aborts in silence."""
    result = run_script(SHUTDOWN, kind, way).check()
    assert result.stdout.count("aborted a\n") == result.stdout.count("aborted b\n") == 1
    assert "aborted at exit" in result.stdout


# -- BC-23 -------------------------------------------------------------------------------------------------------------


def refused(client: Any, name: str) -> None:
    """Check that an id is refused here, and that nothing of it reaches the engine."""
    sent: list[Any] = []
    channels = channels_of(client)
    entries = len(session_of(client).in_flight) if channels else 0
    with pytest.MonkeyPatch.context() as patch:
        for channel in channels:
            patch.setattr(channel, "send", sent.append)
        with pytest.raises(ValueError, match="already running") as caught:
            client.add_request(request(name, 3))
    assert len(str(caught.value)) < 1000
    assert sent == []
    if channels:
        assert len(session_of(client).in_flight) == entries


@kinds
def test_bc23_a_second_add_of_a_live_id(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """While the first is queued or runs, ValueError and nothing is sent; after its end or abort the id is free."""
    with served(kind) as (client, reader):
        with nullcontext() if kind == "inproc" else all_frozen(client):
            client.add_request(request("x"))
            refused(client, "x")
        while "x" not in reader.tokens:
            reader.read()
        if len(reader.tokens["x"]) < LENGTH:
            refused(client, "x")
        reader.read_until(["x"])
        assert reader.tokens["x"] == [token_of("x")] * LENGTH
        for _ in range(20):
            reader.forget("x")
            client.add_request(request("x", 2))
            reader.read_until(["x"])
            assert len(reader.tokens["x"]) == 2
        for _ in range(20):
            reader.forget("x")
            client.add_request(request("x", 10**4))
            client.abort_requests(["x"])
            client.add_request(request("x", 2))
            refused(client, "x")
            reader.read_until(["x"])
            assert len(reader.tokens["x"]) == 2
    assert "refused" not in capfd.readouterr().err


@two_kinds
def test_bc23_two_threads_add_one_id_at_the_same_moment(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Exactly one wins, each time; the engine never hears of the other."""
    with served(kind) as (client, reader):
        barrier = threading.Barrier(2)
        results: list[Any] = []

        def add() -> None:
            for turn in range(200):
                barrier.wait(DEADLOCK)
                try:
                    client.add_request(request(f"r{turn}", 3))
                    results.append("won")
                except ValueError as error:
                    results.append(str(error))
                barrier.wait(DEADLOCK)
                # Nobody reads meanwhile, so all of them are live.

        threads = [threading.Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLOCK)
        assert results.count("won") == 200
        assert sum("already running" in result for result in results) == 200
        reader.read_until([f"r{turn}" for turn in range(200)])
        assert all(len(tokens) == 3 for tokens in reader.tokens.values())
    assert "refused" not in capfd.readouterr().err


IDS = {
    "null byte": "a\0b",
    "lone surrogate": "a\ud800b",
    "1 MiB": "x" * (1 << 20),
    "one blank": " ",
    "astral": "\U0001f600",
}


@kinds
def test_bc23_ids_of_every_form(kind: str) -> None:
    """A null byte, a lone surrogate, 1 MiB: each serves as an id, is refused the second time, and can be aborted."""
    with served(kind) as (client, reader):
        for name in IDS.values():
            client.add_request(request(name, 500))
            refused(client, name)
            while name not in reader.tokens:
                reader.read()
            client.abort_requests([name])
            reader.forget(name)
            client.add_request(request(name, 3))
        reader.read_until(IDS.values())
        assert {name: reader.tokens[name] for name in IDS.values()} == {n: [token_of(n)] * 3 for n in IDS.values()}


@kinds
def test_bc23_what_is_no_id_is_refused_in_the_call(kind: str) -> None:
    """An empty id is a ValueError and another type a TypeError; the client serves on."""
    wrong: list[Any] = ["", None, 7, b"a", ["a"]]
    with served(kind) as (client, reader):
        for name in wrong:
            bad = request("a", 1)
            bad.request_id = name
            with pytest.raises(ValueError if name == "" else TypeError, match="request_id"):
                client.add_request(bad)
        client.add_request(request("a", 1))
        reader.read_until(["a"])


def test_bc23_the_engine_refuses_an_id_of_every_form(capfd: pytest.CaptureFixture[str]) -> None:
    """What only the engine can refuse ends with ERROR whatever its id is, and the log line about it is short."""
    with served("exec") as (client, reader):
        for name in IDS.values():
            bad = request(name, 3)
            bad.resumable = True
            client.add_request(bad)
            reader.read_until([name])
            assert reader.ended[name] is FinishReason.ERROR
        client.add_request(request("a", 3))
        reader.read_until(["a"])
    assert len(capfd.readouterr().err) < 10_000
