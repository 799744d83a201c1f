"""What goes to and fro between callers and an engine that the test plays: room, timeouts, interrupts, wrong threads."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine_client import (
    ClosedError,
    EngineDeadError,
    FinishReason,
    ForeignProcessError,
    RemoteCallError,
)
from engine_client.clients.caller import Caller
from engine_client.clients.session import Session
from engine_client.deadline import Deadline
from engine_client.errors import LocalProtocolError
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs
from engine_client.protocol.batch import encode_outputs
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import decode_abort, encode_reply, encode_utility
from engine_client.testing.scripted import Script
from helpers.calls import call, played_session, received
from helpers.clients import collect, make_request, reader_of, scripted_client
from helpers.peers import Peer
from helpers.pipes import hold_reader
from helpers.timing import DEADLOCK, eventually, took_at_most

BIG = bytes(4 << 20)
"""More than the pipe takes and than the high-water mark of these tests."""


@contextmanager
def session(**options: Any) -> Iterator[tuple[Session, Peer]]:
    """A session whose engine is played by the test."""
    with played_session(**options) as (made, (peer,)):
        yield made, peer


def test_waiting_for_room_keeps_the_caller_s_deadline() -> None:
    """A call whose engine reads nothing ends at its deadline, and leaves nothing behind."""
    with session(high_water=1 << 20) as (s, _):
        call(s, "big", BIG)
        with took_at_most(5.0), pytest.raises(TimeoutError, match=r"reads nothing.* 0\.1 s"):
            call(s, "next", timeout=0.1)
        assert len(s.calls) == 1


def test_all_who_wait_for_room_go_on_when_there_is_some() -> None:
    """Twenty senders at once: the news of room is lost to none of them."""
    with session(high_water=1 << 20) as (s, peer):
        call(s, "big", BIG)
        threads = [threading.Thread(target=s.add, args=(make_request(f"r{i}"),)) for i in range(20)]
        for thread in threads:
            thread.start()
        received(peer, Kind.ADD, 20)
        for thread in threads:
            thread.join(DEADLOCK)
            assert not thread.is_alive()


def test_room_that_a_sender_makes_is_told() -> None:
    """Where a sender writes what was waiting, before the reader could, those who wait for room hear of it."""
    go = threading.Event()
    with played_session() as (s, [peer]):
        hold_reader(SimpleNamespace(_session=s), go)  # type: ignore[arg-type]  # what it needs of a client
        try:
            told: list[None] = []
            s.send(peer.link, encode_utility(1, "echo", (bytes(1 << 20),)))
            assert peer.link.channel.waiting
            s.room.join(lambda: told.append(None))
            for _ in range(1000):
                peer.channel.receive()
                s.send(peer.link, encode_utility(2, "echo", ()))
                if not peer.link.channel.waiting:
                    break
            assert not peer.link.channel.waiting
            assert told
        finally:
            go.set()


def test_what_would_wait_for_itself_is_refused() -> None:
    """On the reader's thread, in a done-callback, calls and ``get`` raise at once; a request may be added there."""
    with session() as (s, peer):
        seen: list[Any] = []

        def on_done(_: Any) -> None:
            for operation in (lambda: call(s, "x"), lambda: s.get(None)):
                try:
                    operation()
                except LocalProtocolError as error:
                    seen.append(str(error))
            s.add(make_request("from the callback"))
            seen.append("added")

        first = call(s, "first")
        first.replies[0].add_done_callback(on_done)
        peer.channel.send(encode_reply(first.ids[0], 1))
        eventually(lambda: "added" in seen, DEADLOCK)
        assert [text[:26] for text in seen[:2]] == ["this would wait for ever: "[:26]] * 2
        assert len(received(peer, Kind.ADD, 1)) == 1


