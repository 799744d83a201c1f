"""Waves: the table is what the page says, and no interleaving of ranks loses a wake-up or tears them apart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from engine_client.errors import LocalProtocolError
from engine_client.protocol import waves as module
from engine_client.protocol.waves import TRANSITIONS, UNFINISHED, VOTE_EVERY, Action, Event, State, Waves
from helpers.ranks import Incident, Memory, Model


class Solo:
    """What a rank shares when a test plays all the others by writing into the memory."""

    def __init__(self, rank: int = 0, count: int = 2) -> None:
        self.rank = rank
        self.memory = Memory(count)
        self.log: list[str] = []

    def members(self):
        return self.memory.mask

    def started(self, rank):
        return self.memory.started[rank]

    def vote(self, rank, number):
        found, flags = self.memory.votes[rank][number & 1]
        return flags if found == number else None

    def has_left(self, rank):
        return self.memory.left[rank]

    def set_started(self, wave):
        self.log.append("started")
        self.memory.started[self.rank] = wave + 1

    def set_wave(self, wave, *, runs):
        self.memory.waves[self.rank] = wave, runs

    def set_vote(self, number, flags, rank=None):
        self.memory.votes[self.rank if rank is None else rank][number & 1] = number, flags

    def set_left(self, *, left):
        self.memory.left[self.rank] = left

    def ring(self):
        self.log.append("ring")
        self.memory.bytes += 1

    def is_ringing(self):
        return self.memory.bytes > 0

    def hush(self):
        self.log.append("hush")
        self.memory.bytes = 0


def to_vote(waves: Waves, *, unfinished: bool = False) -> None:
    """Step until the next vote is cast."""
    while waves.state is State.RUNNING:
        assert waves.look(has_work=False) is Action.STEP
        waves.stepped(unfinished=unfinished)


def happened(waves: Waves, event: Event) -> Action:
    """Have an event happen that ``look`` may not be able to find here."""
    return waves._happened(event)  # noqa: SLF001  # no other way to what is forbidden


def begin(solo: Solo, state: State) -> Waves:
    """Lead a rank to a state by legal moves."""
    waves = Waves(solo)
    if state in (State.RUNNING, State.VOTED):
        assert waves.look(has_work=True) is Action.START
    if state is State.VOTED:
        to_vote(waves)
    if state is State.LEFT:
        waves.leave()
    assert waves.state is state
    return waves


def test_a_wave_from_start_to_end():
    """Work starts a wave, every 32 steps there is a vote, and when nobody has work the number rises."""
    solo = Solo()
    waves = Waves(solo)
    assert waves.is_group_idle()
    assert waves.look(has_work=True) is Action.START
    assert solo.log == ["started", "ring"]
    assert solo.memory.waves[0] == (0, True)
    steps = 0
    for number, others in enumerate((UNFINISHED, 0)):
        for _ in range(VOTE_EVERY):
            assert waves.is_in_wave
            waves.stepped(unfinished=False)
            steps += 1
        assert waves.look(has_work=True) is Action.WAIT
        solo.set_vote(number, others, rank=1)
        assert waves.look(has_work=False) is (Action.STEP if others else Action.COMPLETE)
    assert (waves.state, waves.wave, steps) == (State.IDLE, 1, 2 * VOTE_EVERY)
    assert solo.memory.waves[0] == (1, False)
    assert waves.look(has_work=False) is Action.SLEEP


def test_a_rank_joins_a_wave_that_was_started():
    """An idle rank without work joins; it neither stores nor rings."""
    solo = Solo(rank=1)
    waves = Waves(solo)
    solo.memory.started[0] = 1
    assert not waves.is_group_idle()
    assert waves.look(has_work=False) is Action.JOIN
    assert solo.log == []
    assert waves.look(has_work=False) is Action.STEP


def test_an_old_wave_does_not_wake():
    """The waves that are over, the last one included, are no reason to join."""
    solo = Solo()
    waves = Waves(solo, wave=3, number=7)
    solo.memory.started[1] = 3
    assert waves.look(has_work=False) is Action.SLEEP
    solo.memory.started[1] = 4
    assert waves.look(has_work=False) is Action.JOIN


def test_only_the_lowest_hushes_the_bell():
    """A higher rank waits while the bell rings for nothing; the lowest ends that; one that left is not the lowest."""
    solo = Solo(rank=1)
    waves = Waves(solo)
    assert not waves.is_lowest()
    solo.ring()
    assert waves.look(has_work=False) is Action.WAIT
    solo.memory.bytes = 0
    assert waves.look(has_work=False) is Action.SLEEP
    solo.ring()
    solo.memory.left[0] = True
    assert waves.is_lowest()
    assert waves.look(has_work=False) is Action.SLEEP
    assert solo.memory.bytes == 0


def test_a_swallowed_ring_is_rung_again():
    """If a wave was started just before the bell was hushed, the lowest rank rings for the others and joins."""

    class Racing(Solo):
        def hush(self):
            self.memory.started[1] = 1
            self.memory.bytes += 1
            super().hush()

    solo = Racing()
    assert Waves(solo).look(has_work=False) is Action.JOIN
    assert solo.memory.bytes == 1


def test_who_left_has_no_work():
    """A rank that left without a vote is not waited for; a vote that it cast before counts."""
    solo = Solo()
    waves = begin(solo, State.VOTED)
    assert waves.look(has_work=False) is Action.WAIT
    solo.memory.left[1] = True
    solo.set_vote(0, UNFINISHED, rank=1)
    assert waves.look(has_work=False) is Action.STEP
    to_vote(waves)
    assert waves.look(has_work=False) is Action.COMPLETE


@pytest.mark.parametrize("state", State)
def test_leaving(state):
    """A rank can leave from anywhere, also while votes are missing, and then says so; it leaves once."""
    solo = Solo()
    waves = begin(solo, state)
    if state is State.LEFT:
        with pytest.raises(LocalProtocolError, match="LEAVE cannot happen to rank 0, which is LEFT"):
            waves.leave()
    else:
        waves.leave()
    assert solo.memory.left[0]
    assert not waves.is_in_wave
    assert not solo.memory.waves[0][1]


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_the_table_does_not_allow_changes_nothing(state, event):
    """Each pair moves as the table says; an illegal one raises, and state, numbers and memory are what they were."""
    solo = Solo()
    waves = begin(solo, state)
    before = repr(waves), vars(solo.memory).copy()
    move = TRANSITIONS[state].get(event)
    if move is not None:
        assert happened(waves, event) is move.action
        assert waves.state is move.state
    else:
        with pytest.raises(LocalProtocolError, match=f"{event.name} cannot happen"):
            happened(waves, event)
        assert (repr(waves), vars(solo.memory)) == before


@pytest.mark.parametrize("state", [State.IDLE, State.VOTED, State.LEFT])
def test_a_step_outside_of_its_time_is_refused(state):
    """A step that the group does not make is this side's mistake."""
    waves = begin(Solo(), state)
    with pytest.raises(LocalProtocolError):
        waves.stepped(unfinished=True)


