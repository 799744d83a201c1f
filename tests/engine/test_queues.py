"""The queues of waiting requests: order, return of preempted ones, removal, and cost."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from engine_client.engine.queues import FcfsQueue, PriorityQueue, make_queue
from engine_client.engine.request import Request
from helpers.engines import make_request, num_entries


def request(name, priority=0, arrival=0.0, serial=0):
    return Request(make_request(name), [1], None, rank=(priority, arrival, serial))


def drain(queue):
    return [queue.pop().request_id for _ in range(len(queue))]


def test_policy_chooses_the_queue():
    """The policy's name stands for its queue."""
    assert isinstance(make_queue("fcfs"), FcfsQueue)
    assert isinstance(make_queue("priority"), PriorityQueue)


def test_first_come_first_served():
    """Requests leave in the order in which they came; preempted ones go before all others."""
    queue = FcfsQueue()
    for name in "abc":
        queue.push(request(name))
    queue.push_back(request("z"))
    queue.push_back(request("y"))
    assert queue.peek().request_id == "y"
    assert drain(queue) == ["y", "z", "a", "b", "c"]


def test_lowest_priority_number_first():
    """Priority comes first, then the time of arrival, then the order of arrival here."""
    queue = PriorityQueue()
    queue.push(request("later", 1, 5.0, 1))
    queue.push(request("late", 1, 5.0, 0))
    queue.push(request("urgent", -3, 9.0, 2))
    queue.push_back(request("early", 1, 1.0, 3))
    assert queue.peek().request_id == "urgent"
    assert drain(queue) == ["urgent", "early", "late", "later"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removed_requests_never_leave(policy):
    """A removed request is not counted and does not surface; a second removal does nothing."""
    queue = make_queue(policy)
    requests = [request(str(n), serial=n) for n in range(5)]
    for member in requests:
        queue.push(member)
    for _ in range(2):
        queue.remove(requests[0])
        queue.remove(requests[3])
    assert len(queue) == 3
    assert queue.peek() is requests[1]
    assert drain(queue) == ["1", "2", "4"]
    queue.remove(requests[1])


@given(st.lists(st.one_of(st.integers(-2, 2), st.none()), max_size=200))
def test_priority_queue_agrees_with_sorting(actions):
    """Whatever is added, removed and taken, the next request is always the one that sorting finds."""
    queue = PriorityQueue()
    live = []
    for serial, priority in enumerate(actions):
        if priority is not None:
            live.append(request(str(serial), priority, 0.0, serial))
            queue.push(live[-1])
        elif live and serial % 3:
            queue.remove(live.pop(serial % len(live)))
        elif live:
            live.remove(queue.pop())
        assert len(queue) == len(live)
        if live:
            assert queue.peek() is min(live, key=lambda member: member.rank)


def test_dead_entries_do_not_pile_up():
    """A storm of adds and aborts behind a blocked head leaves no entries behind."""
    queue = PriorityQueue()
    queue.push(request("head", -1))
    for serial in range(2000):
        member = request(str(serial), serial=serial)
        queue.push(member)
        queue.remove(member)
    assert num_entries(queue) < 100


@pytest.mark.timing
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_cost_does_not_grow_with_the_queue(policy):
    """Taking the next request and removing another take no longer among 20,000 than among 500."""

    def cost(number):
        queue = make_queue(policy)
        requests = [request(str(n), serial=n) for n in range(number)]
        for member in requests:
            queue.push(member)
        begin = time.perf_counter()
        for n in range(200):
            queue.peek()
            queue.pop()
            queue.remove(requests[-1 - n])
        return time.perf_counter() - begin

    assert min(cost(20_000) for _ in range(3)) < 10 * cost(500) + 0.02