def test_an_interrupted_call_leaves_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt inside of the send takes the call out of the table."""
    with session() as (s, _):
        caller = Caller(s)
        fan_out = caller.begin("x")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(s.links[0].channel, "send", _interrupt)
            caller.send(fan_out, "x", (), Deadline(None))
        assert len(s.calls) == 0


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_what_a_second_interrupt_left_can_be_done_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that should have been aborted are aborted then, and their ids are free."""
    with session() as (s, peer):
        s.add(make_request("a"))
        (add,) = received(peer, Kind.ADD, 1)
        with monkeypatch.context() as patch:
            patch.setattr(s.in_flight, "mine", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                s.interrupted()
        assert len(s.in_flight) == 1
        assert s.callers
        s.settle()
        s.add(make_request("a"))
        assert len(s.in_flight) == 1
        frames: list[Frame] = []
        eventually(lambda: frames.extend(peer.channel.receive()) or len(frames) == 2, DEADLOCK)
        assert [frame.kind for frame in frames] == [Kind.ABORT, Kind.ADD]
        assert decode_abort(frames[0]) == [add.ref]


def test_aborting_after_the_end_is_quiet_and_leaves_no_work() -> None:
    """Whatever was to be aborted is forgotten when there is no engine."""
    with session() as (s, peer):
        s.add(make_request("a"))
        peer.channel.close()
        with pytest.raises(EngineDeadError):
            s.get(DEADLOCK)
        s.abort(["a"])
        s.interrupted()
        assert len(s.in_flight) == 0


class Bomb:
    """Raises SystemExit when it is unpickled."""

    def __reduce__(self) -> Any:
        return exit, ()


def test_replies_become_values_or_errors_where_they_are_waited_for() -> None:
    """A value, an exception, what is no plain exception, and what cannot be decoded: each ends its own call."""
    with session() as (s, peer):

        def answer(reply: Any, error: BaseException | None = None, frame: Frame | None = None) -> Any:
            waiting = call(s, "x")
            (call_id,) = waiting.ids
            peer.channel.send(frame._replace(ref=call_id) if frame else encode_reply(call_id, reply, error))
            return waiting.wait(Deadline(DEADLOCK))

        assert answer({1, 2}) == [{1, 2}]
        with pytest.raises(KeyError, match="theirs"):
            answer(None, KeyError("theirs"))
        with pytest.raises(RemoteCallError, match="SystemExit: 3"):
            answer(None, SystemExit(3))
        with pytest.raises(RemoteCallError, match="cannot be decoded: SystemExit"):
            answer(Bomb())
        with pytest.raises(RemoteCallError, match="cannot be decoded: UnpicklingError"):
            answer(None, frame=Frame(Kind.REPLY, 0, 0, b"no pickle"))
        with pytest.raises(TimeoutError, match=r"the utility 'mute' was not answered within 0\.01 s"):
            call(s, "mute").wait(Deadline(0.01))


def test_an_interrupt_while_a_reply_is_decoded_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the caller's own."""
    with session() as (s, peer):
        waiting = call(s, "x")
        peer.channel.send(encode_reply(waiting.ids[0], 1))
        monkeypatch.setattr("engine_client.clients.fan_out.decode_reply", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            waiting.wait(Deadline(DEADLOCK))


def test_a_request_that_cannot_be_sent_is_not_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wrong rank, a value that cannot be pickled, and an interrupt, its id is free."""
    with session() as (s, peer):
        for extra, error in (({"data_parallel_rank": 3}, ValueError), ({"trace_headers": {"x": lambda: 0}}, TypeError)):
            with monkeypatch.context() as patch, pytest.raises(error):
                patch.setitem(sys.modules, "cloudpickle", None)
                s.add(make_request("a", **extra))
            assert len(s.in_flight) == 0
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(s.links[0].channel, "send", _interrupt)
            s.add(make_request("a"))
        assert len(s.in_flight) == 0
        s.add(make_request("a", data_parallel_rank=0))
        assert [f.kind for f in received(peer, Kind.ADD, 1)] == [Kind.ADD]


def test_sending_to_a_peer_that_has_just_gone_tells_how_it_went() -> None:
    """Both kinds of sending end in EngineDeadError, and so does everything later."""
    with session() as (s, peer):
        peer.process.kill()
        peer.channel.close()
        with took_at_most(3.0):
            for _ in range(3):
                for send in (lambda: s.add(make_request("a")), lambda: call(s, "x")):
                    with pytest.raises(EngineDeadError, match="SIGKILL"):
                        send()
        assert (len(s.calls), len(s.in_flight)) == (0, 0)


def test_a_death_right_behind_the_send_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is registered after everybody was told is told as well."""
    with session() as (s, _):
        send = s.links[0].channel.send

        def die_behind_it(frame: Frame) -> bool:
            waiting, s.calls.replies = s.calls.replies, {}
            s.close(0.0)
            s.calls.replies = waiting
            return send(frame) if s.links[0].channel.fileno() >= 0 else True

        monkeypatch.setattr(s.links[0].channel, "send", die_behind_it)
        (reply,) = call(s, "x").replies
        with pytest.raises(ClosedError):
            reply.result(0)


def test_strange_rows_and_lost_values_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of nobody's, and values that cannot be decoded: one line each; the request of such a value ends."""
    with session() as (s, peer), caplog.at_level(logging.WARNING, "engine_client.session"):
        for name in ("a", "b"):
            s.add(make_request(name))
        keys = {frame_.ref: name for frame_, name in zip(received(peer, Kind.ADD, 2), "ab", strict=True)}
        rows = [EngineCoreOutput(name, [1], pooling_output=Bomb()) for name in keys.values()]
        for row in (*rows, EngineCoreOutput("stranger", [1]), EngineCoreOutput("stranger", [2])):
            frame_, _ = encode_outputs(EngineCoreOutputs(0, [row]), {name: key for key, name in keys.items()})
            assert frame_ is not None
            peer.channel.send(frame_)
        ends = [output for _ in range(2) for output in s.get(DEADLOCK).outputs]
        assert [(o.request_id, o.finish_reason) for o in ends] == [("a", FinishReason.ERROR), ("b", FinishReason.ERROR)]
        received(peer, Kind.ABORT, 2)
        eventually(lambda: "nobody has asked for" in caplog.text, DEADLOCK)
        assert len(caplog.records) == 2


def test_a_forked_copy_is_refused() -> None:
    """Every call says whose the client is."""
    with session() as (s, _):
        s.owner_pid += 1
        for operation in (s.ensure_alive, lambda: s.get(0), lambda: s.abort(["a"]), lambda: s.add(make_request("a"))):
            with pytest.raises(ForeignProcessError):
                operation()
        s.owner_pid -= 1


def answer(peer: Peer, key: int, name: str, *tokens: int, reason: FinishReason | None = None) -> None:
    """Send an output as an engine does."""
    rows = [EngineCoreOutput(name, list(tokens), finish_reason=reason)]
    frame, _ = encode_outputs(EngineCoreOutputs(peer.link.rank, rows), {name: key})
    assert frame is not None
    peer.channel.send(frame)


def test_requests_and_aborts_go_to_their_ranks() -> None:
    """Each rank gets the requests for it, and of an abort that names many only its own."""
    with played_session(3) as (s, peers):
        for name, rank in (("a", 0), ("b", 2), ("c", 2)):
            s.add(make_request(name, data_parallel_rank=rank))
        s.add(make_request("d", data_parallel_rank=1))
        keys = {
            rank: [frame.ref for frame in received(peers[rank], Kind.ADD, n)] for rank, n in ((0, 1), (1, 1), (2, 2))
        }
        s.abort(["a", "b", "c", "nobody"])
        assert decode_abort(received(peers[0], Kind.ABORT)[0]) == keys[0]
        assert sorted(decode_abort(received(peers[2], Kind.ABORT)[0])) == keys[2]
        assert not list(peers[1].channel.receive())
        answer(peers[2], keys[2][0], "b", 1)
        answer(peers[1], keys[1][0], "d", 2)
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("d", [2])]


def test_outputs_of_a_stream_are_not_for_get() -> None:
    """They wait in its own queue; taken back, its request is aborted, and what still comes of it is dropped."""
    with session() as (s, peer):
        key = s.in_flight.new_key()
        queue = s.stream_queue(key)
        s.add(make_request("a"), key, queue)
        s.add(make_request("b"))
        first, second = (frame.ref for frame in received(peer, Kind.ADD, 2))
        assert first == key
        answer(peer, first, "a", 1)
        answer(peer, second, "b", 2)
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("b", [2])]
        assert queue.get(Deadline(DEADLOCK), []).outputs == [EngineCoreOutput("a", [1])]
        s.take_back(key)
        assert decode_abort(received(peer, Kind.ABORT)[0]) == [key]
        answer(peer, first, "a", 1)
        answer(peer, second, "b", 3)
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("b", [3])]
        s.take_back(key)
        assert len(s.streams) == 0


