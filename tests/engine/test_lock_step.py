"""Ranks in lock-step, as real processes: all make the same steps, and agree on the end of a wave and on pauses."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from selectors import DefaultSelector

import pytest

from engine_client.config import EngineConfig
from engine_client.engine.lock_step import Alone, LockStep
from engine_client.interfaces import EngineContext
from engine_client.ipc.engine_fds import GroupFds
from engine_client.ipc.group_page import GroupMember, create_group
from engine_client.messages import FinishReason
from engine_client.protocol.frames import Kind
from engine_client.protocol.waves import VOTE_EVERY, Action
from engine_client.testing.scripted import TARGET, Script, ScriptedCore
from helpers.lockstep import lock_step, neighbour
from helpers.timing import DEADLOCK, eventually, took_at_most

# -- one rank, without a process ---------------------------------------------------------------------------------------


@contextmanager
def member(mask: int = 0b11, rank: int = 0):
    fds = create_group()
    member = GroupMember(GroupFds(*fds), rank)
    member.set_members(mask)
    try:
        yield member
    finally:
        member.close()


def scripted() -> ScriptedCore:
    return ScriptedCore(EngineConfig(), False, EngineContext())


def test_an_engine_on_its_own_steps_when_it_has_work():
    """Without a group there is nothing to wait for, to fill or to tell."""
    alone = Alone()
    assert alone.look(has_work=True) is Action.STEP
    assert alone.look(has_work=False) is Action.SLEEP
    alone.fill()
    alone.stepped(unfinished=True)
    assert (alone.is_needed, alone.completed_wave, repr(alone)) == (False, None, "<Alone>")
    with alone.listening(DefaultSelector()):
        alone.leave()


def test_an_engine_without_dummy_steps_is_refused():
    """An engine that cannot keep pace is refused at the start, with what it lacks."""
    with member() as held, pytest.raises(TypeError, match="has no execute_dummy_batch"):
        LockStep(object(), held)


def test_a_rank_that_is_no_member_sleeps_until_it_is_one():
    """A rank that the launcher has not named a member is not waited for, and takes part as soon as it looks as one."""
    with member(mask=0b10) as held:
        pace = LockStep(scripted(), held)
        assert pace.look(has_work=True) is Action.SLEEP
        assert not pace.is_needed
        assert pace.completed_wave is None
        pace.stepped(unfinished=True)
        pace.leave()
        with DefaultSelector() as selector, pace.listening(selector):
            assert not selector.get_map()
        held.set_members(0b11)
        assert pace.look(has_work=True) is not Action.SLEEP
        held.set_members(0b10)
        assert pace.look(has_work=True) is Action.SLEEP


def test_who_comes_later_takes_over_the_groups_numbers():
    """The first members begin with zero; a rank of a changed group begins with wave and round of the others."""
    with member() as held:
        other = neighbour(held, 1)
        other.set_wave(5, runs=False)
        other.set_vote(8, 0)
        assert "wave=0 round=0" in repr(LockStep(scripted(), held))
        held.set_members(0b11)
        assert "wave=5 round=9" in repr(LockStep(scripted(), held))
        held.set_members(0b01)
        assert "wave=0 round=0" in repr(LockStep(scripted(), held))
        other.close()


def test_a_rank_is_needed_as_soon_as_another_starts():
    """A rank must not leave a draining group between the start of a wave and its own first step."""
    with member() as held:
        pace = LockStep(scripted(), held)
        assert not pace.is_needed
        other = neighbour(held, 1)
        other.set_started(0)
        other.close()
        assert pace.is_needed
        assert pace.look(has_work=False) is Action.JOIN
        assert pace.is_needed


def test_the_bell_is_heard_only_while_listening():
    """The selector has the bell inside of the block alone, also when that is interrupted."""
    with member() as held, DefaultSelector() as selector:
        pace = LockStep(scripted(), held)
        held.ring()
        with pytest.raises(KeyboardInterrupt), pace.listening(selector):
            assert selector.select(0)
            raise KeyboardInterrupt
        assert not selector.get_map()


# -- real processes ----------------------------------------------------------------------------------------------------


def test_others_keep_pace_with_the_one_that_has_requests():
    """One rank serves, the others make as many dummy steps; then all sleep until a request to any rank wakes them."""
    with lock_step(3) as group:
        group[1].add(1, 40)
        assert group[1].wait_for(1) == FinishReason.LENGTH
        assert group[1].tokens[1] == 40
        group.settle(1)
        assert group.steps() == [2 * VOTE_EVERY] * 3
        assert [member.facts()["steps"] for member in group.members] == [0, 40, 0]
        group[2].add(1, 1, current_wave=99)
        group[2].wait_for(1)
        group.settle(2)
        group[0].add(1, 1, current_wave=0)
        group[0].wait_for(1)
        group.settle(3)
        assert group.steps() == [4 * VOTE_EVERY] * 3
        assert not group.page.is_running()
        eventually(lambda: group[0].poll() or group[0].waves == [0, 1, 2], DEADLOCK)
        assert group[1].waves == group[2].waves == []


def test_every_rank_is_built_for_its_own_place():
    """Before the executor is built, each process sets its rank in its own copy of the configuration."""
    with lock_step(2) as group:
        assert [member.facts()["built_for"] for member in group.members] == [(0, 0), (1, 1)]


def test_the_scripted_engine_keeps_pace():
    """A scripted engine counts the dummy steps that it makes for others."""
    with lock_step(2, target=TARGET, script=Script()) as group:
        group[0].add(1, 3)
        group[0].wait_for(1)
        group.settle(1)
        infos = [member.call("info") for member in group.members]
        assert [(info["steps"], info["dummy_steps"]) for info in infos] == [(3, VOTE_EVERY - 3), (0, VOTE_EVERY)]
        assert group[0].call("pause_scheduler", "keep") is None


def test_an_idle_group_sleeps():
    """Between waves no rank uses the processor, and nobody is woken twice by one ring."""
    with lock_step(3) as group:
        for wave in range(5):
            group[2].add(wave, 1)
            group[2].wait_for(wave)
            group.settle(wave + 1)
        eventually(lambda: all(m.call("is_scheduler_paused") is False for m in group.members), DEADLOCK)
        before = [member.cpu_seconds() for member in group.members]
        time.sleep(1)
        assert max(m.cpu_seconds() - b for m, b in zip(group.members, before, strict=True)) <= 0.05


def test_ranks_that_all_have_work_wait_for_nobody_else():
    """Many requests to all ranks at once end in whole waves, with the same number of steps everywhere."""
    with lock_step(4) as group:
        for key in range(20):
            for member in group.members:
                member.add(key, 1 + (7 * key + member.rank) % 50)
        for member in group.members:
            for key in range(20):
                assert member.wait_for(key) == FinishReason.LENGTH
                assert member.tokens[key] == 1 + (7 * key + member.rank) % 50
        eventually(lambda: not group.page.is_running(), DEADLOCK)
        assert len(set(group.steps())) == 1


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
@pytest.mark.parametrize("method", ["pause_scheduler", "sleep"])
def test_a_pause_is_complete_when_the_group_agrees(mode, method):
    """A paused rank stays in step while another has work, and is answered when that one is paused, too."""
    with lock_step(2, step_seconds=0.001) as group:
        paused, other = group[0], group[1]
        paused.add(1, 20 if mode == "wait" else 100_000)
        other.add(1, 100_000)
        for member in (paused, other):
            eventually(lambda member=member: member.poll() or member.tokens[1] > 0, DEADLOCK)
        args = (mode, True) if method == "pause_scheduler" else (1, mode)
        paused.ask(method, *args)
        tokens = other.tokens[1]
        eventually(lambda: other.poll() or other.tokens[1] > tokens + 3 * VOTE_EVERY, DEADLOCK)
        assert paused.find(Kind.REPLY) is None
        assert other.call("is_scheduler_paused") is False
        other.ask("pause_scheduler", "keep", False)
        assert paused.answer() is None
        assert other.answer() is None
        group.settle(1)
        assert len(set(group.steps())) == 1
        if mode != "keep":
            assert paused.wait_for(1) == (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)


def test_what_was_kept_goes_on_in_a_new_wave():
    """After a pause that froze a request, resuming its rank starts a wave that finishes it; the others need no call."""
    with lock_step(2, step_seconds=0.001) as group:
        group[0].add(1, 200)
        eventually(lambda: group[0].poll() or group[0].tokens[1] > 0, DEADLOCK)
        assert group[0].call("pause_scheduler", "keep", False) is None
        group.settle(1)
        assert 1 not in group[0].ended
        group[0].call("resume_scheduler")
        assert group[0].wait_for(1) == FinishReason.LENGTH
        group.settle(2)
        assert group[0].tokens[1] == 200
        assert len(set(group.steps())) == 1


def test_a_pause_that_is_not_complete_fails_when_resumed():
    """Whoever waits for the group to agree is told when the scheduler goes on instead."""
    with lock_step(2, step_seconds=0.001) as group:
        group[1].add(1, 100_000)
        eventually(lambda: group[1].poll() or group[1].tokens[1] > 0, DEADLOCK)
        group[0].ask("pause_scheduler", "keep")
        assert group[0].call("is_scheduler_paused") is True
        group[0].ask("resume_scheduler")
        with pytest.raises(RuntimeError, match="resumed before the pause was complete"):
            group[0].answer() or group[0].answer()


def test_an_idle_group_pauses_and_sleeps_at_once():
    """With nothing to agree on there is no wave; a sleeping rank keeps pace without its executor."""
    with lock_step(2) as group:
        for member in group.members:
            assert member.call("pause_scheduler", "wait") is None
        assert group.steps() == [0, 0]
        assert group[0].call("sleep", 1) is None
        group[1].call("resume_scheduler")
        group[1].add(1, 3)
        assert group[1].wait_for(1) == FinishReason.LENGTH
        group.settle(1)
        assert group[0].facts()["dummy_steps"] == 0
        group[0].call("wake_up")


@pytest.mark.parametrize("how", ["SHUTDOWN", "SIGTERM"])
def test_a_shutdown_in_the_middle_of_a_wave(how):
    """All ranks end in order, within the bound, although each may be the last to vote."""
    with lock_step(3, step_seconds=0.001) as group:
        group[1].add(1, 100_000)
        eventually(lambda: group[1].poll() or group[1].tokens[1] > 40, DEADLOCK)
        with took_at_most(10):
            for member in group.members:
                member.ask_to_end() if how == "SHUTDOWN" else member.handle.terminate()
            assert [member.exit_code() for member in group.members] == [0, 0, 0]
        assert group[1].wait_for(1) == FinishReason.ABORT
        assert all(group.page.has_left(member.rank) for member in group.members)


def test_a_rank_leaves_although_a_peer_does_not_vote():
    """With a stopped peer the others still answer, then leave in order; a wave is not completed without it."""
    with lock_step(3) as group:
        os.kill(group[0].handle.pid, signal.SIGSTOP)
        group[1].add(1, 5)
        assert group[1].wait_for(1) == FinishReason.LENGTH
        assert group[2].call("is_scheduler_paused") is False
        before = [member.cpu_seconds() for member in group.members]
        time.sleep(0.5)
        assert max(m.cpu_seconds() - b for m, b in zip(group.members, before, strict=True)) <= 0.25
        assert group.page.wave(1) == group.page.wave(2) == (0, True)
        for member in group.members[1:]:
            member.ask_to_end()
        with took_at_most(10):
            assert [member.exit_code() for member in group.members[1:]] == [0, 0]


def test_a_rank_that_drains_is_not_left_alone():
    """With time to drain, ranks without work stay in step until the last request has ended; then all leave."""
    with lock_step(2, step_seconds=0.002, shutdown_timeout=DEADLOCK) as group:
        group[0].add(1, 300)
        eventually(lambda: group[0].poll() or group[0].tokens[1] > 0, DEADLOCK)
        for member in reversed(group.members):
            member.ask_to_end()
        assert [member.exit_code() for member in group.members] == [0, 0]
        assert group[0].wait_for(1) == FinishReason.LENGTH
        assert group[0].tokens[1] == 300
        assert group.page.wave(0) == group.page.wave(1) == (1, False)


def test_a_front_end_that_does_not_read_holds_up_its_own_rank_only():
    """A rank whose front-end is stalled makes dummy steps, so that others get on; it goes on when it is read again."""
    with lock_step(2, backlog_limit=1) as group:
        group[1].add(1, 1000)
        group[0].add(1, 2000)
        assert group[0].wait_for(1) == FinishReason.LENGTH
        assert group.page.is_running()
        assert group[1].wait_for(1) == FinishReason.LENGTH
        assert group[1].tokens[1] == 1000
        eventually(lambda: not group.page.is_running(), DEADLOCK)
        assert len(set(group.steps())) == 1


def test_a_wave_goes_on_without_ranks_that_left():
    """A rank that was shut down alone is not waited for, and the lowest of the others tells of complete waves."""
    with lock_step(3) as group:
        group[0].ask_to_end()
        assert group[0].exit_code() == 0
        group[2].add(1, 40)
        assert group[2].wait_for(1) == FinishReason.LENGTH
        eventually(lambda: group.page.wave(1) == group.page.wave(2) == (1, False), DEADLOCK)
        eventually(lambda: group[1].poll() or group[1].waves == [0], DEADLOCK)


def test_nobody_goes_on_without_a_rank_that_died():
    """After SIGKILL of one rank the others wait for the launcher to end the group, and can still be asked to leave."""
    with lock_step(2, step_seconds=0.001) as group:
        group[0].add(1, 100_000)
        eventually(lambda: group[0].poll() or group[0].tokens[1] > 0, DEADLOCK)
        group[1].handle.kill()
        assert group[1].exit_code() == -9
        group[0].call("is_scheduler_paused")
        group[0].poll()
        tokens = group[0].tokens[1]
        time.sleep(0.3)
        group[0].poll()
        assert group[0].tokens[1] <= tokens + VOTE_EVERY
        group[0].ask_to_end()
        assert group[0].exit_code() == 0
