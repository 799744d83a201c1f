"""The life of an engine: the table is complete, leads one way, and refuses without a trace."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engine_client.errors import LocalProtocolError, RemoteProtocolError
from engine_client.protocol.frames import Kind
from engine_client.protocol.lifecycle import (
    FROM_CLIENT,
    FROM_ENGINE,
    TRANSITIONS,
    Action,
    Event,
    Lifecycle,
    State,
)

STARTED = [(Kind.HELLO, Action.CONFIGURE), (Kind.INIT, Action.SEND), (Kind.READY, Action.SERVE)]


def step(life: Lifecycle, what: int) -> Action:
    if what in FROM_CLIENT:
        return life.sending(what)
    if what in FROM_ENGINE:
        return life.received(what)
    return life.happened(Event(what))


def life_at(state: State) -> Lifecycle:
    """Lead a life to a state by legal moves."""
    life = Lifecycle("engine core 0")
    for what, _ in STARTED[: min(state, State.READY)]:
        step(life, what)
    if state >= State.DRAINING:
        life.happened(Event.CLOSE)
    if state is State.ENDED:
        life.happened(Event.EXIT)
    assert life.state is state
    return life


def test_an_ordinary_life():
    """From launch to the end, each step asks for what the client does then."""
    life = Lifecycle("engine core 0")
    taken: list[tuple[State, Action | None]] = [(life.state, None)]
    for what in (
        Kind.HELLO,
        Kind.INIT,
        Kind.STATUS,
        Kind.STATUS,
        Kind.READY,
        Kind.ADD,
        Kind.OUTPUTS,
        Kind.UTILITY,
        Kind.REPLY,
        Event.CLOSE,
        Kind.SHUTDOWN,
        Kind.OUTPUTS,
        Kind.GOODBYE,
        Event.EOF,
        Event.EXIT,
    ):
        action = step(life, what)
        taken.append((life.state, action))
    assert taken == [
        (State.LAUNCHED, None),
        (State.HELLO, Action.CONFIGURE),
        (State.INIT, Action.SEND),
        (State.INIT, Action.REPORT),
        (State.INIT, Action.REPORT),
        (State.READY, Action.SERVE),
        (State.READY, Action.SEND),
        (State.READY, Action.DELIVER),
        (State.READY, Action.SEND),
        (State.READY, Action.DELIVER),
        (State.DRAINING, Action.ASK),
        (State.DRAINING, Action.SEND),
        (State.DRAINING, Action.DELIVER),
        (State.DRAINING, Action.KEEP),
        (State.DRAINING, Action.AWAIT_EXIT),
        (State.ENDED, Action.END),
    ]
    assert life.was_ready


def test_every_event_is_possible_in_every_state():
    """Processes end and users close when they like."""
    for state in State:
        for event in Event:
            life = life_at(state)
            assert type(life.happened(event)) is Action


def test_nothing_leads_back():
    """No move of the table leads to an earlier state, and ENDED leads nowhere."""
    for state, moves in TRANSITIONS.items():
        assert all(move.state >= state for move in moves.values())
    assert all(move == (State.ENDED, Action.IGNORE) for move in TRANSITIONS[State.ENDED].values())


def test_every_state_ends_with_the_process():
    """The exit ends any life, once."""
    for state in list(State)[:-1]:
        life = life_at(state)
        assert life.happened(Event.EXIT) is Action.END
        assert life.state is State.ENDED
        assert life.happened(Event.EXIT) is Action.IGNORE


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_a_frame_is_either_in_the_table_or_refused_without_a_trace(state, kind):
    """This side's forbidden frame is a local error, the engine's a remote one; the state stays."""
    life = life_at(state)
    allowed = kind in TRANSITIONS[state]
    if kind in FROM_CLIENT:
        assert life.may_send(kind) == allowed
        with pytest.raises(RemoteProtocolError, match=f"engine core 0 sent {kind.name} although it is {state.name}"):
            life.received(kind)
    else:
        assert not life.may_send(kind)
        with pytest.raises(LocalProtocolError, match=f"{kind.name} must not be sent to engine core 0"):
            life.sending(kind)
    assert life.state is state
    if allowed:
        move = TRANSITIONS[state][kind]
        assert (step(life, kind), life.state) == (move.action, move.state)
    else:
        with pytest.raises(LocalProtocolError if kind in FROM_CLIENT else RemoteProtocolError):
            step(life, kind)
        assert life.state is state


@pytest.mark.parametrize("number", [0, 16, 200, int(Event.EXIT)])
def test_numbers_that_are_no_kind_are_refused(number):
    """Neither an unknown number nor an event's passes for a frame."""
    life = life_at(State.READY)
    with pytest.raises(RemoteProtocolError, match=f"a frame of kind {number}"):
        life.received(number)
    with pytest.raises(LocalProtocolError, match=f"a frame of kind {number}"):
        life.sending(number)


@given(st.lists(st.sampled_from([*Kind, *Event])))
def test_any_sequence_keeps_the_rules(sequence):
    """The state never decreases, never skips READY unnoticed, and changes only with a legal move."""
    life = Lifecycle("engine core 0")
    ready = False
    for what in sequence:
        before = life.state
        try:
            action = step(life, what)
        except (LocalProtocolError, RemoteProtocolError):
            assert life.state is before
            assert what not in TRANSITIONS[before]
        else:
            assert (life.state, action) == TRANSITIONS[before][what]
            assert life.state >= before
        ready |= life.state is State.READY
        assert life.was_ready == ready


def test_requests_go_out_only_while_it_serves():
    """ADD, ABORT and UTILITY belong to READY; SHUTDOWN also to DRAINING."""
    for state in State:
        life = life_at(state)
        assert [life.may_send(kind) for kind in (Kind.ADD, Kind.ABORT, Kind.UTILITY)] == [state is State.READY] * 3
        assert life.may_send(Kind.SHUTDOWN) == (state in {State.READY, State.DRAINING})


def test_last_words_are_kept_and_what_follows_is_delivered():
    """DEAD, then outputs that were on their way, then the exit."""
    life = life_at(State.READY)
    assert life.received(Kind.DEAD) is Action.KEEP
    assert life.received(Kind.OUTPUTS) is Action.DELIVER
    assert life.happened(Event.DEADLINE) is Action.STOP
    assert life.happened(Event.EXIT) is Action.END


def test_a_start_that_fails_was_never_ready():
    """FAILED, a missed deadline, or a close during the start."""
    for what in (Kind.FAILED, Event.DEADLINE, Event.CLOSE, Event.VIOLATION):
        life = life_at(State.INIT)
        step(life, what)
        assert life.state is State.DRAINING
        assert life.received(Kind.READY) is Action.IGNORE
        assert life.happened(Event.EXIT) is Action.END
        assert not life.was_ready


def test_repr_tells_engine_and_state():
    """For a debugger."""
    assert repr(life_at(State.INIT)) == "<Lifecycle engine core 0 INIT>"
