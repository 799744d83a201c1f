"""Callers who read what they wait for by themselves get the same as from the reader, whatever comes in between."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from engine_client import EngineDeadError, FinishReason
from engine_client.clients.session import Session
from engine_client.deadline import Deadline
from engine_client.messages import EngineCoreOutput, EngineCoreOutputs
from engine_client.protocol.batch import Columns, decode_columns, encode_outputs
from engine_client.protocol.frames import Frame, Kind
from engine_client.protocol.wire import encode_log, encode_reply
from engine_client.testing.scripted import Script
from helpers.calls import call, played_session
from helpers.clients import collect, make_request, scripted_client, session_of
from helpers.interrupts import act_everywhere
from helpers.loans import be_patient, call_until_lent, have_lent, take_back
from helpers.peers import Peer
from helpers.timing import DEADLOCK, eventually, took_at_most


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a machine that is busy elsewhere be quick enough; a loan ends when somebody needs the reader, or is asked."""
    be_patient(monkeypatch)


@contextmanager
def lent_client(**options: Any) -> Iterator[Any]:
    with scripted_client(Script(step_seconds=0), **options) as client:
        call_until_lent(client)
        yield client


@contextmanager
def lent_session() -> Iterator[tuple[Session, Peer]]:
    """A session whose engine is played by the test, and whose reader stands aside."""
    with played_session(spin_us=DEADLOCK * 1e6) as (session, (peer,)):
        eventually(lambda: have_lent(session), DEADLOCK)
        yield session, peer


def outputs_of(session: Session, name: str, tokens: list[int], *, last: bool = True) -> Frame:
    output = EngineCoreOutput(name, tokens, finish_reason=FinishReason.LENGTH if last else None)
    (key,) = session.in_flight.keys_of([name])
    frame, _ = encode_outputs(EngineCoreOutputs(0, [output]), {name: key})
    assert frame is not None
    return frame