def test_statistics_that_nobody_takes_do_not_pile_up() -> None:
    """Where there are streams only, batches of which nothing is left are dropped until somebody takes outputs."""
    with session() as (s, peer):
        key = s.in_flight.new_key()
        queue = s.stream_queue(key)
        s.add(make_request("a"), key, queue)
        received(peer, Kind.ADD)
        for _ in range(3):
            answer(peer, key, "a", 1)
        for _ in range(3):
            queue.get(Deadline(DEADLOCK), [])
        assert s.outputs.queue.empty()


def test_the_requests_of_owners_that_are_gone_are_aborted() -> None:
    """Theirs and nobody else's, on every rank."""
    with played_session(2) as (s, peers):
        owner = object()
        prompt = s.check(make_request("a"))
        for rank in (0, 1):
            s.place(s.links[rank], make_request(f"theirs {rank}"), prompt, owner=owner)
            s.add(make_request(f"mine {rank}", data_parallel_rank=rank))
        s.abort_of([owner, object()])
        for peer in peers:
            frames: list[Frame] = []
            eventually(
                lambda found=frames, peer=peer: found.extend(peer.channel.receive()) or len(found) == 3, DEADLOCK
            )  # type: ignore[misc]
            assert [frame.kind for frame in frames] == [Kind.ADD, Kind.ADD, Kind.ABORT]
            assert decode_abort(frames[2]) == [frames[0].ref]
        assert sorted(s.in_flight.keys_of(["mine 0", "mine 1"]).values()) == [0, 1]
        assert len(s.in_flight) == 2