def test_nothing_leads_back_from_left():
    """LEFT is final, and every other state can be left."""
    assert TRANSITIONS[State.LEFT] == {}
    assert all(Event.LEAVE in moves for state, moves in TRANSITIONS.items() if state is not State.LEFT)
    assert "RUNNING" in repr(begin(Solo(), State.RUNNING))


# -- the model: real ranks, every interleaving -------------------------------------------------------------------------

KINDS = ("add", "add", "add", "pause", "resume", "leave")
incidents = st.builds(
    Incident,
    after=st.sampled_from((0, 1, 2, 3, 5, 10, 40, 100)),
    rank=st.integers(0, 3),
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 7),
)


@pytest.fixture(autouse=True)
def _frequent_votes(request, monkeypatch):
    """Have the model vote every other step, so that many waves fit into one example."""
    if request.node.name.startswith("test_model"):
        monkeypatch.setattr(module, "VOTE_EVERY", 2)


def check_group(count: int, seed: int, happens: list[Incident], make=Waves) -> None:
    """Play what happens, then resume everybody; the group must come to rest each time, with everything done."""
    with Model(count, seed, make) as model:
        model.play(happens)
        model.check_rest()
        model.play([Incident(0, rank.rank, "resume") for rank in model.alive()])
        model.check_rest()
        assert all(rank.work == 0 for rank in model.alive())