def told_by_reader(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """Return a list that gets every frame which the reader delivers."""
    session, found = session_of(client), []
    deliver = session.on_frames
    monkeypatch.setattr(session, "on_frames", lambda rank, frames: (found.extend(frames), deliver(rank, frames)))
    return found


def test_calls_and_requests_in_quick_succession_need_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what is its own, in order, and nothing stays in any table."""
    with lent_client() as client:
        found = told_by_reader(client, monkeypatch)
        assert [client.call_utility("echo", number) for number in range(50)] == list(range(50))
        for number in range(50):
            client.add_request(make_request(f"r{number}", 1))
            (output,) = client.get_output(timeout=DEADLOCK).outputs
            assert (output.request_id, len(output.new_token_ids)) == (f"r{number}", 1)
            assert output.finish_reason is FinishReason.LENGTH
        session = session_of(client)
        assert found == []
        assert (len(session.in_flight), len(session.calls)) == (0, 0)
        assert session.links[0].meter.total == 50
        assert not session.callers


def test_errors_of_a_utility_reach_the_caller_who_reads() -> None:
    """As from the reader: the engine's own exception, and the next call works."""
    with lent_client() as client:
        with pytest.raises(AttributeError, match="no utility 'nothing'"):
            client.call_utility("nothing")
        assert client.call_utility("echo", 1) == 1


def test_what_has_buffers_or_is_large_is_left_to_the_reader() -> None:
    """A caller reads small frames only; others come to it all the same."""
    with lent_client() as client:
        for size in (10, 1 << 12, 1 << 16, 1 << 20):
            payload = os.urandom(size)
            assert client.call_utility("echo", payload) == payload
            call_until_lent(client)


def test_requests_that_get_more_tokens_are_complete() -> None:
    """The first output is read by the caller, those behind it by whoever is there."""
    with lent_client() as client:
        for number in range(20):
            client.add_request(make_request(f"r{number}", 20))
            outputs = collect(client, 1, DEADLOCK)[f"r{number}"]
            assert sum(len(output.new_token_ids) for output in outputs) == 20


def test_a_frame_that_another_waits_for_is_delivered() -> None:
    """Who waits for a reply leaves outputs, logs and other replies to the reader, and gets its own behind them."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        other = call(session, "other")
        fan_out = call(session, "mine")
        peer.channel.send(outputs_of(session, "a", [7]))
        peer.channel.send(encode_log("engine_client.engine", 10, "a line"))
        peer.channel.send(encode_reply(other.ids[0], "other"))
        peer.channel.send(encode_reply(fan_out.ids[0], "mine"))
        session.await_reply(fan_out.ids, _deadline())
        assert fan_out.wait(_deadline()) == ["mine"]
        assert other.wait(_deadline()) == ["other"]
        assert [output.new_token_ids for output in session.get(DEADLOCK).outputs] == [[7]]


def test_the_reply_is_no_output_and_the_other_way_round() -> None:
    """A frame of the other kind, which is first, is the reader's, and so is what comes behind it."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        peer.channel.send(encode_reply(77, "nobody's"))
        peer.channel.send(outputs_of(session, "a", [7]))
        assert [output.new_token_ids for output in session.get(DEADLOCK).outputs] == [[7]]
    with lent_session() as (session, peer):
        fan_out = call(session, "mine")
        peer.channel.send(Frame(Kind.OUTPUTS, 0, 0, _stray()))
        peer.channel.send(encode_reply(fan_out.ids[0], "mine"))
        session.await_reply(fan_out.ids, _deadline())
        assert fan_out.wait(_deadline()) == ["mine"]


def test_a_batch_that_cannot_be_decoded_is_the_engine_s_death() -> None:
    """As the reader says it: with the cause, and not with pickle's error."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        peer.channel.send(Frame(Kind.OUTPUTS, 0, 0, b"garbage"))
        with took_at_most(5.0), pytest.raises(EngineDeadError, match="a frame cannot be used"):
            session.get(DEADLOCK)


def test_a_batch_that_ends_nothing_it_names_is_the_engine_s_death() -> None:
    """Though all of it can be decoded."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        header = pickle.dumps((0, 0.0, [1], [7], None, [(5, 1, None)], [], None))
        peer.channel.send(Frame(Kind.OUTPUTS, 0, 1, header))
        with took_at_most(5.0), pytest.raises(EngineDeadError, match="ends requests that it does not name"):
            session.get(DEADLOCK)


def test_what_the_reader_delivers_while_a_caller_polls_comes_first() -> None:
    """The caller has looked for outputs before they were there; the frame behind them stays where it is."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 2))
        first, second = outputs_of(session, "a", [1], last=False), outputs_of(session, "a", [2])

        def act() -> None:
            session.outputs.put(decode_columns(first))
            peer.channel.send(second)

        later = threading.Timer(0.1, act)
        later.start()
        found = [session.get(DEADLOCK).outputs[0].new_token_ids for _ in range(2)]
        later.join()
        assert found == [[1], [2]]


def test_a_stream_that_begins_while_a_caller_polls_has_its_outputs() -> None:
    """They are not the caller's, who waits for its own."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        key = session.in_flight.new_key()
        queue = session.stream_queue(key)

        def act() -> None:
            session.add(make_request("s", 1), key, queue)
            peer.channel.send(outputs_of(session, "s", [1]))
            peer.channel.send(outputs_of(session, "a", [2]))

        later = threading.Timer(0.1, act)
        later.start()
        assert [output.request_id for output in session.get(DEADLOCK).outputs] == ["a"]
        later.join()
        assert [output.request_id for output in queue.get(_deadline(), []).outputs] == ["s"]


def test_a_frame_in_hand_is_put_back() -> None:
    """What an interrupted call had taken, and not yet decoded, is the next one's."""
    with lent_session() as (session, _):
        session.add(make_request("a", 1))
        session.put_back([outputs_of(session, "a", [7])])
        assert [output.new_token_ids for output in session.get(DEADLOCK).outputs] == [[7]]


def test_nothing_is_lost_to_a_loan_that_ends_at_any_point() -> None:
    """Wherever a caller stands when the reader takes back what it has lent, the answer comes, once."""
    with lent_session() as (session, peer):
        names = iter(range(1_000_000))
        inside = False

        def operation() -> None:
            nonlocal inside
            eventually(lambda: have_lent(session), DEADLOCK)
            name = f"r{next(names)}"
            session.outputs.put(Columns(0, 0.0, [0], [5], None, [], []))  # of a request that was aborted
            inside = True
            session.add(make_request(name, 1))
            peer.channel.send(outputs_of(session, name, [7]))
            outputs = session.get(DEADLOCK).outputs
            inside = False
            peer.channel.receive()
            assert [(output.request_id, output.new_token_ids) for output in outputs] == [(name, [7])]
            assert not session.outputs.has_news

        assert act_everywhere(operation, lambda: inside and take_back(session)) > 50


def test_a_death_ends_the_wait_of_who_reads() -> None:
    """The reader sees the exit though the caller polls; what was sent before is delivered."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        killer = threading.Timer(0.2, peer.link.handle.kill)
        killer.start()
        with took_at_most(0.2 + 2.0), pytest.raises(EngineDeadError, match="SIGKILL"):
            session.get(DEADLOCK)
        killer.join()


def test_the_end_of_the_stream_ends_it_too() -> None:
    """An engine that closes its channel while a caller polls."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        closer = threading.Timer(0.2, peer.channel.close)
        closer.start()
        with took_at_most(0.2 + 2.0), pytest.raises(EngineDeadError):
            session.get(DEADLOCK)
        closer.join()


def test_a_client_is_closed_while_somebody_reads() -> None:
    """``shutdown`` on another thread ends the wait, and takes no longer than it does otherwise."""
    with lent_session() as (session, _):
        session.add(make_request("a", 1))
        closer = threading.Timer(0.2, session.close, (0.0,))
        closer.start()
        with took_at_most(0.2 + 2.0), pytest.raises(EngineDeadError, match="closed"):
            session.get(DEADLOCK)
        closer.join()


def on_alarm(act: Callable[[], object]) -> Any:
    """Have something done by a signal handler, in a moment; return what undoes that."""

    def handle(number: int, frame: FrameType | None) -> None:
        act()

    old = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return lambda: (signal.setitimer(signal.ITIMER_REAL, 0), signal.signal(signal.SIGALRM, old))


def test_a_handler_may_call_while_its_thread_reads() -> None:
    """The inner call takes the loan from the outer one, which then gets its own answer from the reader."""
    with lent_session() as (session, peer):
        session.add(make_request("a", 1))
        inner: list[Any] = []

        def act() -> None:
            fan_out = call(session, "inner")
            peer.channel.send(encode_reply(fan_out.ids[0], "inner"))
            session.await_reply(fan_out.ids, _deadline())
            inner.extend(fan_out.wait(_deadline()))
            peer.channel.send(outputs_of(session, "a", [7]))

        undo = on_alarm(act)
        try:
            assert [output.new_token_ids for output in session.get(DEADLOCK).outputs] == [[7]]
        finally:
            undo()
        assert inner == ["inner"]


def test_a_handler_s_error_leaves_the_answer_to_the_next_call() -> None:
    """A TimeoutError of a handler comes out as it is, however deep the caller was, and nothing is lost."""
    with lent_client() as client:

        def ring() -> None:
            raise TimeoutError("alarm")

        client.pause_scheduler("keep")
        client.add_request(make_request("a", 1))
        undo = on_alarm(ring)
        try:
            with pytest.raises(TimeoutError, match="alarm"):
                client.get_output(timeout=DEADLOCK)
        finally:
            undo()
        client.resume_scheduler()
        assert [output.request_id for output in client.get_output(timeout=DEADLOCK).outputs] == ["a"]


def test_threads_that_all_call_in_quick_succession(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loans come and go between them; each gets its own answers."""
    be_patient(monkeypatch, short=1e-3, tick=1e-3)
    with lent_client() as client:
        found: list[bool] = []

        def use(base: int) -> None:
            found.append(all(client.call_utility("echo", base + n, timeout=DEADLOCK) == base + n for n in range(300)))

        threads = [threading.Thread(target=use, args=(1000 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLOCK)
        assert found == [True] * 4
        assert len(session_of(client).calls) == 0


def test_a_stream_has_its_outputs_though_the_channel_was_lent() -> None:
    """Its rows are sorted out by the reader."""
    with lent_client() as client:
        for number in range(5):
            call_until_lent(client)
            with client.stream(make_request(f"s{number}", 3)) as stream:
                client.add_request(make_request(f"r{number}", 1))
                assert [o.request_id for o in client.get_output(timeout=DEADLOCK).outputs] == [f"r{number}"]
                assert sum(len(output.new_token_ids) for output in stream) == 3


def _deadline() -> Deadline:
    return Deadline(DEADLOCK)


def _stray() -> bytes:
    """Return a batch without rows, which says only that the engine knows a request that nobody else knows."""
    frame, _ = encode_outputs(EngineCoreOutputs(0, [EngineCoreOutput("unknown", [1])]), {})
    assert frame is not None
    return bytes(frame.header)