def test_the_loss_of_a_rank_fails_what_it_had() -> None:
    """Its requests end with reason ERROR and the text, its streams and calls with the error; all else goes on."""
    with played_session(2, on_engine_death="continue") as (s, peers):
        s.add(make_request("a", data_parallel_rank=1))
        s.add(make_request("b", data_parallel_rank=0))
        key = s.in_flight.new_key()
        queue = s.stream_queue(key)
        s.add(make_request("s", data_parallel_rank=1), key, queue)
        (frame,) = received(peers[0], Kind.ADD)
        losses: list[int] = []
        s.on_loss = lambda rank, ending: losses.append(rank)
        pending = call(s, "x")
        peers[1].link.handle.kill()
        (output,) = s.get(DEADLOCK).outputs
        assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
        assert str(output.stop_reason).startswith("EngineDeadError: engine core 1")
        with pytest.raises(EngineDeadError, match="engine core 1"):
            queue.get(Deadline(DEADLOCK), [])
        assert isinstance(pending.replies[1].exception(DEADLOCK), EngineDeadError)
        assert not pending.replies[0].done()
        pending.discard()
        answer(peers[0], frame.ref, "b", 7)
        assert s.get(DEADLOCK).outputs == [EngineCoreOutput("b", [7])]
        eventually(lambda: losses == [1], DEADLOCK)
        s.add(make_request("a"))
        assert len(received(peers[0], Kind.ADD)) == 1
        assert (s.state, s.in_flight.count(0)) == ("running", 2)
        with pytest.raises(EngineDeadError, match="engine core 1"):
            s.add(make_request("c", data_parallel_rank=1))


def test_a_request_for_an_engine_that_dies_under_it_goes_elsewhere() -> None:
    """Where the pipe is broken in the middle of the send, another rank gets the request, and the user hears nothing."""
    with played_session(2, on_engine_death="continue") as (s, peers):
        s.router.choose = lambda _: s.links[1 if 1 not in s.router.closed else 0]  # type: ignore[method-assign]
        peers[1].link.handle.kill()
        peers[1].channel.close()
        s.add(make_request("a"))
        assert s.in_flight.ranks_of(s.in_flight.of_rank(0)) == {received(peers[0], Kind.ADD)[0].ref: 0}
        assert s.in_flight.count(1) == 0