@settings(deadline=None, max_examples=120)
@given(count=st.integers(2, 4), seed=st.integers(0, 1 << 30), happens=st.lists(incidents, max_size=10))
def test_model_no_interleaving_loses_a_wake_up(count, seed, happens):
    """Whatever arrives, pauses, resumes and leaves whenever: all work ends, all make the same steps, all sleep."""
    check_group(count, seed, happens)


@settings(deadline=None, max_examples=40)
@given(count=st.integers(2, 4), seed=st.integers(0, 1 << 30), happens=st.lists(incidents, max_size=6))
def test_model_nobody_goes_on_without_a_rank_that_died(count, seed, happens):
    """After a rank has died in a wave the others complete none, however long they wait, and can leave."""
    with Model(count, seed) as model:
        model.play(happens)
        survivors = model.alive()
        if len(survivors) < 2:
            return
        dead, *others = survivors
        others[0].inbox.append(Incident(0, 0, "resume"))
        others[0].inbox.append(Incident(0, 0, "add", 3))
        dead.kill()
        before = [len(rank.completed) for rank in others]
        for _ in range(1500):
            model.one_turn()
        assert [len(rank.completed) for rank in others] == before
        assert others[0].waves.is_in_wave
        for rank in others:
            rank.inbox.append(Incident(0, 0, "leave"))
        model.play([])
        assert model.alive() == []


class LooksBeforeHushing(Waves):
    """Wrong: a ring between the look and the hush is swallowed."""

    def _find(self, *, has_work):
        if has_work:
            return Event.WORK
        if self._is_started():
            return Event.STARTED
        if not self.is_lowest():
            return Event.STALE if self._shared.is_ringing() else Event.QUIET
        self._shared.hush()
        return Event.QUIET


class RingsBeforeStoring(Waves):
    """Wrong: whoever is woken may find no reason, and hush the bell."""

    def look(self, *, has_work):
        if has_work and self.state is State.IDLE:
            self._shared.ring()
            ring, self._shared.ring = self._shared.ring, lambda: None
            try:
                return super().look(has_work=has_work)
            finally:
                self._shared.ring = ring
        return super().look(has_work=has_work)


class EverybodyHushes(Waves):
    """Wrong: whoever hushes without ringing again takes the ring from those who have not heard it."""

    def _find(self, *, has_work):
        self._shared.hush()
        return super()._find(has_work=has_work)


class SleepsWhileItRings(Waves):
    """Wrong: a rank that the bell keeps awake spins until the lowest rank comes to hush it."""

    def _find(self, *, has_work):
        event = super()._find(has_work=has_work)
        return Event.QUIET if event is Event.STALE else event


class LooksForVotesFirst(Waves):
    """Wrong: a vote that is cast between the two looks is not counted by this rank, but by the others."""

    def _count(self):
        votes = {rank: self._shared.vote(rank, self._number) for rank in self._members()}
        if any(flags is None and not self._shared.has_left(rank) for rank, flags in votes.items()):
            return Event.MISSING
        self._number += 1
        return Event.GO if any(votes.values()) else Event.AGREED


def arrives(after: int) -> list[Incident]:
    """A request comes while the others are about to sleep."""
    return [Incident(after, 1, "add", 1)]


def comes_again(after: int) -> list[Incident]:
    """The second request comes about when the first wave ends."""
    return [Incident(0, 1, "add", 1), Incident(after, 1, "add", 1)]


def leaves(after: int) -> list[Incident]:
    """A rank leaves with work that it has just voted for."""
    return [Incident(0, 0, "add", 9), Incident(after, 0, "leave")]


@pytest.mark.parametrize(
    ("make", "case", "seed", "after"),
    [
        (LooksBeforeHushing, arrives, 0, 8),
        (RingsBeforeStoring, arrives, 9, 21),
        (EverybodyHushes, comes_again, 1, 121),
        (SleepsWhileItRings, arrives, 0, 24),
        (LooksForVotesFirst, leaves, 2, 67),
    ],
)
def test_model_finds_a_wrong_order(make, case, seed, after):
    """The check is sharp: each of the orders that the rules forbid is found out, and the right one is not."""
    check_group(3, seed, case(after))
    with pytest.raises(AssertionError, match=r"does not come to rest|wakes a rank twice"):
        check_group(3, seed, case(after), make)