def test_a_request_for_a_rank_that_dies_once_it_was_chosen_goes_elsewhere() -> None:
    """The death is dealt with before the request gets into the table, where nobody would look for it any more."""
    with played_session(2, on_engine_death="continue") as (s, peers):
        choose, link = s.router.choose, peers[1].link

        def choose_and_die(request: Any) -> Any:
            s.router.choose = choose  # type: ignore[method-assign]
            link.handle.kill()
            eventually(link.over.done, DEADLOCK)
            return link

        s.router.choose = choose_and_die  # type: ignore[method-assign]
        s.add(make_request("a"))
        assert s.in_flight.ranks_of(s.in_flight.of_rank(0)) == {received(peers[0], Kind.ADD)[0].ref: 0}
        assert s.in_flight.count(1) == 0


def test_a_request_for_a_rank_that_is_closed_once_it_was_chosen_goes_elsewhere() -> None:
    """A rank that is about to leave gets nothing more, however late that became known."""
    with played_session(2) as (s, peers):
        choose = s.router.choose

        def choose_and_close(request: Any) -> Any:
            s.router.choose = choose  # type: ignore[method-assign]
            s.router.closed.add(1)
            return peers[1].link

        s.router.choose = choose_and_close  # type: ignore[method-assign]
        s.add(make_request("a"))
        assert s.in_flight.ranks_of(s.in_flight.of_rank(0)) == {received(peers[0], Kind.ADD)[0].ref: 0}
        assert s.in_flight.count(1) == 0


def test_without_any_rank_left_requests_are_refused() -> None:
    """All are dead and none comes back: the last death is told; about to come back: the same, for now."""
    for policy, state in (("continue", "dead"), ("restart", "running")):
        with played_session(2, on_engine_death=policy) as (s, peers):
            for peer in peers:
                peer.link.handle.kill()
            eventually(lambda s=s: s.state == "dead" or len(s.deaths) == 2, DEADLOCK)  # type: ignore[misc]
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                s.add(make_request("a"))
            assert s.state == state


def told(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, of each wait that the reader is told of, whether it is for an answer."""
    found: list[bool] = []
    monkeypatch.setattr(reader_of(client), "expect", lambda *, is_answer, can_read: found.append(is_answer))
    return found


def nap(worker: Any) -> None:
    """Take so long that the caller waits before the answer is there."""
    time.sleep(0.3)


def test_who_asks_and_waits_for_the_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing else is under way; what comes by itself, as further tokens do, is no answer."""
    with scripted_client(Script(step_seconds=0.3)) as client:
        found = told(client, monkeypatch)

        def waits(function: Callable[[], Any]) -> list[bool]:
            found.clear()
            function()
            return found

        def add_two() -> None:
            client.add_request(make_request("b", 1))
            client.add_request(make_request("c", 1))
            collect(client, 2)

        assert waits(lambda: client.collective_rpc(nap)) == [True]
        client.add_request(make_request("a", 3))
        assert waits(client.get_output) == [True]
        assert True not in waits(client.get_output)
        assert waits(lambda: client.call_utility("echo", 2)) == [False]
        client.get_output()
        assert set(waits(add_two)) == {False}
        with client.stream(make_request("d", 2)) as stream:
            assert waits(lambda: next(stream)) == [True]
            assert True not in waits(lambda: next(stream))
        client.add_request(make_request("e", 100_000))
        client.abort_requests(["e"])
        found.clear()
        with pytest.raises(TimeoutError):
            client.get_output(timeout=0.3)
        assert found == []  # there was nothing to wait for


def test_a_coroutine_that_waits_for_an_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a blocking caller does."""

    async def use(client: Any, found: list[bool]) -> None:
        await client.add_request_async(make_request("a", 2))
        await client.get_output_async()
        assert found == [True]
        await client.get_output_async()
        assert True not in found[1:]
        found.clear()
        await client.collective_rpc_async(nap)
        assert found == [True]
        assert len([output async for output in client.stream(make_request("b", 2))]) == 2
        assert found[:2] == [True, True]
        assert True not in found[2:]

    with scripted_client(Script(step_seconds=0.3), colour="async") as client:
        asyncio.run(use(client, told(client, monkeypatch)))
